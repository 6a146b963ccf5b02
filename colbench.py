"""ColBench: tasks, dialogues and rewards (arXiv 2503.15478, section 3).  No torch in this file.

An agent talks for up to 10 turns with a human who knows what the finished work should do, and then hands
over an artifact, here a python function.  The reward comes once, at the end.

Reading order
    1. Task, Turn, Trajectory     the paper's words as data
    2. Files                      the official JSONL schema, read and written here and nowhere else
    3. Protocol                   markers, prompts, what the human sees of an action
    4. Rollout                    many dialogues in lockstep
    5. Reward                     fraction of hidden unit tests whose value equals the reference's
    6. Figures                    success, tests passed, 95 % intervals
    7. ColBench in miniature      generated tasks that a tiny model can learn in minutes
"""

import functools
import json
import math
import os
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


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
    test_cases: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """One decision: what the agent saw and what it said."""

    history: list[Message]  # o_t, without the agent's system prompt
    action: Message  # a_t


@dataclass
class Trajectory:
    """One dialogue.  `answer` is "" where the human left before there was one, `reward` None until computed."""

    task: Task
    dialogue: list[Message]
    answer: str
    reward: float | None = None

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

TASK_FIELDS = {"problem_description": str, "ground_truth": str, "test_cases": dict}
TRAJECTORY_FIELDS = {"task": dict, "dialogue_history": list, "answer": str}
MESSAGE_FIELDS = {"role": str, "content": str}


def check_fields(row, fields: dict[str, type], where: str) -> None:
    """Raise InputError unless `row` is an object that has these fields with these types."""
    if not isinstance(row, dict):
        raise InputError(f"{where}: expected an object, found {type(row).__name__}")
    for name, kind in fields.items():
        if name not in row:
            raise InputError(f"{where}: the field {name!r} is missing (expected {', '.join(fields)})")
        if not isinstance(row[name], kind):
            raise InputError(f"{where}: {name!r} should be {kind.__name__}, not {type(row[name]).__name__}")


def read_jsonl(path, fields: dict[str, type]) -> list[dict]:
    """The rows of a JSONL file.  InputError names the file, the line and what was expected of it."""
    try:
        lines = Path(path).read_bytes().decode("utf-8-sig").split("\n")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: expected UTF-8 text ({error})") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}, line {number}: expected one JSON object ({error})") from None
        check_fields(row, fields, f"{path}, line {number}")
        rows.append(row)
    if not rows:
        raise InputError(f"{path}: expected one JSON object a line, found none")
    return rows


def write_jsonl(path, rows: list[dict]) -> None:
    """Write all rows aside, then rename: a reader sees the whole file or none."""
    aside = Path(f"{path}.tmp")
    aside.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    os.replace(aside, path)


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


def load_tasks(source: str) -> list[Task]:
    """Official task rows from a JSONL file, or the test tasks of a dataset on the hub."""
    rows = read_jsonl(local_file(source, HUB_TEST_TASKS), TASK_FIELDS)
    return [Task(**{name: row[name] for name in TASK_FIELDS}) for row in rows]


def load_trajectories(source: str) -> list[Trajectory]:
    """Official trajectory rows.  A reward may be absent: it is None then, to be computed."""
    path = local_file(source, HUB_TRAJECTORIES)
    trajectories = []
    for number, row in enumerate(read_jsonl(path, TRAJECTORY_FIELDS), 1):
        where = f"{path}, row {number}"
        check_fields(row["task"], TASK_FIELDS, f"{where}, task")
        for message in row["dialogue_history"]:
            check_fields(message, MESSAGE_FIELDS, f"{where}, dialogue_history")
        if not isinstance(row.get("reward"), (int, float, type(None))):
            raise InputError(f"{where}: 'reward' should be a number")
        task = Task(**{name: row["task"][name] for name in TASK_FIELDS})
        trajectories.append(Trajectory(task, row["dialogue_history"], row["answer"], row.get("reward")))
    return trajectories


def trajectory_row(trajectory: Trajectory) -> dict:
    """A trajectory in the official schema; its reward is left out while it has none."""
    row = {
        "task": vars(trajectory.task),
        "dialogue_history": trajectory.dialogue,
        "answer": trajectory.answer,
        "reward": trajectory.reward,
    }
    return row if trajectory.reward is not None else {k: v for k, v in row.items() if k != "reward"}


def save_trajectories(path, trajectories: list[Trajectory]) -> None:
    """Write trajectories in the official schema, as `load_trajectories` reads them."""
    write_jsonl(path, [trajectory_row(t) for t in trajectories])


# ---------------------------------------------------------------------------------------------------------
# 3. Protocol
ANSWER_MARKER = "I WANT TO ANSWER:"
OUTPUT_MARKER = "OUTPUT:"
GOODBYE = "goodbye."  # the miniature's human may lose patience; ColBench's never leaves
REPLY_LIMIT = 400  # characters of the human's reply that the agent gets to read

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


Agent = Callable[[list[list[Message]]], list[Action]]  # a batch of histories -> a batch of actions
Human = Callable[[list[Task], list[list[Message]]], list[str]]  # tasks and their dialogues -> replies


def rollout(agent: Agent, human: Human, tasks: list[Task], max_turns: int = 10) -> list[Trajectory]:
    """Play one dialogue per task, all in lockstep, for at most `max_turns` agent turns.

    A dialogue ends with the answer marker, with the last turn (that message is then the answer), or when the
    human leaves (no answer).  The agent sees visible messages only: `ground_truth` has no way to it.
    """
    trajectories = [Trajectory(t, [{"role": "user", "content": t.problem_description}], "") for t in tasks]
    open_ones = trajectories
    for turn in range(max_turns):
        actions = agent([visible(t.dialogue) for t in open_ones])
        talking = []
        for trajectory, action in zip(open_ones, actions, strict=True):
            seen, answer = parse_action(action.text)
            trajectory.dialogue.append(agent_message(action, seen))
            if answer is not None or turn == max_turns - 1:
                trajectory.answer = seen if answer is None else answer
            else:
                talking.append(trajectory)
        if not talking:
            break
        replies = human([t.task for t in talking], [t.dialogue for t in talking])
        for trajectory, reply in zip(talking, replies, strict=True):
            trajectory.dialogue.append({"role": "user", "content": reply[:REPLY_LIMIT]})
        open_ones = [t for t, reply in zip(talking, replies) if reply != GOODBYE]
        if not open_ones:
            break
    return trajectories


def agent_message(action: Action, seen: str) -> Message:
    """The assistant message of an action, with the fields that the official files have."""
    message = {"role": "assistant", "content": seen, "input": action.prompt, "output": action.text}
    return message | {"truncated": True} if action.truncated else message


# ---------------------------------------------------------------------------------------------------------
# 5. Reward: unit tests  (REWARD SECTION)


# ---------------------------------------------------------------------------------------------------------
# 6. Figures
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
    if not rewards:
        raise InputError("no task could be scored: no reference solution ran")
    success = [float(reward == 1.0) for reward in rewards]
    return {
        "success": sum(success) / len(rewards),
        "success_interval": wilson_interval(success),
        "tests_passed": sum(rewards) / len(rewards),
        "tests_passed_interval": wilson_interval(rewards),
        "n": len(rewards),
    }


# ---------------------------------------------------------------------------------------------------------
# 7. ColBench in miniature
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
VALUES = (2, 3, 4, 5, 7, 10, 12, 15, 20, 25, 30, 50)
INPUTS = range(60)
REQUEST = "write fee(x) for a {}."
QUESTION = "what is the {}?"
FACT = "the {} is {}."
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
    """The first `count` generated tasks of "train", "validation" or "test": no duplicates, no overlap.

    One endless list of distinct tasks comes from the seed; every tenth is a validation task, every tenth a
    test task, the rest are for training.
    """
    rng, seen, tasks = random.Random(seed), set(), []
    while len(tasks) < count:
        thing = rng.choice(list(THINGS))
        names = [name for name, chance in zip(THINGS[thing], LIKELY) if rng.random() < chance]
        details = {name: rng.choice(VALUES) for name in names}
        code = miniature_code(details)
        inputs = telling_inputs(details, rng) if 1 <= len(names) <= 4 else None
        if inputs is None or (thing, code) in seen:
            continue
        seen.add((thing, code))
        if split == {0: "validation", 1: "test"}.get(len(seen) % 10, "train"):
            calls = {f"test{i}": f"fee({x})" for i, x in enumerate(inputs, 1)}
            tasks.append(Task(REQUEST.format(thing), code, calls))
    return tasks
