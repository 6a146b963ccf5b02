"""Real input: official rows and SmolLM2-135M-Instruct, a small model of Llama's own architecture.

COLBENCH_ROWS names the folder with backend_120.jsonl, SMOLLM2 a model folder (tests/smollm2.py makes one).
"""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

import bench_memory
import colbench
import sweet_rl

missing = [name for name in ("COLBENCH_ROWS", "SMOLLM2") if name not in os.environ]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"{' and '.join(missing)} not set")

SMALL = "--num-tasks 3 --max-turns 2 --max-new-tokens 24 --candidates 2 --pairs-per-turn 1 --turn-fraction 0.5 --dialogues 1"


@pytest.fixture(autouse=True)
def all_cores():
    torch.set_num_threads(os.cpu_count())
    yield
    torch.set_num_threads(1)


@pytest.fixture
def rows():
    return Path(os.environ["COLBENCH_ROWS"]) / "backend_120.jsonl"


def dialogues(tasks):
    """A right and a wrong dialogue on each task, in the official schema, without rewards: those are computed."""
    for task in tasks:
        for answer in (task.ground_truth, "pass"):
            yield colbench.Trajectory(
                task,
                [
                    {"role": "user", "content": task.problem_description},
                    {"role": "assistant", "content": "What should it return?"},
                    {"role": "user", "content": "I don't know."},
                    {"role": "assistant", "content": f"{colbench.ANSWER_MARKER}\n{answer}"},
                ],
                answer,
            )


def test_every_stage_with_the_model_as_agent_and_as_human(tmp_path, rows):
    colbench.save_trajectories(tmp_path / "offline.jsonl", dialogues(colbench.load_tasks(str(rows))[:3]))
    out = tmp_path / "out"
    command = f"--task backend --model {os.environ['SMOLLM2']} --tasks {rows} --trajectories {tmp_path}/offline.jsonl --out {out}"
    epochs = "--critic-epochs 1 --actor-epochs 1 --methods zero-shot,sweet"
    assert sweet_rl.main(f"{command} {SMALL} {epochs}".split()) == 0
    methods = json.loads((out / "results.json").read_text())["methods"]
    assert list(methods) == ["zero-shot", "sweet"] and all(figures["n"] == 3 for figures in methods.values())
    stored = colbench.load_trajectories(out / "trajectories.jsonl")
    assert [t.reward for t in stored] == [1.0, 0.0] * 3
    for row in colbench.read_jsonl(out / "candidates.jsonl", {"candidates": list, "advantages": list}):
        assert len(row["candidates"]) == len(row["advantages"]) == 2


def test_collecting_with_the_model_on_official_rows(tmp_path, rows):
    command = f"--model {os.environ['SMOLLM2']} --tasks {rows} --stages collect --out {tmp_path / 'out'} {SMALL}"
    assert sweet_rl.main(command.split()) == 0
    played = colbench.load_trajectories(tmp_path / "out" / "trajectories.jsonl")
    assert len(played) == 3 and all(t.reward is not None and len(t.turns) <= 2 for t in played)
    assert all(t.turns[0].action["input"].startswith("<|im_start|>system") for t in played)


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize("case", bench_memory.CASES)
def test_the_plan_is_near_the_truth(case):
    figures = bench_memory.compare(os.environ["SMOLLM2"], case)
    assert figures["predicted"] == pytest.approx(figures["measured"], rel=0.25)
