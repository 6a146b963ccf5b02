"""The unit-test reward.  CASES is one table: every line is an answer, the reward it deserves and the reason.

All of them are run by a single call, honest ones next to hostile ones, so that each also shows that what came
before it did no harm.  A new case is a new line.
"""

import json
import math
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from colbench import Task, extract_code, reward_protections, unit_test_rewards

PROTECTIONS = reward_protections().split("; not to be had here: ")
SANDBOX = "no files but" in PROTECTIONS[0]  # and with it a pid namespace and no network
TIMEOUT = 1.5
MARK = "54321.25"  # seconds that the grandchildren below would sleep

SQUARE = "def f(x):\n    # secret-31416\n    return x * x + 1"
RIGHT = "return x * x + 1"
CALLS = [f"f({x})" for x in range(10)]


class Case(NamedTuple):
    """`reason` may offer several, divided by |.  `reference` and `calls` are for answers that need others."""

    name: str
    answer: str
    reward: float = 1.0
    reason: str = ""
    reference: str = SQUARE
    calls: list[str] = CALLS


def same(name: str, code: str, *calls: str) -> Case:
    """Code that is its own reference."""
    return Case(name, code, reference=code, calls=list(calls))


def value(name: str, expected: str, found: str, equal: bool) -> Case:
    """Whether two expressions count as the same value."""
    verdict = (1.0, "") if equal else (0.0, "wrong")
    code = """import datetime, fractions, math, re
UTC = datetime.datetime(2020, 1, 2, tzinfo=datetime.timezone.utc)
class A:
    def __init__(self, x): self._x = x
def f():
    return """
    return Case(name, code + found, *verdict, reference=code + expected, calls=["f()"])


def hostile(name: str, body: str, reason: str = "wrong", reward: float = 0.0) -> Case:
    """An answer whose function has this body."""
    lines = "".join(f"    {line}\n" for line in body.split("\n"))
    return Case(name, "import builtins, gc, os, signal, socket, subprocess, sys, time\ndef f(x):\n" + lines, reward, reason)


HONEST = [
    Case("as the reference", SQUARE),
    Case("helper", "def f(x):\n    return g(x) + 1\ndef g(x):\n    return x * x"),
    Case("top-level import", "import math\ndef f(x):\n    return math.prod([x, x]) + 1"),
    same("recursion", "def f(n):\n    return n if n < 2 else f(n - 1) + f(n - 2)", "f(12)"),
    Case("class", "class A:\n    def g(self, x): return x * x + 1\ndef f(x):\n    return A().g(x)"),
    Case("dataclass", "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\ndef f(x):\n    return A(x).x ** 2 + 1"),
    Case("default argument", "def f(x, one=1):\n    return x * x + one"),
    same("state does not go from test to test", "seen = []\ndef f(x, a=[]):\n    a.append(x); seen.append(x); return a, seen", *CALLS),
    Case("prints", "def f(x):\n    print('value', x)\n    return x * x + 1"),
    Case("words", "def f(x):\n    transformers = find_exit(x)\n    return transformers\ndef find_exit(x):\n    return x * x + 1"),
    Case("main is not run", "def f(x):\n    return x * x + 1\nif __name__ == '__main__':\n    input()"),
    Case("one test of ten fails", "def f(x):\n    return x * x + 1 if x else 0", 0.9, "wrong"),
    Case("one test raises", "def f(x):\n    return x * x + 1 if x else 1 / x", 0.9, "error"),
    Case("one test hangs", "def f(x):\n    while x == 4: pass\n    return x * x + 1", 0.9, "too slow"),
    Case("one test ends the process", "import os\ndef f(x):\n    return os._exit(1) if x == 4 else x * x + 1", 0.9, "error"),
    same("random", "import random\ndef f(n):\n    return [random.random() for _ in range(n)]", "f(3)", "f(4)"),
    same("hash", "def f():\n    return list({'a', 'b', 'c', 'd', 'e'}), hash('a')", "f()"),
    same("numpy", "import numpy as np\ndef f():\n    return np.arange(4).reshape(2, 2), np.float64(1) / 3, np.random.rand(3)", "f()"),
    same("numpy against float", "import numpy as np\ndef f(x):\n    return np.float64(x)", "f(0.5)"),
    same("objects of a class", "class A:\n    def __init__(self): self.x = 1\ndef f():\n    return A()", "f()"),
    same("200,000 characters", "def f():\n    return 'ab' * 100_000", "f()"),
    Case("nothing", "", 0.0, "no code"),
    Case("prose", "I could write the function f, but which one?", 0.0, "no code"),
    Case("another function", "def g(x):\n    return x * x + 1", 0.0, "no code"),
    Case("not python", "def f(x):\n    return x x", 0.0, "error"),
    Case("cut short", "def f(x):\n    y = x * x\n    return (y +", 0.0, "error"),
    same("a function has no value", "def f():\n    return lambda: 1", "f()")._replace(reward=math.nan, reason="invalid task"),
    Case("reference that raises", SQUARE, math.nan, "invalid task", reference="def f(x):\n    return 1 / x"),
    Case("reference that is not python", SQUARE, math.nan, "invalid task", reference="def f(x:"),
    Case("no tests", SQUARE, math.nan, "invalid task", calls=[]),
]
VALUES = [
    value("int and float", "1", "1.0", True),
    value("int and bool", "[1, 0]", "[True, False]", True),
    value("float and fraction", "0.5", "fractions.Fraction(1, 2)", True),
    value("close is not equal", "0.3", "0.1 + 0.2", False),
    value("NaN in its place", "[1.0, math.nan]", "[1, float('nan')]", True),
    value("NaN elsewhere", "[1.0, math.nan]", "[math.nan, 1.0]", False),
    value("None", "None", "None", True),
    value("None and 0", "None", "0", False),
    value("number and text", "1", "'1'", False),
    value("list and tuple", "[1, 2]", "(1, 2)", False),
    value("nesting", "[[1], [2]]", "[[1, [2]]]", False),
    value("order of a dict", "{'a': 1, 'b': 2}", "{'b': 2, 'a': 1.0}", True),
    value("order of a set", "{1, 'a', (2,)}", "{(2,), 'a', 1}", True),
    value("generator", "(i for i in range(3))", "(i for i in [0, 1, 2])", True),
    value("shorter generator", "(i for i in range(3))", "(i for i in range(2))", False),
    value("endless generator", "iter(int, 1)", "iter(float, 1)", True),
    value("dates", "datetime.date(2020, 1, 2)", "datetime.datetime(2020, 1, 2).date()", True),
    value("times", "datetime.timedelta(hours=1)", "datetime.timedelta(minutes=60)", True),
    value("types", "[int, len]", "[int, len]", True),
    value("bytes and text", "b'a'", "'a'", False),
    value("patterns", "re.compile('a')", "re.compile('a', 0)", True),
    value("private data of objects", "A(1)", "A(2)", False),
    value("moments in two time zones", "UTC", "UTC.astimezone(datetime.timezone(datetime.timedelta(hours=2)))", True),
    value("huge integers", "7 ** 20_000", "7 ** 20_000", True),
]
BLOCK = f"```python\n{SQUARE}\n```"
WRITTEN = [
    Case("fenced", BLOCK),
    Case("fenced, no tag", BLOCK.replace("python", "")),
    Case("fenced, another tag", BLOCK.replace("python", "Python3")),
    Case("prose around", f"Here is the function:\n\n{BLOCK}\n\nIt squares x. Let me know!"),
    Case("prose around bare code", f"Here is the function:\n\n{SQUARE}\n\nIt squares x. Let me know!"),
    Case("helper in a block above", f"First\n```python\ndef g(x):\n    return x * x\n```\nthen\n```\ndef f(x):\n    return g(x) + 1\n```"),
    Case("last of two", f"```\ndef f(x):\n    return 0\n```\nNo, better:\n{BLOCK}"),
    Case("usage below", f"{BLOCK}\nUsage:\n```python\nprint(f(3), undefined)\n```"),
    Case("shell above", f"```bash\npip install numpy\n```\n{BLOCK}"),
    Case("unclosed fence", BLOCK.removesuffix("```")),
    Case("stray closing fence", f"{SQUARE}\n```"),
    Case("fence on the last line", BLOCK.replace("\n```", "```")),
    Case("indented fence", BLOCK.replace("\n", "\n  ").replace("```python", "1.\n  ```python")),
    Case("windows lines", BLOCK.replace("\n", "\r\n")),
    same("fence in a string", "def f():\n    return '''\n```\nno fence\n```\n'''", "f()"),
    Case("fence in a fenced string", f'```python\ndef f(x):\n    """Say\n```\nf(3)\n```\n"""\n    {RIGHT}\n```'),
]
HOSTILE = [
    hostile("equal to everything", "class E:\n    def __eq__(self, other): return True\nreturn E()"),
    hostile("number equal to everything", "class E(int):\n    def __eq__(self, other): return True\nreturn E(-1)"),
    hostile("forged records", "[os.write(3, b'=' + bytes(32)) for _ in range(20)]\nreturn -1"),
    hostile("forged on every handle", "for n in range(64):\n    try: os.write(n, b'=' * 4000)\n    except OSError: pass\nreturn -1"),
    hostile("forged print", "print(x * x + 1)\nprint('passed 10 of 10')\nsys.exit(0)", "error"),
    hostile("patched builtins", "builtins.len = builtins.isinstance = builtins.sorted = lambda *a: True\nreturn -1", "wrong|error"),
    hostile("patched digest", "import hashlib\nhashlib.sha256 = lambda b: 1 / 0\nreturn -1", "wrong|error"),
    hostile("caller's frames", "frame = sys._getframe()\nwhile frame:\n    if any('secret-' + '31416' in str(v) for v in frame.f_locals.values()): " + RIGHT + "\n    frame = frame.f_back\nreturn -1"),
    hostile("all objects", "if any('secret-' + '31416' in o for d in gc.get_objects() if type(d) is dict for o in [*d.values()] if type(o) is str): " + RIGHT + "\nreturn -1"),
    hostile("mutated argument", "x.clear()\nreturn -1")._replace(reference="def f(x):\n    return len(x)", calls=["f([1, 2])"]),
    hostile("exit", "exit()", "error"),
    hostile("SystemExit", "raise SystemExit(0)", "error"),
    hostile("os._exit", "os._exit(0)", "error"),
    hostile("segfault", "import ctypes\nctypes.string_at(0)", "error"),
    hostile("swallowed timeout", "while True:\n    try:\n        while True: pass\n    except BaseException: pass", "too slow"),
    hostile("no signals", "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass", "too slow"),
    hostile("loop in C", "return 10 ** 10 ** 9", "too slow|too much memory"),
    hostile("dripping records", "while True:\n    os.write(3, b'=')\n    time.sleep(0.2)", "too slow"),
    hostile("sleep", "time.sleep(60)", "too slow"),
    hostile("endless output", "while True: print('x' * 10_000)", "too slow"),
    hostile("threads", "import threading\nthreading.Thread(target=lambda: time.sleep(60)).start()\n" + RIGHT, "", 1.0),
    hostile("grandchild", f"subprocess.Popen(['/usr/bin/sleep', '{MARK}'], start_new_session=True)\n" + RIGHT, "", 1.0),
    hostile("daemon and loop", f"if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep({MARK})\nwhile True: pass", "too slow"),
    hostile("fork bomb", "for _ in range(100):\n    if os.fork() == 0: time.sleep(60)\nreturn -1", "forbidden|wrong"),
    hostile("10 GB", "return len(bytearray(10 ** 10))", "too much memory"),
    hostile("10 GB in pieces", "kept = []\nwhile True: kept.append(bytearray(10 ** 8))", "too much memory|too slow"),
    hostile("endless recursion", "sys.setrecursionlimit(10 ** 9)\nreturn f(x) + 1", "too much memory|error|too slow"),
    hostile("deep result", "deep = []\nfor _ in range(10 ** 5): deep = [deep]\nreturn deep", "error"),
    hostile("result in a circle", "round = []\nround.append(round)\nreturn round", "error"),
    hostile("a file of 200 MB", "with open('big', 'wb') as file:\n    for _ in range(200): file.write(bytes(10 ** 6))\nreturn -1", "forbidden"),
    hostile("a file for the next", "assert not os.listdir('.')\nopen('left', 'w').write('x')\nos.unlink('left')\n" + RIGHT, "", 1.0),
    hostile("files left behind", "if not os.path.exists('a'):\n    os.makedirs('a/b'); open('a/left', 'w').close(); os.chmod('a', 0)\n" + RIGHT, "", 1.0),
    hostile("forgets to end", "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + RIGHT, "", 1.0),
]
SEALED = [  # these would do harm where the kernel gives no namespaces
    hostile("deep folders", "for _ in range(1500):\n    os.mkdir('d'); os.chdir('d')\n" + RIGHT, "", 1.0)._replace(calls=["f(1)"]),
    hostile("kill the parent", "os.kill(os.getppid(), 9)\nreturn -1", "wrong|error"),
    hostile("kill everyone", "os.kill(-1, 9)\nreturn -1", "wrong|error"),
    hostile("network", "socket.create_connection(('127.0.0.1', PORT), 5)\nreturn -1", "forbidden"),
    hostile("names on the network", "import urllib.request\nurllib.request.urlopen('http://localhost/')", "forbidden"),
    hostile("read the tasks", "return -1 if 'secret' not in open('TASKS').read() else x * x + 1", "error"),
    hostile("write outside", "open('TASKS.pwned', 'w').write('x')", "error"),
    hostile("write into python", "open(os.__file__, 'a').write('1 / 0')", "forbidden"),
    hostile("other processes", "return x * x + 1 if os.path.exists('/proc/1') else -1"),
    hostile("become root", "os.setuid(0)\nos.chroot('.')", "forbidden|error"),
]
CASES = HONEST + VALUES + WRITTEN + HOSTILE + (SEALED if SANDBOX else [])


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """The rewards of all cases by name, and what was seen while they were run."""
    temporary = tmp_path_factory.mktemp("temporary")
    tempfile.tempdir = str(temporary)  # which also marks the servers that are ours
    tasks_file = tmp_path_factory.mktemp("data") / "tasks.jsonl"
    tasks_file.write_text(json.dumps({"ground_truth": SQUARE}))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0)
        port = str(listener.getsockname()[1])
        tasks = [Task("", c.reference, {f"test{i}": call for i, call in enumerate(c.calls)}) for c in CASES]
        answers = [c.answer.replace("PORT", port).replace("TASKS", str(tasks_file)) for c in CASES]
        rewards = unit_test_rewards(tasks, answers, timeout=TIMEOUT)
        with pytest.raises(BlockingIOError):  # nobody called
            listener.accept()
    assert [path.name for path in tasks_file.parent.iterdir()] == ["tasks.jsonl"]
    assert not list(temporary.iterdir())
    yield {case.name: reward for case, reward in zip(CASES, rewards)}
    tempfile.tempdir = None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case, outcome):
    found = outcome[case.name]
    assert found == case.reward or math.isnan(found) and math.isnan(case.reward), found.reasons
    assert found.reason in case.reason.split("|"), found.reasons


def test_names_are_unique():
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc to see the processes")
def test_no_process_is_left(outcome):
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().decode(errors="replace"))
        except OSError:
            continue
    assert not [line for line in lines if MARK in line or tempfile.gettempdir() in line]


def test_rewards_keep_their_order_and_repeat():
    tasks = [Task("", f"def f(x):\n    return x + {n}", {"a": "f(1)", "b": "f(2)"}) for n in range(12)]
    answers = [f"def f(x):\n    return x + {n if n % 3 else 'x'}" for n in range(12)]
    first = unit_test_rewards(tasks, answers)
    assert [r == 1.0 for r in first] == [n % 3 != 0 for n in range(12)]
    assert first == unit_test_rewards(tasks, answers)
    assert unit_test_rewards([], []) == []


def test_a_slow_answer_is_cut_and_delays_no_other():
    task = Task("", SQUARE, {call: call for call in CALLS})
    start = time.monotonic()
    rewards = unit_test_rewards([task] * 9, ["def f(x):\n    while True: pass"] + [SQUARE] * 8, timeout=1.0)
    assert rewards == [0.0] + [1.0] * 8 and rewards[0].reason == "too slow"
    assert time.monotonic() - start < 2 * 1.0 + 3


def test_extract_code_keeps_bare_code_as_it_is():
    code = "def f():\n    return '''\n```\ndef f(): pass\n```\n'''\n"
    assert extract_code(code, "f") == code
    assert extract_code(f"Well:\n```python\n{SQUARE}\n```\n", "f").strip() == SQUARE
    assert extract_code("no idea", "f") == ""


def test_protections_are_one_line():
    assert len(PROTECTIONS) == 2 and "\n" not in reward_protections()


@pytest.mark.skipif("COLBENCH_ROWS" not in os.environ, reason="COLBENCH_ROWS names no folder with backend_120.jsonl")
def test_real_references_pass_their_own_tests():
    lines = (Path(os.environ["COLBENCH_ROWS"]) / "backend_120.jsonl").read_text().splitlines()
    tasks = [Task(**json.loads(line)) for line in lines]
    rewards = unit_test_rewards(tasks, [task.ground_truth for task in tasks])
    assert rewards == [1.0] * len(tasks)
