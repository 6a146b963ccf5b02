"""ColBench: tasks, dialogues and rewards (arXiv 2503.15478, section 3).  No torch in this file.

An agent talks for up to 10 turns with a human who knows what the finished work should do, and then hands
over an artifact, a python function or a web page.  The reward comes once, at the end.

Reading order
    1. Task, Turn, Trajectory     the paper's words as data
    2. Files                      the official JSONL schema, read and written here and nowhere else
    3. Protocol                   markers, prompts, what the human sees of an action
    4. Rollout                    many dialogues in lockstep
    5. Reward: unit tests         fraction of hidden tests whose value equals the reference's
    6. Reward: pictures           screenshots of two pages, and how alike they are
    7. Figures                    success, tests passed, 95 % intervals
    8. ColBench in miniature      generated tasks that a tiny model can learn in minutes
    9. The two tasks              what differs between backend programming and frontend design
"""

import codecs
import contextlib
import ctypes
import datetime
import errno
import functools
import gc
import hashlib
import importlib
import io
import itertools
import json
import math
import numbers
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import types
from collections import abc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple


class InputError(Exception):
    """Something the user gave is wrong.  The message is the one line that the user gets to see."""


# ---------------------------------------------------------------------------------------------------------
# 1. Task, Turn, Trajectory
#
# A Message is {"role": "system" | "user" | "assistant", "content": str}, as every chat template takes it.
# An assistant message may also carry
#     "output"      the raw action a_t, where "content" is what the human saw of it
#     "input"       the formatted prompt that a_t was sampled from (the official scripts read it)
#     "truncated"   True where a_t stopped at the length limit, so that it has no end-of-turn token
Message = dict


@dataclass(frozen=True)
class Task:
    """One row of ColBench.  `ground_truth` is the paper's c: for the human and the critic, never the agent."""

    problem_description: str
    ground_truth: str
    test_cases: dict[str, str] | None = None  # backend only: a name and a call each


@dataclass(frozen=True)
class Turn:
    """One decision: what the agent saw and what it said."""

    history: list[Message]  # o_t, without the agent's system prompt
    action: Message  # a_t


@dataclass
class Trajectory:
    """One dialogue.  `answer` is "" where the human left before there was one, `reward` None until computed.

    `failed` says why a server broke the dialogue off: it has no reward, and nothing learns from it.
    """

    task: Task
    dialogue: list[Message]
    answer: str
    reward: float | None = None
    failed: str | None = None

    @property
    def turns(self) -> list[Turn]:
        """The agent's decisions in order.  A history holds what was SEEN of the actions before."""
        return [
            Turn(visible(self.dialogue[:i]), message)
            for i, message in enumerate(self.dialogue)
            if message["role"] == "assistant"
        ]


def visible(messages: list[Message]) -> list[Message]:
    """The messages as the other side sees them: role and content, nothing else."""
    return [{"role": m["role"], "content": m["content"]} for m in messages]


# ---------------------------------------------------------------------------------------------------------
# 2. Files
HUB_DATASET = "facebook/collaborative_agent_bench"
HUB_TEST_TASKS = "backend_tasks/test.jsonl"
HUB_TRAJECTORIES = "colbench_code_offline_15k_llama8b.jsonl"

# A shape is a type; a set of words; [shape], a list; {field: shape}, an object, in which "field?" may be
# missing or null and ... stands for all other fields.  float is a finite number, (float,) also one that is not.
MESSAGE = {"role": {"system", "user", "assistant"}, "content": str, "output?": str, "truncated?": bool}
TASK_FIELDS = {"problem_description": str, "ground_truth": str, "test_cases": {...: str}}  # frontend rows have no test cases
TRAJECTORY_FIELDS = {"task": dict, "dialogue_history": [MESSAGE], "answer": str, "reward?": float, "failed?": str}


def check_shape(value, shape, where: str) -> None:
    """Raise InputError unless `value` has that shape, all the way down."""
    if isinstance(shape, dict):
        check_shape(value, dict, where)
        for name, inner in shape.items():
            bare = str(name).removesuffix("?")
            if name is ...:
                for other in [other for other in value if other not in shape]:
                    check_shape(value[other], inner, f"{where}, {other[:40]!r}")
            elif name != bare and value.get(bare) is None:
                continue
            elif bare not in value:
                expected = ", ".join(str(field) for field in shape if field is not ...)
                raise InputError(f"{where}: the field {name!r} is missing (expected {expected})")
            else:
                check_shape(value[bare], inner, f"{where}, {bare!r}")
    elif isinstance(shape, list):
        check_shape(value, list, where)
        for number, item in enumerate(value, 1):
            check_shape(item, shape[0], f"{where}, item {number}")
    elif isinstance(shape, set):
        if not isinstance(value, str) or value not in shape:
            raise InputError(f"{where}: expected one of {', '.join(sorted(shape))}, found {str(value)[:40]!r}")
    elif shape is float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e300:
            raise InputError(f"{where}: expected a finite number, found {str(value)[:40]!r}")
    elif not isinstance(value, shape):
        raise InputError(f"{where}: expected {NAMES.get(shape, 'a number')}, found {NAMES.get(type(value), 'null')}")


NAMES = {dict: "an object", list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number"}


def read_jsonl(path, shape: dict, check: Callable[[dict, str], None] | None = None) -> list[dict]:
    """The rows of a JSONL file.  InputError names the file, the line and what was expected of it.

    `check(row, where)` may raise for what a shape cannot say.  Of a field that is given twice the last one counts.
    """
    try:
        lines = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line.decode())
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: expected one JSON object in UTF-8 ({error})") from None
        check_shape(row, shape, where)
        if check:
            check(row, where)
        rows.append(row)
    if not rows:
        raise InputError(f"{path}: expected one JSON object a line, found none")
    return rows


@contextlib.contextmanager
def writing(path):
    """Around what writes `path`: a disk that is full or read-only is one line."""
    try:
        yield
    except Exception as error:  # OSError, or what safetensors and tokenizers raise in its place
        reason = getattr(error, "strerror", None) or str(error).split("\n")[0][:200]
        raise InputError(f"{path}: cannot be written ({reason})") from None


@contextlib.contextmanager
def whole(path):
    """A place aside to write to, renamed at the end: a reader sees the whole file or folder, or none."""
    aside = Path(f"{path}.tmp")
    with writing(path):
        try:
            yield aside
            os.replace(aside, path)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
            aside.unlink(missing_ok=True)


def write_whole(path, data: bytes) -> None:
    """Write a file, whole."""
    with whole(path) as aside:
        aside.write_bytes(data)


def write_jsonl(path, rows: list[dict]) -> None:
    """Write all rows, one a line."""
    write_whole(path, b"".join(map(json_line, rows)))


def json_line(row: dict) -> bytes:
    """A row as its line of a file.  Half a surrogate pair, which a server may send, becomes a question mark."""
    return json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def local_file(source: str, hub_file: str) -> Path:
    """`source` itself where it is a file; where it is a dataset's name, `hub_file` of it, from the hub."""
    if os.path.exists(source):
        return Path(source)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", source) or source.endswith((".jsonl", ".json")):
        raise InputError(f"{source}: no such file (a dataset on the hub is named owner/name)")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(source, hub_file, repo_type="dataset"))
    except Exception as error:  # the hub's client raises a dozen kinds, all of them "could not get it"
        reason = str(error).strip().split("\n")[0][:200]
        raise InputError(f"{source}: neither a file here nor {hub_file} of a dataset on the hub: {reason}") from None


def load_tasks(source: str | Path, fields: dict = TASK_FIELDS) -> list[Task]:
    """Official task rows from a JSONL file, or the test tasks of a dataset on the hub."""
    rows = read_jsonl(local_file(str(source), HUB_TEST_TASKS), fields)
    return [Task(**{name: row[name] for name in fields}) for row in rows]


def load_trajectories(source: str | Path, fields: dict = TASK_FIELDS) -> list[Trajectory]:
    """Official trajectory rows, their tasks with these fields.  A reward may be absent: it is None then, to be computed."""
    rows = read_jsonl(local_file(str(source), HUB_TRAJECTORIES), TRAJECTORY_FIELDS | {"task": fields})
    tasks = [Task(**{name: row["task"][name] for name in fields}) for row in rows]
    return [
        Trajectory(task, row["dialogue_history"], row["answer"], row.get("reward"), row.get("failed"))
        for task, row in zip(tasks, rows)
    ]


def trajectory_row(trajectory: Trajectory) -> dict:
    """A trajectory in the official schema; what there is none of, a reward or test cases say, is left out."""
    row = {
        "task": {name: value for name, value in vars(trajectory.task).items() if value is not None},
        "dialogue_history": trajectory.dialogue,
        "answer": trajectory.answer,
        "reward": trajectory.reward,
        "failed": trajectory.failed,
    }
    return {name: value for name, value in row.items() if value is not None}


def save_trajectories(path, trajectories: list[Trajectory]) -> None:
    """Write trajectories in the official schema, as `load_trajectories` reads them."""
    write_jsonl(path, [trajectory_row(t) for t in trajectories])


# ---------------------------------------------------------------------------------------------------------
# 3. Protocol
ANSWER_MARKER = "I WANT TO ANSWER:"
OUTPUT_MARKER = "OUTPUT:"
GOODBYE = "goodbye."  # the miniature's human may lose patience; ColBench's never leaves

AGENT_PROMPT = f"""You help someone who needs a python function but has described it only roughly.
Find out what they really want before you write it: each of your messages may ask one short, specific question
about behaviour that the description leaves open. They know how the function should behave but will not write
code. You have at most ten messages; as soon as you know enough, send one last message that starts with
"{ANSWER_MARKER}" followed by the complete function as plain python, with the requested name and signature,
without explanations and without markdown."""

SINGLE_TURN_PROMPT = f"""You write a python function from a rough description, in one message and without asking
anything. Start the message with "{ANSWER_MARKER}" and go on with the complete function as plain python, with the
requested name and signature, without explanations and without markdown."""

HUMAN_PROMPT = """You play a person who asked an assistant for a python function. You asked:
{problem_description}

The function you have in mind behaves exactly like this code, which the assistant must not see:
{hidden_information}

The conversation so far:
{dialogue_history}

Reply to the assistant's last message in at most two sentences of plain words. Say only what follows from the
code above; where it does not settle the question, say that you don't know. Never write or quote code, and do not
mention that there is any. Write the reply only."""

STYLESHEET = "tailwindcss@2.2.19/dist/tailwind.min.css"
STYLESHEET_URL = f"https://cdn.jsdelivr.net/npm/{STYLESHEET}"
PICTURE_URL = "https://picsum.photos/id/48/W/H"

PAGE_RULES = f"""The page is one <html>...</html> without scripts and without files of its own. It is styled with the
classes of tailwind 2.2.19, which it links by
<link href="{STYLESHEET_URL}" rel="stylesheet">
Its pictures are all {PICTURE_URL}, with a width and a height in place of W and H."""

FRONTEND_AGENT_PROMPT = f"""You design a web page for someone who has described it only roughly. They have a certain
look in mind; they see your page as a picture and tell you what should be different, but will not write code.
Each of your messages has a short thought about what to change, then "{OUTPUT_MARKER}" and the whole page as it is
now, which is all that they get to see. You have at most ten messages; when they have nothing left to say, write
"{ANSWER_MARKER}" before the page to hand it over, and the conversation ends.
{PAGE_RULES}"""

FRONTEND_SINGLE_TURN_PROMPT = f"""You design a web page from a rough description, in one message and without asking
anything: a short thought, then "{ANSWER_MARKER}" and the whole page.
{PAGE_RULES}"""

FRONTEND_HUMAN_PROMPT = """You play a person who asked a designer for a web page. You asked:
{problem_description}

You see two pictures. The first is the page as you want it; the designer has never seen it. The second is what the
designer shows you now; where it is black, there was no page to show.

The conversation so far:
{dialogue_history}

Tell the designer in a few plain sentences how the second page differs from the first: only what stands out most,
such as layout, colours, pictures and text, each with what it should be instead. Never write or quote code, and do
not mention the pictures. If the pages look alike, say so. Write the reply only."""


def fill(template: str, **values: str) -> str:
    """Replace {name} for the given names in one pass: any other brace, also in a value, is plain text."""
    return re.sub(r"\{(%s)\}" % "|".join(values), lambda match: values[match[1]], template)


def dialogue_text(messages: list[Message]) -> str:
    """The dialogue as the human's prompt shows it."""
    return "\n".join(("Assistant: " if m["role"] == "assistant" else "You: ") + m["content"] for m in messages)


def find_marker(text: str, marker: str) -> int:
    """Where `marker` stands as a marker, not quoted as in code that prints it; -1 if nowhere."""
    match = re.search(r"(?<!['\"])" + re.escape(marker), text)
    return match.start() if match else -1


def parse_action(text: str) -> tuple[str, str | None]:
    """Split an agent's raw message into (what the human sees of it, the answer or None).

    A thought before OUTPUT: is not shown.  The answer marker counts on either side of OUTPUT:, and all that
    follows it is the answer, whole, even where code in it holds a marker again.
    """
    output, answer = find_marker(text, OUTPUT_MARKER), find_marker(text, ANSWER_MARKER)
    if output >= 0 and (answer < 0 or output < answer):
        text = text[output + len(OUTPUT_MARKER) :].strip()
        answer = find_marker(text, ANSWER_MARKER)
    if answer < 0:
        return text.strip(), None
    code = text[answer + len(ANSWER_MARKER) :].strip()
    return text.strip(), code.removeprefix(OUTPUT_MARKER).strip()


# ---------------------------------------------------------------------------------------------------------
# 4. Rollout
@dataclass(frozen=True)
class Action:
    """What an agent returns for one history: the raw text, the prompt behind it, and whether it was cut."""

    text: str
    prompt: str = ""
    truncated: bool = False


class Failure(str):
    """Stands where a text of the agent or of the human should be, and says why a server gave none."""


Agent = Callable[[list[list[Message]]], list[Action]]  # a batch of histories -> a batch of actions
Human = Callable[[list[Task], list[list[Message]]], list[str]]  # tasks and their dialogues -> replies
Chooser = Callable[[list[Task], list[list[Message]], list[list[Action]]], list[Action]]  # of candidates, one each


def rollout(
    agent: Agent, human: Human, tasks: list[Task], max_turns: int = 10, find_answer=None, reply_limit=400,
    choose: Chooser | None = None,
) -> list[Trajectory]:  # fmt: skip
    """Play one dialogue per task, all in lockstep, for at most `max_turns` agent turns.

    A dialogue ends with the answer marker, with the last turn, when the human leaves, or, failed, with a Failure.
    `find_answer` takes what the agent hands over out of the finished dialogue (default: `final_code`); the agent gets
    to read `reply_limit` characters of a reply.  It sees visible messages only: `ground_truth` has no way to it.  With
    `choose` the agent returns several actions for each history, and `choose`, which knows the tasks, takes one of them.
    """
    trajectories = [Trajectory(t, [{"role": "user", "content": t.problem_description}], "") for t in tasks]
    open_ones = trajectories
    for turn in range(max_turns):
        histories = [visible(t.dialogue) for t in open_ones]
        actions = agent(histories)
        if choose:
            actions = choose([t.task for t in open_ones], histories, actions)
        talking = []
        for trajectory, action in zip(open_ones, actions, strict=True):
            if isinstance(action.text, Failure):
                trajectory.failed = action.text
                continue
            seen, answer = parse_action(action.text)
            trajectory.dialogue.append(agent_message(action, seen))
            if answer is None and turn < max_turns - 1:
                talking.append(trajectory)
        if not talking:
            break
        replies = human([t.task for t in talking], [t.dialogue for t in talking])
        for trajectory, reply in zip(talking, replies, strict=True):
            if isinstance(reply, Failure):
                trajectory.failed = reply
            else:
                trajectory.dialogue.append({"role": "user", "content": reply[:reply_limit]})
        open_ones = [t for t, reply in zip(talking, replies) if reply != GOODBYE and not t.failed]
        if not open_ones:
            break
    for trajectory in trajectories:
        trajectory.answer = "" if trajectory.failed else (find_answer or final_code)(trajectory.dialogue)
    return trajectories


def final_code(dialogue: list[Message]) -> str:
    """Backend: what follows the answer marker, or the whole last message; nothing where the human left."""
    if dialogue[-1]["role"] == "user":
        return ""
    seen, answer = parse_action(dialogue[-1].get("output", dialogue[-1]["content"]))
    return seen if answer is None else answer


def final_page(dialogue: list[Message]) -> str:
    """Frontend: the last page that any turn of the agent held, "" where none did."""
    texts = [m.get("output", m["content"]) for m in dialogue if m["role"] == "assistant"]
    return next(filter(None, map(page_in, reversed(texts))), "")


def agent_message(action: Action, seen: str) -> Message:
    """The assistant message of an action, with the fields that the official files have."""
    message = {"role": "assistant", "content": seen, "input": action.prompt, "output": action.text}
    return message | {"truncated": True} if action.truncated else message


# ---------------------------------------------------------------------------------------------------------
# 5. Reward: unit tests
#
#     this process                answer servers, one per core        a fork for each answer
#     unit_test_rewards  ──────>  isolated once; know no text,  ───>  reads a text and its calls from a socket
#     compares digests            no call and no value                of its own, sends digests of the values
#            ^                                                            │
#            └────────────────────────────────────────────────────────────┘
#
# A reference goes the very same way, in another fork.  An answer can claim what it likes about its own values:
# the values that are expected are never in a process that it can reach.
SERVE = "--serve-answers"
SERVER_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",  # sets have the same order on both sides
    "PYTHONSAFEPATH": "1",  # python's own folders are searched for modules, this one is not
    "PYTHONDONTWRITEBYTECODE": "1",
    "LD_BIND_NOW": "1",  # what is looked up before the fork is not looked up in each fork
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
MEMORY = 1 << 30  # bytes that each process of an answer can have
FILES = 64 << 20  # bytes that an answer can write
LIMITS = {"AS": MEMORY, "FSIZE": FILES, "NOFILE": 64, "CORE": 0, "MSGQUEUE": 0}
PROCESSES = 32  # of an answer at one time, threads included
ITERATOR_LIMIT = 10_000  # items of a generator that are compared
FAILURES = {b"e": "error", b"m": "too much memory", b"f": "forbidden", b"n": "no code"}
FORBIDDEN = {errno.EPERM, errno.EACCES, errno.EROFS, errno.EAGAIN, errno.EFBIG, errno.ENOSPC, errno.ENETUNREACH}
RECORD = 33  # bytes that come back from a call: a letter of FAILURES or "=", and the digest of a value


class Reward(float):
    """The fraction of a task's tests that an answer passes, from 0 to 1; NaN where the task is invalid.

    `reasons` has one word per test, "" for passed; `reason` is the first that is not "".
    """

    def __new__(cls, value: float, reasons: list[str]):
        reward = super().__new__(cls, value)
        reward.reasons = reasons
        reward.reason = next(filter(None, reasons), "")
        return reward


class Job(NamedTuple):
    """One text to run against the calls of a task."""

    role: str  # "reference" or "answer": an answer that repeats the reference is run all the same
    text: str
    name: str  # the function that is called
    calls: tuple[str, ...]


known_references: dict[Job, list[str]] = {}  # outcomes of valid ones: training meets a task many times


def unit_test_rewards(tasks: list[Task], answers: list[str], timeout: float = 5.0) -> list[Reward]:
    """The reward of each answer to the task at its place, run on all cores.

    Each test may take `timeout` seconds, all tests of an answer together twice that.  Nothing that an answer
    does raises an exception here.
    """
    pairs = []
    for task, answer in zip(tasks, answers, strict=True):
        rest = called_function(task), tuple(task.test_cases.values())
        pairs.append((Job("reference", task.ground_truth, *rest), Job("answer", answer, *rest)))
    jobs = dict.fromkeys(job for pair in pairs for job in pair if job not in known_references)
    empty = {job: ["no code"] * len(job.calls) for job in jobs if not job.text.strip()}  # a human who left: no answer
    outcomes = known_references | empty | run_jobs([job for job in jobs if job not in empty], timeout)
    known_references.update({reference: outcomes[reference] for reference, _ in pairs if ran(outcomes[reference])})
    return [compare(outcomes[reference], outcomes[answer]) for reference, answer in pairs]


def called_function(task: Task) -> str:
    """The function that the tests are about: the first one called in them that the reference defines."""
    names = re.findall(r"\b([^\W\d]\w*)\s*\(", " ".join(task.test_cases.values()))
    defined = [name for name in names if re.search(rf"\b(def|class)\s+{name}\b", task.ground_truth)]
    return (defined or names or [""])[0]


def ran(outcomes: list[str]) -> bool:
    """True where there are tests and each gave a value: only then can a reference be compared with."""
    return bool(outcomes) and all(outcome.startswith("=") for outcome in outcomes)


def compare(expected: list[str], found: list[str]) -> Reward:
    """The reward of an answer's outcomes: "=" and a digest each, or the word for why there is no value."""
    if not ran(expected):
        return Reward(math.nan, ["invalid task"])
    pairs = zip(expected, found, strict=True)
    reasons = ["" if a == b else "wrong" if b.startswith("=") else b for a, b in pairs]
    return Reward(reasons.count("") / len(reasons), reasons)


def reward_protections() -> str:
    """One line: what keeps answers from doing harm on this machine, and what could not be had."""
    with AnswerServer() as server:
        on = [name for name, here in server.protections.items() if here]
        off = [name for name, here in server.protections.items() if not here]
    return f"answers run with {', '.join(on)}; not to be had here: {', '.join(off) or 'nothing'}"


def run_jobs(jobs: list[Job], timeout: float) -> dict[Job, list[str]]:
    """The outcomes of all jobs, from as many servers as there are cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    idle = SimpleQueue()

    def run(job: Job) -> list[str]:
        server = idle.get()
        try:
            return server.run(job, timeout)
        finally:
            idle.put(server)

    with contextlib.ExitStack() as servers, ThreadPoolExecutor(cores) as pool:
        preload = "numpy.random" if any("numpy" in job.text for job in jobs) else ""
        starts = [pool.submit(servers.enter_context, AnswerServer(preload)) for _ in jobs[:cores]]
        for start in starts:
            idle.put(start.result())
        return dict(zip(jobs, pool.map(run, jobs)))


class AnswerServer:
    """This side of a server.  The process is gone when the `with` ends, or when this process does."""

    def __init__(self, preload: str = ""):
        self.preload = preload  # a module that is loaded once, and not for each answer that wants it

    def __enter__(self) -> "AnswerServer":
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def start(self) -> None:
        """A clean interpreter on this file: never a fork of this process, which may have threads and a GPU."""
        self.folder = tempfile.TemporaryDirectory(prefix="answers-")
        self.control, theirs = socket.socketpair()
        self.control.settimeout(60)
        command = [sys.executable, os.path.abspath(__file__), SERVE, self.folder.name, self.preload]
        with theirs:
            self.process = subprocess.Popen(command, stdin=theirs, env=SERVER_ENVIRONMENT, start_new_session=True)
        greeting = self.control.recv(4096)
        if not greeting:
            raise RuntimeError("the process that runs answers could not start: see its message above")
        self.protections = json.loads(greeting)
        self.control.settimeout(10)

    def stop(self) -> None:
        """The server ends when its socket closes."""
        self.control.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        with contextlib.suppress(OSError, RecursionError):
            self.folder.cleanup()

    def run(self, job: Job, timeout: float) -> list[str]:
        """The outcome of each call.  Where one dies or is too slow, a fresh fork goes on with the next."""
        outcomes, end = [], time.monotonic() + 2 * timeout
        while len(outcomes) < len(job.calls) and time.monotonic() < end:
            outcomes += self.attempt(job._replace(calls=job.calls[len(outcomes) :]), timeout, end)
        return outcomes + ["too slow"] * (len(job.calls) - len(outcomes))

    def attempt(self, job: Job, timeout: float, end: float) -> list[str]:
        """Outcomes of the first calls, at least one, from one fork, of which nothing is left afterwards."""
        outcomes = []
        ours, theirs = socket.socketpair()
        with ours:
            try:
                with theirs:
                    socket.send_fds(self.control, [b"+"], [theirs.fileno()])
                ours.settimeout(timeout)
                ours.sendall(json.dumps(job[1:]).encode() + b"\n")
                for _ in job.calls:
                    record = receive(ours, min(end, time.monotonic() + timeout))
                    outcomes.append(FAILURES.get(record[:1]) or "=" + record[1:].hex())
            except TimeoutError:
                outcomes.append("too slow")
            except OSError:
                outcomes.append("error")  # its process is gone
        with contextlib.suppress(OSError):
            self.control.sendall(b"-")
            if self.control.recv(1):
                return outcomes
        self.stop()  # it could not tidy up behind this answer: a fresh one takes its place
        self.start()
        return outcomes


def receive(connection: socket.socket, deadline: float) -> bytes:
    """One whole record; TimeoutError at the deadline, ConnectionError where the other side is gone."""
    record = b""
    while len(record) < RECORD:
        connection.settimeout(max(1e-3, deadline - time.monotonic()))
        part = connection.recv(RECORD - len(record))
        if not part:
            raise ConnectionError
        record += part
    return record


# The server's process.  A fork copies every page that it touches, so what can be done before the fork is.
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 1 << 17, 1 << 27, 1 << 28, 1 << 29, 1 << 30
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 1 << 5, 1 << 12, 1 << 14, 1 << 18
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38


def serve(folder: str, preload: str) -> None:
    """For each socket that comes in on stdin, fork; when told to, kill that fork and all it has started."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path = [path for path in sys.path if os.path.abspath(path) != here]  # older pythons, editable installs
    control = socket.socket(fileno=os.dup(0))
    pids, user, scratch, protections = isolate(folder)
    os.environ.update(HOME=scratch, TMPDIR=scratch)
    with contextlib.suppress(ImportError):
        if preload:
            importlib.import_module(preload)
    list(run_calls("def f(): return 0", "f", ["f()"]))  # so that what is set up at first use is there
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    gc.collect()
    gc.freeze()  # a fork's collector leaves these objects alone
    control.send(json.dumps(protections).encode())
    while True:
        _, connections, *_ = socket.recv_fds(control, 1, 1)
        if not connections:
            return
        if pids is not None:  # the fork is to be the first process of a namespace of its own
            libc("setns", pids, CLONE_NEWPID)
            libc("unshare", CLONE_NEWPID)
        child = os.fork()
        if child == 0:
            serve_answer(connections[0], user, scratch)
        os.close(connections[0])
        control.recv(1)
        kill_all(child)
        for left in os.scandir(scratch):
            shutil.rmtree(left) if left.is_dir(follow_symlinks=False) else os.unlink(left)
        control.send(b".")


def kill_all(child: int) -> None:
    """Kill a fork and all it has started.  In a pid namespace the kernel does the latter."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with contextlib.suppress(ChildProcessError):  # raised when there is nobody left
        while True:
            os.waitpid(-1, os.WNOHANG)
            with open(f"/proc/self/task/{os.getpid()}/children") as orphans:
                for orphan in orphans.read().split():
                    os.kill(int(orphan), signal.SIGKILL)


def limit(name: str, most: int) -> None:
    """A limit on this process and its forks that cannot be raised again.  Not every system has every limit."""
    with contextlib.suppress(AttributeError, ValueError, OSError):
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


LIBC = ctypes.CDLL(None, use_errno=True)
capset = getattr(LIBC, "capset", None)
NO_CAPABILITIES = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()


def libc(name: str, *arguments) -> None:
    """Call a function of the C library that python has no name for.  OSError where it fails."""
    if getattr(LIBC, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), name)


def isolate(folder: str) -> tuple[int | None, int | None, str, dict[str, bool]]:
    """Shut this process in as far as it is allowed to.

    Returns a handle of its pid namespace, the user that answers run as (None each where they could not be
    had), the one folder that answers may write to, and which protections are on.
    """
    user = 60_000 + os.getpid() % 5_000  # nobody's number, and each server's own
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory runs out, the kernel is to end an answer and not the trainer
    pids = os.open("/proc/self/ns/pid", os.O_RDONLY) if enter_namespaces() else None
    hidden = pids is not None and hide_files(folder)
    scratch = "/scratch" if hidden else folder
    user = user if can_become(user, scratch) else None
    for name, most in LIMITS.items():
        limit(name, most)
    if linux := sys.platform == "linux":
        libc("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        libc("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return pids, user, scratch, {
        "limits of time, memory and file size": True,
        "an empty environment": True,
        "no new privileges": linux,
        "a pid namespace for each answer": pids is not None,
        "no network": pids is not None,
        "no files but python's own and an empty folder": hidden,
        "no root rights": user is not None or pids is not None or os.geteuid() != 0,
        "a limit of processes": user is not None or os.geteuid() != 0,
    }


def enter_namespaces() -> bool:
    """Move into new pid, network, mount and ipc namespaces: as root, or by way of a user namespace."""
    flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC
    maps = {"setgroups": "deny", "uid_map": f"{os.geteuid()} {os.geteuid()} 1"}
    maps["gid_map"] = f"{os.getegid()} {os.getegid()} 1"
    try:
        try:
            libc("unshare", flags)
        except OSError:
            libc("unshare", flags | CLONE_NEWUSER)
            for name, line in maps.items():
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(line)
    except (OSError, AttributeError):  # not allowed; no such function on this system
        return False
    if server := os.fork():  # only a child is inside the new pid namespace
        os.waitpid(server, 0)
        os._exit(0)
    return True


def hide_files(folder: str) -> bool:
    """Move to a root of its own that has python's folders, read-only, and an empty folder in memory."""
    wanted = [*sys.path, sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64", os.devnull]
    try:
        mount(None, "/", None, MS_REC | MS_PRIVATE)
        mount("tmpfs", folder, "tmpfs", 0, "mode=755")
        for place in filter(os.path.exists, sorted(set(map(os.path.abspath, wanted)))):
            inside = folder + place
            os.makedirs(inside if os.path.isdir(place) else os.path.dirname(inside), exist_ok=True)
            if not os.path.exists(inside):
                open(inside, "w").close()
            mount(place, inside, None, MS_BIND | MS_REC)
            kept = os.statvfs(place).f_flag & (os.ST_NOSUID | os.ST_NODEV | os.ST_NOEXEC)
            mount(None, inside, None, MS_BIND | MS_REMOUNT | MS_RDONLY | kept)
        os.makedirs(folder + "/scratch")
        if not os.path.exists(folder + "/tmp"):
            os.symlink("/scratch", folder + "/tmp")
        mount("tmpfs", folder + "/scratch", "tmpfs", 0, f"mode=1777,size={FILES},nr_inodes=4096")
        mount(None, folder, None, MS_BIND | MS_REMOUNT | MS_RDONLY)
    except OSError:
        return False
    os.chroot(folder)
    os.chdir("/")
    return True


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """mount(2)."""
    source, target, kind = (text and os.fsencode(text) for text in (source, target, kind))
    libc("mount", source, target, kind, ctypes.c_ulong(flags), options.encode())


def can_become(user: int, scratch: str) -> bool:
    """True where this is root, and python and `scratch`, then its own, are open to `user`."""
    if os.geteuid() != 0:
        return False
    try:
        os.chown(scratch, user, user)
        os.seteuid(user)
        os.listdir(scratch)
        open(os.__file__).close()
    except OSError:
        os.seteuid(0)
        os.chown(scratch, 0, 0)
        return False
    os.seteuid(0)
    return True


# The process of one answer.
def serve_answer(connection: int, user: int | None, scratch: str) -> None:
    """Take a text and its calls from the socket `connection`, send a record back for each call, and end."""
    try:
        os.dup2(connection, 3, inheritable=False)
        os.closerange(4, 64)  # nothing of the server stays open here
        os.setsid()
        os.chdir(scratch)
        limit("NPROC", PROCESSES)
        if user is not None:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
        elif sys.platform == "linux":
            capset(*NO_CAPABILITIES)
        job = json.loads(open(3, "rb", closefd=False).readline())
        for record in run_calls(*job):
            os.write(3, record)
    finally:
        os._exit(0)


def run_calls(text: str, name: str, calls: list[str]) -> abc.Iterator[bytes]:
    """A record for each call."""
    source = extract_code(text, name)
    for call in calls:
        try:
            value = value_of(source, call) if source else None
            yield b"=" + hashlib.sha256(canonical(value)).digest() if source else b"n".ljust(RECORD)
        except BaseException as error:  # SystemExit and KeyboardInterrupt as well
            yield failure_letter(error).ljust(RECORD)


def value_of(source: str, call: str):
    """The value of a call, in a fresh module: no test sees what another has left in globals or defaults."""
    module = sys.modules["answer"] = types.ModuleType("answer")
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    exec(code_of(source), vars(module))
    return eval(call.strip(), vars(module))


def failure_letter(error: BaseException) -> bytes:
    """The key of FAILURES for what a call has raised."""
    if isinstance(error, MemoryError):
        return b"m"
    error = getattr(error, "reason", error)  # urllib wraps what the network said
    walls = isinstance(error, OSError) and error.errno in FORBIDDEN
    return b"f" if walls or isinstance(error, socket.gaierror) else b"e"


def extract_code(answer: str, name: str) -> str:
    """The python in an answer that defines `name`; "" where there is none.

    Bare code is taken as it is, whatever its strings hold.  Else the last block between fences that defines
    `name` is taken, with the blocks of code above it; blocks are joined while a fence is inside a string.
    Else the lines from the first that starts code to the first that is none.
    """
    if defines(answer, name):
        return answer
    fences = re.finditer(r"^[ \t]*```.*$|```\w*\s*$", answer, re.MULTILINE)
    edges = [(0, 0), *(fence.span() for fence in fences), (len(answer), len(answer))]

    def block(first: int, last: int) -> str:
        return textwrap.dedent(answer[edges[first][1] : edges[last][0]])

    for first in reversed(range(len(edges) - 1)):
        for last in range(first + 1, len(edges)):
            if defines(block(first, last), name):
                above = [block(i, i + 1) for i in range(first)]
                return "\n".join([*(code for code in above if defines(code)), block(first, last)])
    for start in re.finditer(r"^(def|class|import|from|@|\w+ *=)", answer, re.MULTILINE):
        code = without_prose_below(answer[start.start() :])
        if defines(code, name):
            return code
    return answer if re.search(rf"\b(def|class)\s+{name}\b", answer) else ""  # python will say what is wrong


@functools.cache
def code_of(source: str) -> types.CodeType:
    """Python source, compiled."""
    return compile(source, "answer", "exec", dont_inherit=True)


DEFINITION = re.compile(r"^\s*(?:def|class)\s+\w+|^\w+\b[^(\n]*=|^\s*(?:from\s.*)?import\s.*", re.MULTILINE)


def defines(source: str, name: str = "") -> bool:
    """True where `source` is python that defines, assigns or imports `name`, or anything if no name is given."""
    names = re.findall(r"\w+", " ".join(DEFINITION.findall(source)))
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        return bool(names) and name in [*names, ""] and bool(code_of(source))
    return False


def without_prose_below(text: str) -> str:
    """`text` up to the first unindented line that is not python."""
    lines = text.split("\n")
    while lines:
        try:
            code_of("\n".join(lines))
            break
        except SyntaxError as error:
            wrong = min(error.lineno or 1, len(lines)) - 1
            if lines[wrong][:1].isspace():
                return ""
            lines = lines[:wrong]
    return "\n".join(lines)


def canonical(value) -> bytes:
    """Bytes that are equal where two values are, as python's == has it for plain data.

    1, 1.0 and True are one; the order of a dict is nothing; a list is no tuple.  Beyond ==: NaN equals itself,
    an iterator is its first items, an array its shape and items, an object the name of its class and what
    pickle would keep of it, whatever __eq__ says.  TypeError for what has no value, as a function.
    """
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return packed("array", value.shape, value.tolist()) if value.shape else canonical(value.tolist())
    if value is None:
        return b"None"
    if isinstance(value, numbers.Number):
        return number_text(value)
    if isinstance(value, str):
        return b"str" + value.encode("utf-8", "surrogatepass")
    if isinstance(value, (bytes, bytearray)):
        return b"bytes" + value
    if isinstance(value, abc.Mapping):
        return b"dict" + b"".join(sorted(packed("item", key, item) for key, item in value.items()))
    if isinstance(value, abc.Set):
        return b"set" + b"".join(sorted(packed("item", item) for item in value))
    for kind in (list, tuple, range):
        if isinstance(value, kind):
            return packed(kind.__name__, *value)
    if isinstance(value, (abc.Iterator, abc.ValuesView)):
        return packed("iterator", *itertools.islice(value, ITERATOR_LIMIT))
    return canonical_object(value)


def packed(kind: str, *values) -> bytes:
    """The canonical bytes of several values, each behind its length."""
    parts = [canonical(value) for value in values]
    return kind.encode() + b"".join(b" %d:%b" % (len(part), part) for part in parts)


def number_text(value: numbers.Number) -> bytes:
    """A number as an exact fraction, so that 0.5, Decimal("0.5") and Fraction(1, 2) are the same."""
    if isinstance(value, complex) and value.imag != 0:
        return packed("complex", value.real, value.imag)
    value = value.real
    if value != value or abs(value) == math.inf:
        return b"number %a" % float(value)
    return b"number %x/%x" % value.as_integer_ratio()


def canonical_object(value) -> bytes:
    """Anything that is not plain data."""
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        if isinstance(value, types.FunctionType) and value.__module__ == "answer":
            raise TypeError("a function has no value")
        return b"name" + value.__name__.encode()
    if isinstance(value, datetime.datetime) and value.utcoffset() is not None:
        value = value.astimezone(datetime.timezone.utc)
    try:
        parts = value.__reduce_ex__(4)
    except TypeError:  # pickle cannot take it apart: its text is what there is, if that is not an address
        parts = repr(value)
        if " at 0x" in parts:
            raise
    return packed("object", parts)


# ---------------------------------------------------------------------------------------------------------
# 6. Reward: pictures
#
# A page's reward is the cosine between the embeddings of two screenshots, its own and its reference's.  One
# headless Chromium draws both.  What a page asks for is answered here: the stylesheet that ColBench's pages
# link from a file, its one picture, picsum.photos/id/48, as a drawing of the size asked for.  All else is
# refused, and there is no way to the network or to a file but this one.
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")  # the system's
BROWSER_FLAGS = ["--force-webrtc-ip-handling-policy=disable_non_proxied_udp", "--js-flags=--max-old-space-size=512"]
NO_NETWORK = {"server": "http://127.0.0.1:9", "bypass": "<-loopback>"}  # a proxy that nobody plays, for everything
VIEWPORT = {"width": 1280, "height": 720}
SHOWN = {"x": 0, "y": 0, "width": 2560, "height": 8000}  # of a page that is larger, this part
PAGE_SECONDS = 10  # then the browser is killed, and the page is a black picture
KNOWN_PAGES = 2000  # screenshots that are kept
# A page without any of this cannot have changed what the next one finds, and shares its context with others.
ACTIVE = re.compile(r"<(no)?script|<iframe|\bon\w+\s*=|javascript:|http-equiv", re.IGNORECASE)
ADDRESS = re.compile(r"""(\b(?:src|poster)\s*=\s*["']?|\burl\(\s*["']?)((?:https?:)?//[^\s"'<>()]+)""", re.IGNORECASE)

screenshots: dict[tuple[str, str | None], bytes | None] = {}  # page and stylesheet -> PNG; None: not to be rendered


def page_in(text: str) -> str | None:
    """The last whole page in a text, from <html> to </html>, or from <body> to </body> where there is none.

    A page that was cut before its end is no page: an earlier one serves.  None without any.
    """
    for tag in "html", "body":
        whole = rf"<{tag}(?:\s[^>]*)?>(?:(?!<{tag}[\s>]).)*?</{tag}\s*>"
        if pages := re.findall(whole, text, re.IGNORECASE | re.DOTALL):
            return with_our_picture(pages[-1])
    return None


def picture_address(width: str, height: str) -> str:
    """PICTURE_URL in that size."""
    return PICTURE_URL.replace("W/H", f"{width}/{height}")


def with_our_picture(page: str) -> str:
    """The page with each picture whose address holds a size ("300x200", "300/200") at PICTURE_URL."""

    def ours(match: re.Match) -> str:
        size = re.search(r".*(?<!\d)(\d{1,5})(?:[x/]|&(?:amp;)?h=)(\d{1,5})", match[2])
        size = size or re.search(r"/(\d{1,5})()$", match[2])
        return match[1] + picture_address(size[1], size[2] or size[1]) if size else match[0]

    return ADDRESS.sub(ours, page)


def render(pages: list[str | None], stylesheet: str | None = None) -> list:
    """A full-page screenshot, a PIL.Image, of each page; a black one where there is none or it cannot be drawn.

    `stylesheet` is a file to take for STYLESHEET_URL.  Each distinct page is drawn once, over calls too.
    """
    try:
        from PIL import Image
    except ImportError:
        raise InputError("pages need pictures: pip install pillow playwright") from None
    pages = [with_our_picture((page or "").encode("utf-8", "replace").decode()) for page in pages]
    missing = [page for page in dict.fromkeys(pages) if page.strip() and (page, stylesheet) not in screenshots]
    if missing:
        linked = any(STYLESHEET in page for page in missing)
        with Browser(stylesheet_text(stylesheet) if linked else b"") as browser:
            screenshots.update({(page, stylesheet): browser.screenshot(page) for page in missing})
    shots = [screenshots.get((page, stylesheet)) for page in pages]
    for oldest in list(screenshots)[:-KNOWN_PAGES]:
        del screenshots[oldest]
    black = Image.new("RGB", tuple(VIEWPORT.values()))
    return [Image.open(io.BytesIO(shot)) if shot else black for shot in shots]


def stylesheet_text(path: str | None) -> bytes:
    """The stylesheet of ColBench's pages: from the file `path`, or the user's cache, filled at the first use."""
    file = Path(path or Path.home() / ".cache" / "colbench" / STYLESHEET.replace("/", "-"))
    try:
        if path is None and not file.exists():
            import requests

            response = requests.get(STYLESHEET_URL, timeout=30)
            if response.status_code != 200 or not response.content.startswith(b"/*! tailwindcss v2.2.19"):
                raise OSError(f"status {response.status_code}, or something else")
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, response.content)
        return file.read_bytes()
    except OSError as error:  # what requests raises is one as well
        reason = error.strerror or type(error).__name__
        hint = "" if path else f"; --stylesheet FILE takes it from a file (npm pack {STYLESHEET.partition('/')[0]})"
        raise InputError(f"the stylesheet {path or STYLESHEET_URL} cannot be had ({reason}){hint}") from None


@functools.lru_cache(64)
def picture_of_size(width: int, height: int) -> bytes:
    """The one picture of ColBench's pages, as PNG."""
    from PIL import Image, ImageOps

    light = Image.radial_gradient("L").resize((min(max(width, 1), 2560), min(max(height, 1), 2560)))
    ImageOps.colorize(light, "#b0d0f0", "#80a0c0").save(file := io.BytesIO(), "PNG")
    return file.getvalue()


class Browser:
    """One headless Chromium, gone with all its processes when the `with` ends, or when this process does."""

    def __init__(self, stylesheet: bytes):
        self.stylesheet = stylesheet

    def __enter__(self) -> "Browser":
        try:
            from playwright import sync_api
        except ImportError:
            raise InputError("pages need a browser: pip install playwright && playwright install chromium") from None
        self.error = sync_api.Error
        with contextlib.ExitStack() as driver:
            self.chromium = driver.enter_context(sync_api.sync_playwright()).chromium
            self.start()
            self.driver = driver.pop_all()
        return self

    def __exit__(self, *_) -> None:
        self.driver.close()

    def start(self) -> None:
        own = os.path.exists(self.chromium.executable_path)
        path = None if own else next(filter(None, map(shutil.which, BROWSERS)), None)
        if not own and not path:
            raise InputError("no browser here: playwright install chromium, or install the system's chromium")
        try:
            self.browser = self.chromium.launch(
                executable_path=path,
                chromium_sandbox=os.geteuid() != 0,  # root cannot have Chromium's sandbox
                args=BROWSER_FLAGS,
                ignore_default_args=["--disable-popup-blocking"],
                proxy=NO_NETWORK,
            )
        except self.error as error:
            raise InputError(f"the browser {path or ''} does not start: {str(error).splitlines()[0]}") from None
        processes = self.browser.new_browser_cdp_session().send("SystemInfo.getProcessInfo")["processInfo"]
        self.pid = next(process["id"] for process in processes if process["type"] == "browser")
        self.shared = self.new_page(java_script_enabled=False)

    def new_page(self, **settings):
        """A page in a context of its own: no cookie, cache or storage of another page."""
        context = self.browser.new_context(
            viewport=VIEWPORT, service_workers="block", accept_downloads=False, **settings
        )
        context.set_default_timeout(0)  # the time limit is kept by `screenshot`
        context.route("**/*", self.answer)
        return context.new_page()

    def answer(self, route) -> None:
        """The stylesheet, the picture, or a refusal."""
        url = route.request.url
        size = re.match(picture_address(r"(\d{1,5})", r"(\d{1,5})"), url)
        if STYLESHEET in url and self.stylesheet:
            route.fulfill(body=self.stylesheet, content_type="text/css")
        elif size:
            route.fulfill(body=picture_of_size(int(size[1]), int(size[2])), content_type="image/png")
        else:
            route.abort()

    def screenshot(self, html: str) -> bytes | None:
        """The page as PNG.  Where it does not end, crashes or cannot be drawn: None, and a fresh browser."""
        watchdog = threading.Timer(PAGE_SECONDS, os.kill, (self.pid, signal.SIGKILL))
        watchdog.start()
        try:
            page = self.new_page() if ACTIVE.search(html) else self.shared
            page.set_content(html)
            picture = page.screenshot(full_page=True, clip=SHOWN, animations="disabled")
            if page is not self.shared:
                page.context.close()
            return picture
        except self.error:
            pass
        finally:
            watchdog.cancel()
        self.browser.close()
        self.start()
        return None


def pixel_embedding(pictures: list):
    """What is where, for pages that are too plain to need CLIP: (n, 8960) float64.

    Three parts of norm 1, so that the cosine of two pictures is the mean of the parts' cosines: which of 512
    colours the picture has, which it has in each of 4 x 4 cells, and how many edges there are in each of 16 x 16.
    A colour counts in full from 1/1000 of the picture on: a button weighs as much as the background.
    """
    import numpy as np

    def part(kinds, grid: int, number: int):  # (H, W) with values below `number` -> (grid^2 * number,)
        cells = [cell for band in np.array_split(kinds, grid) for cell in np.array_split(band, grid, axis=1)]
        counts = np.stack([np.bincount(cell.ravel(), minlength=number) for cell in cells])
        return np.minimum(1, 1000 * counts / kinds.size)

    def embedding(picture):
        red, green, blue = np.moveaxis(np.asarray(picture.convert("RGB"))[::2, ::2] // np.int64(32), -1, 0)  # (H, W), 0 to 7
        colours = (red * 8 + green) * 8 + blue  # (H, W)
        edges = colours[:, 1:] != colours[:, :-1]  # (H, W - 1)
        parts = part(colours, 1, 512), part(colours, 4, 512), part(edges, 16, 2)[:, 1]
        return np.concatenate([p.ravel() / max(np.linalg.norm(p), 1e-9) for p in parts])

    return np.stack([embedding(picture) for picture in pictures])


@functools.lru_cache
def clip_embedding(name: str = "openai/clip-vit-base-patch32", device="cpu") -> Callable:
    """CLIP's image embedding as a function: pictures -> (n, d) float32.

    The model's own preprocessing: short side to 224 pixels, then the central square.  Of a tall page that is a
    part; ColBench's scores are made that way.
    """
    import torch
    from transformers import CLIPImageProcessorPil, CLIPModel

    try:
        processor = CLIPImageProcessorPil.from_pretrained(name)  # the default one wants torchvision
        model = CLIPModel.from_pretrained(name, use_safetensors=True).to(device).eval()
    except Exception as error:  # not found, not a model, no network: transformers raises many kinds
        reason = str(error).strip().split("\n")[0][:200]
        raise InputError(f"CLIP model {name}: cannot be loaded from a folder or from the hub: {reason}") from None

    @torch.no_grad()
    def embed(pictures: list):
        pixels = processor([picture.convert("RGB") for picture in pictures], return_tensors="pt")["pixel_values"]
        return model.get_image_features(pixels.to(device)).pooler_output.float().cpu().numpy()  # (n, 3, 224, 224) -> (n, d)

    return embed


def cosine_rewards(
    tasks: list[Task], pages: list[str | None], embed: Callable | None = None, stylesheet: str | None = None
) -> list[float]:
    """The cosine between the embeddings of each page and of its task's reference; 1.0 where they look the same.

    `embed` takes pictures and returns an array (n, d), `clip_embedding()` by default.  No page is a black picture.
    """
    import numpy as np

    embed = embed or clip_embedding()
    references = [task.ground_truth for task in tasks]
    places = {page: i for i, page in enumerate(dict.fromkeys([*references, *pages]))}
    pictures, vectors = render(list(places), stylesheet), []
    while pictures:  # a few at a time: a picture takes 3 MB and more as soon as it is looked at
        vectors.append(embed(pictures[:32]))
        del pictures[:32]
    vectors = np.concatenate(vectors)  # (distinct pages, d)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)

    def cosine(a, b) -> float:
        return 1.0 if np.array_equal(a, b) else min(1.0, float(a @ b))

    return [cosine(vectors[places[r]], vectors[places[p]]) for r, p in zip(references, pages, strict=True)]


def websight_tasks(rows: list[dict]) -> list[Task]:
    """Tasks from rows of WebSight v0.2, as ColBench was made: the idea behind a page, and the page with one picture.

        websight_tasks(datasets.load_dataset("HuggingFaceM4/WebSight", "v0.2", split="train").select(range(10_000)))
    """
    return [Task(row["llm_generated_idea"], with_our_picture(row["text"])) for row in rows]


# ---------------------------------------------------------------------------------------------------------
# 7. Figures
def wilson_interval(fractions: list[float]) -> tuple[float, float]:
    """95 % interval of the mean of values in [0, 1], after Wilson: exact enough at 0, at 1 and for small n.

    For values between 0 and 1 (tests passed) it is wider than needed, never narrower.
    """
    n, z = len(fractions), 1.96
    mean = sum(fractions) / n
    centre = (mean + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def backend_figures(rewards: list[float]) -> dict:
    """Success (every test passed) and tests passed, each with its 95 % interval; fractions from 0 to 1."""
    success = [float(reward == 1.0) for reward in rewards]
    return {
        "success": sum(success) / len(rewards),
        "success_interval": wilson_interval(success),
        "tests_passed": sum(rewards) / len(rewards),
        "tests_passed_interval": wilson_interval(rewards),
        "n": len(rewards),
    }


def frontend_figures(rewards: list[float], others: list[float | None] | None) -> dict:
    """Mean cosine and, against the rewards of another agent on the same tasks, the win rate; a tie is half a win."""
    mean = sum(rewards) / len(rewards)
    spread = 1.96 * math.sqrt(sum((reward - mean) ** 2 for reward in rewards)) / len(rewards)
    figures = {"cosine": mean, "cosine_interval": (mean - spread, mean + spread), "n": len(rewards)}
    pairs = [(ours, other) for ours, other in zip(rewards, others or rewards, strict=True) if other is not None]
    if others and pairs:
        wins = [0.5 + 0.5 * ((ours > other) - (ours < other)) for ours, other in pairs]
        figures |= {"win_rate": sum(wins) / len(wins), "win_rate_interval": wilson_interval(wins)}
    return figures


def full_success_pairs(rewards: list[float]) -> list[tuple[int, int]]:
    """Backend: a task's first full success against every dialogue with a lower reward, as (chosen, rejected)."""
    best = next((i for i, reward in enumerate(rewards) if reward == 1.0), None)
    return [] if best is None else [(best, i) for i, reward in enumerate(rewards) if reward < 1.0]


def margin_pairs(rewards: list[float], margin: float = 0.1) -> list[tuple[int, int]]:
    """Frontend: every two dialogues on a task whose rewards are at least `margin` apart, as (chosen, rejected)."""
    indices = range(len(rewards))
    return [(i, j) for i in indices for j in indices if rewards[i] - rewards[j] >= margin]


def full_successes(rewards: list[float]) -> list[int]:
    """Backend: the dialogues on a task that Rejection Fine-Tuning learns from."""
    return [i for i, reward in enumerate(rewards) if reward == 1.0]


def best_one(rewards: list[float]) -> list[int]:
    """Frontend, where no reward is a full success: a task's best dialogue, the first of several."""
    return [rewards.index(max(rewards))] if rewards else []


# ---------------------------------------------------------------------------------------------------------
# 8. ColBench in miniature
#
# A request names a thing and a bare signature: "write fee(x) for a parcel."  The function wanted is a chain of
# one to four DETAILS, each with a number.  Which details it has and which numbers is hidden; one good question
# ("what is the limit?") reveals one.  Each kind of thing has five details that it may have, from nearly always
# to seldom, so that there is something to learn about what is worth asking.  Departures from ColBench are in
# the README: a human who may leave after a useless question, and a world of a hundred words.
DETAILS = {  # name: the line of code that it stands for; a function's lines are in this order
    "rate": "x = x * {}",
    "surcharge": "x = x + {}",
    "discount": "x = x - {}",
    "free amount": "x = max(0, x - {})",
    "deposit": "x = abs(x - {})",
    "share": "x = x // {}",
    "rounding": "x = x - x % {}",
    "cycle": "x = x % {}",
    "minimum": "x = max(x, {})",
    "limit": "x = min(x, {})",
}
LIKELY = (0.9, 0.8, 0.4, 0.1, 0.1)  # chance that a thing's first, second, ... possible detail is wanted
THINGS = {  # what the function is for: the details it may have, the likeliest first
    "parcel": ("rate", "limit", "surcharge", "rounding", "deposit"),
    "taxi": ("surcharge", "minimum", "rate", "discount", "cycle"),
    "library": ("free amount", "limit", "rate", "share", "surcharge"),
    "parking": ("rounding", "limit", "free amount", "minimum", "discount"),
    "exam": ("share", "minimum", "surcharge", "limit", "cycle"),
    "phone": ("free amount", "rate", "minimum", "cycle", "rounding"),
    "hotel": ("rate", "deposit", "discount", "share", "limit"),
    "ticket": ("discount", "minimum", "share", "surcharge", "free amount"),
    "clock": ("cycle", "surcharge", "rounding", "deposit", "rate"),
    "salary": ("rate", "discount", "limit", "free amount", "share"),
    "recipe": ("share", "rounding", "deposit", "rate", "minimum"),
    "game": ("deposit", "cycle", "surcharge", "discount", "limit"),
}
VALUES = (2, 3, 5, 7, 10, 15, 20, 30)
INPUTS = range(60)
REQUEST = "write fee(x) for a {}."
QUESTION = "what is the {}?"
FACT = "the {} is {}."
ENOUGH = " that is all."  # behind the last detail: from here on there is nothing left to ask
UNKNOWN = "i do not know."


def miniature_code(details: dict[str, int]) -> str:
    """The function with these details, lines in the order of DETAILS."""
    lines = [DETAILS[name].format(details[name]) for name in DETAILS if name in details]
    return "\n    ".join(["def fee(x):", *lines, "return x"])


def miniature_details(code: str) -> dict[str, int]:
    """The details that a miniature function has, read from its text; none in any other code."""
    found = {name: re.search(re.escape(line).replace(r"\{\}", r"(\d+)"), code) for name, line in DETAILS.items()}
    return {name: int(match[1]) for name, match in found.items() if match}


@functools.lru_cache
def detail_step(name: str, value: int) -> Callable[[int], int]:
    """One line of a miniature function as a function of its own; the text is ours, never a model's."""
    return eval("lambda x: " + DETAILS[name].format(value).removeprefix("x = "))


def miniature_values(details: dict[str, int]) -> list[int]:
    """What the function with these details returns for each of INPUTS."""
    values = list(INPUTS)
    for name in DETAILS:
        if name in details:
            values = list(map(detail_step(name, details[name]), values))
    return values


def neighbours(value: int) -> list[int]:
    """The next smaller and the next larger of VALUES."""
    i = VALUES.index(value)
    return [VALUES[j] for j in (i - 1, i + 1) if 0 <= j < len(VALUES)]


def telling_inputs(details: dict[str, int], rng: random.Random) -> list[int] | None:
    """Ten inputs on which leaving out a detail or giving it the next number shows; None if there are none."""
    wanted = miniature_values(details)
    wrong = [{k: v for k, v in details.items() if k != name} for name in details]
    wrong += [details | {name: other} for name, value in details.items() for other in neighbours(value)]
    chosen: list[int] = []
    for values in map(miniature_values, wrong):
        telling = [x for x, right, value in zip(INPUTS, wanted, values) if right != value]
        if not telling:
            return None
        if not set(telling) & set(chosen):
            chosen.append(rng.choice(telling))
    rest = [x for x in INPUTS if x not in chosen]
    return sorted(chosen + rng.sample(rest, 10 - len(chosen))) if len(chosen) <= 10 else None


def miniature_tasks(split: str, count: int, seed: int = 0) -> list[Task]:
    """The first `count` generated tasks of "train", "validation" or "test": no duplicates, no overlap."""
    rng = random.Random(seed)

    def draw() -> Task | None:
        thing = rng.choice(list(THINGS))
        names = [name for name, chance in zip(THINGS[thing], LIKELY) if rng.random() < chance]
        details = {name: rng.choice(VALUES) for name in names}
        inputs = telling_inputs(details, rng) if 1 <= len(names) <= 4 else None
        calls = {f"test{i}": f"fee({x})" for i, x in enumerate(inputs or (), 1)}
        return Task(REQUEST.format(thing), miniature_code(details), calls) if calls else None

    return split_tasks(draw, split, count)


def split_tasks(draw: Callable[[], Task | None], split: str, count: int) -> list[Task]:
    """Of the endless list of distinct tasks drawn, every tenth is for validation, every tenth a test task, the rest train."""
    seen, tasks = set(), []
    while len(tasks) < count:
        task = draw()
        if task is None or (task.problem_description, task.ground_truth) in seen:
            continue
        seen.add((task.problem_description, task.ground_truth))
        if split == {0: "validation", 1: "test"}.get(len(seen) % 10, "train"):
            tasks.append(task)
    return tasks


# --- frontend: "a page for a bakery."  The page wanted is one value for each of CHOICES.  The human sees two pages and
# names the most outstanding difference ("the background should be navy."); each business likes some values best.
BACKGROUNDS = ("white", "navy", "gold", "pink", "teal", "silver", "tomato", "olive")
PICTURE = "https://picsum.photos/id/48/"
CHOICES = {  # choice: {value: its line of the page}; in the order of a page's lines and of how much they catch the eye
    "background": {value: f'<body style="margin:0;background:{value}">' for value in BACKGROUNDS},
    "order": {
        "picture first": '<main style="display:flex;flex-direction:column;min-height:300px">',
        "picture last": '<main style="display:flex;flex-direction:column-reverse;min-height:300px">',
    },
    "picture": {
        "small": f'<img src="{PICTURE}100/60" style="width:100px">',
        "wide": f'<img src="{PICTURE}400/60" style="width:400px">',
        "large": f'<img src="{PICTURE}300/180" style="width:300px">',
    },
    "title": {
        "left": '<h1 style="background:black;color:white;margin:10px 60% 10px 0">Welcome</h1>',
        "centered": '<h1 style="background:black;color:white;margin:10px 30%">Welcome</h1>',
        "right": '<h1 style="background:black;color:white;margin:10px 0 10px 60%">Welcome</h1>',
    },
    "button": {
        value: f'<button style="background:{value};color:white;height:50px">Order</button>'
        for value in ("red", "green", "blue", "black")
    },
}
BUSINESSES = ("bakery", "school", "bank", "zoo", "garage", "museum", "florist", "gym", "bar", "studio", "farm", "shop")
USUAL = 0.6  # chance that a page has its business's favourite value of a choice
PAGE_REQUEST = "a page for a {}."
PAGE_FACT = "the {} should be {}."
SATISFIED = "that is it."
NO_PAGE = "i see no page."


def miniature_page(choices: dict[str, str]) -> str:
    """The page with these values, one for each of CHOICES."""
    lines = [CHOICES[name][choices[name]] for name in CHOICES]
    return "\n".join(["<html>", *lines, "</main></body></html>"])


def miniature_choices(page: str) -> dict[str, str]:
    """The values that a page has, read from its text; none of a choice of which it has no line."""
    found = {name: [value for value, line in lines.items() if line in page] for name, lines in CHOICES.items()}
    return {name: values[-1] for name, values in found.items() if values}


def favourites(business: str) -> dict[str, str]:
    """The values that pages for this business mostly have."""
    rng = random.Random(business)
    return {name: rng.choice(list(values)) for name, values in CHOICES.items()}


def miniature_page_tasks(split: str, count: int, seed: int = 0) -> list[Task]:
    """The first `count` generated page tasks of a split, drawn as `miniature_tasks` draws its own."""
    rng = random.Random(seed)

    def draw() -> Task:
        business = rng.choice(BUSINESSES)
        usual = favourites(business)
        values = {n: usual[n] if rng.random() < USUAL else rng.choice(list(CHOICES[n])) for n in CHOICES}
        return Task(PAGE_REQUEST.format(business), miniature_page(values))

    return split_tasks(draw, split, count)


# ---------------------------------------------------------------------------------------------------------
# 9. The two tasks of ColBench, side by side
@dataclass(frozen=True)
class Benchmark:
    """What differs between the tasks; everything else is the same code."""

    task_fields: dict
    agent_prompt: str
    single_turn_prompt: str
    human_prompt: str
    reply_limit: int  # characters of the human's reply that the agent gets to read
    find_answer: Callable[[list[Message]], str]
    preferred: Callable[[list[float]], list[tuple[int, int]]]  # rewards on one task -> (chosen, rejected) pairs
    good: Callable[[list[float]], list[int]]  # what Rejection Fine-Tuning learns from
    figures: Callable[[list[float], list[float] | None], dict]  # of rewards, and of another agent's on the same tasks
    columns: dict[str, str]  # of the table: a figure and its heading; the first is shown greedy too
    miniature_tasks: Callable[[str, int, int], list[Task]]


BENCHMARKS = {
    "backend": Benchmark(
        task_fields=TASK_FIELDS,
        agent_prompt=AGENT_PROMPT,
        single_turn_prompt=SINGLE_TURN_PROMPT,
        human_prompt=HUMAN_PROMPT,
        reply_limit=400,
        find_answer=final_code,
        preferred=full_success_pairs,
        good=full_successes,
        figures=lambda rewards, others: backend_figures(rewards),
        columns={"success": "success %", "tests_passed": "tests passed %"},
        miniature_tasks=miniature_tasks,
    ),
    "frontend": Benchmark(
        task_fields={"problem_description": str, "ground_truth": str},
        agent_prompt=FRONTEND_AGENT_PROMPT,
        single_turn_prompt=FRONTEND_SINGLE_TURN_PROMPT,
        human_prompt=FRONTEND_HUMAN_PROMPT,
        reply_limit=1000,
        find_answer=final_page,
        preferred=margin_pairs,
        good=best_one,
        figures=frontend_figures,
        columns={"cosine": "cosine x 100", "win_rate": "win rate %"},
        miniature_tasks=miniature_page_tasks,
    ),
}


if __name__ == "__main__" and sys.argv[1:2] == [SERVE]:
    serve(*sys.argv[2:4])
