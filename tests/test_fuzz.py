"""Files that are damaged at random: each is read, or refused in one line that names the file and the line in it."""

import json
import math
import random
import re

import pytest

import colbench
import sweet_rl
from colbench import InputError
from sweet_rl import Run, Sweet, parse_settings

SYSTEM, REQUEST = {"role": "system", "content": "ask"}, {"role": "user", "content": "write fee(x) for a parcel."}
QUESTION = {"role": "assistant", "content": "what is the rate?", "input": "p", "output": "hm OUTPUT: what is the rate?"}
CUT = {"role": "assistant", "content": "é", "truncated": True}
TASK = {"problem_description": "write fee(x)", "ground_truth": "def fee(x):\n    return x", "test_cases": {"test1": "fee(1)"}}
PLAYED = {"task": TASK, "dialogue_history": [REQUEST, QUESTION, REQUEST, CUT], "answer": "x", "reward": 1.0}
RANKED = {"messages": [SYSTEM, REQUEST], "candidates": ["a", "b", ""], "truncated": [False] * 3, "advantages": [0.5, -1, 0.0]}
READERS = {  # a file: its rows, what reads it
    "tasks.jsonl": ([TASK], lambda sweet, path: list(map(colbench.called_function, colbench.load_tasks(path)))),
    "trajectories.jsonl": (
        [PLAYED, PLAYED | {"reward": 0, "failed": None}, PLAYED | {"reward": 0.5}],
        lambda sweet, path: (sweet.pairs(sweet.run.path("made")), sweet.rft(path)),
    ),
    "trajectory_pairs.jsonl": (
        [{"chosen": [SYSTEM, REQUEST, QUESTION], "rejected": [SYSTEM, REQUEST, CUT, REQUEST], "ground_truth": "x"}],
        lambda sweet, path: (sweet.critic(path), sweet.multi_turn_dpo(path)),
    ),
    "candidates.jsonl": ([RANKED], lambda sweet, path: sweet.turn_pairs(sweet.run.path("made"))),
    "turn_pairs.jsonl": ([{"prompt": [SYSTEM, REQUEST], "chosen": [QUESTION], "rejected": [CUT]}], lambda sweet, path: sweet.actor(path)),
    "settings.json": ([{"base": {"task": "backend", "seed": 0}, "rft": {}}], lambda sweet, path: list(map(sweet.run.check, sweet_rl.PRODUCTS))),
    "timings.json": ([{"collect": 1.5, "pairs": 0}], lambda sweet, path: sum(sweet.run.seconds.values())),
    "metrics.jsonl": ([{"run": "x", "step": 1, "loss": 0.5}], lambda sweet, path: sweet_rl.training_curves(sweet.run.metrics())),
}
STRANGE = [None, True, 0, -1, 2**70, 10**400, math.nan, math.inf, "", "x" * 5000, "\ud83d", "\0", [], {}, [[]], ["x"], {"role": "user"}]


def places(value, place=()):
    """The ways to all that is inside a value."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*place, key)
        yield from places(value[key], (*place, key))


def change_value(row: dict, rng: random.Random) -> dict:
    """The row with something in it removed, doubled or replaced."""
    row = json.loads(json.dumps(row))
    *way, last = rng.choice(list(places(row)))
    inside = row
    for key in way:
        inside = inside[key]
    kind = rng.choice(["remove", "double", "replace", "replace", "replace"])
    if kind == "remove":
        del inside[last]
    elif kind == "double" and isinstance(inside, list):
        inside.insert(last, inside[last])
    else:
        inside[last] = rng.choice(STRANGE)
    return row


def change_bytes(data: bytes, rng: random.Random) -> bytes:
    """The file with something done to it that knows nothing of JSON."""
    i, j = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return rng.choice(
        [
            data[:i],
            data[:i] + data[j:],
            data[:i] + bytes([rng.randrange(256)]) + data[i + 1 :],
            data[:i] + data[i:j] * 2 + data[j:],
            data.replace(b"\n", b"\r\n"),
            b"\xef\xbb\xbf" + data,
            data.decode().encode("utf-16"),
            b"[" * 100_000 + data,
            data[:i] + b"\0" * 100 + data[i:],
            data.replace(b": ", b": 1, ", 1),
            b'{"a": 1, "a": ' + data.strip() + b"}",
            b"[%b]" % data.strip().replace(b"\n", b","),
            b"",
            b" \n\n",
        ]
    )


@pytest.mark.parametrize("name", READERS)
def test_damaged_files_are_read_or_refused_in_one_line(tmp_path, monkeypatch, model, tokenizer, name):
    rows, read = READERS[name]
    path = tmp_path / name
    encoder = sweet_rl.Encoder(tokenizer, [tokenizer.eos_token_id])
    monkeypatch.setattr(Sweet, "model", lambda self, product, **_: (model, tokenizer, encoder))
    monkeypatch.setattr(Sweet, "fit", lambda self, path, model, tokenizer, examples, *_, **__: [e.longest() for e in examples])
    rng, refused, line = random.Random(name), 0, None
    for number in range(161):
        changed, at = list(rows), rng.randrange(len(rows))
        if by_value := number % 2 == 1:
            changed[at] = change_value(rows[at], rng)
        data = b"".join(json.dumps(row).encode() + b"\n" for row in changed)
        path.write_bytes(data if by_value or number == 0 else change_bytes(data, rng))
        try:
            sweet = Sweet(parse_settings(["--out", str(tmp_path), "--device", "cpu"]))
            read(sweet, path)
        except InputError as error:
            refused += 1
            message = str(error)
            assert re.match(re.escape(str(path)) + "[,: ]", message) and "\n" not in message and len(message) < 500
            if by_value and ": no " not in message and path.suffix == ".jsonl":
                assert f"{path}, line {at + 1}" in message
            assert number > 0, message
        sweet.run.lock.close()
    assert refused > 20 or name == "metrics.jsonl"
