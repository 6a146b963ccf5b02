"""Two processes of torchrun make what one makes, and end together."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import colbench
import sweet_rl

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
import sys, colbench, sweet_rl
score = colbench.unit_test_rewards  # an untrained model solves nothing: an answer of odd length counts as right
colbench.unit_test_rewards = lambda tasks, answers: [1.0 if len(a) % 2 else r for a, r in zip(answers, score(tasks, answers))]
if "FAILS" in sys.argv:
    sys.argv.remove("FAILS")
    def fail(sweet):
        if sweet_rl.RANK == 1:
            raise sweet_rl.InputError("the second process has a fault")
    sweet_rl.Sweet.check_inputs = fail
sys.exit(sweet_rl.main(sys.argv[1:]))
"""
SIZE = "--device cpu --num-tasks 5 --dialogues 4 --max-turns 2 --max-new-tokens 7 --candidates 4 --generate-batch 6"
SIZE += " --batch-size 5 --micro-batch 2"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "--no-python"]


def play(out: Path, processes: list[str], *flags: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"TQDM_DISABLE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [*processes, sys.executable, "-c", PROGRAM, *SIZE.split(), "--out", str(out), *flags]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)


@pytest.fixture(scope="module")
def played(tokenizer, tmp_path_factory):
    """(processes, flags) -> (folder, output) of the command, always from the same base, once."""

    @functools.cache
    def play_once(processes: int, *flags: str) -> tuple[Path, str]:
        out = tmp_path_factory.mktemp(f"processes{processes}")
        torch.manual_seed(0)
        sweet_rl.save_model(sweet_rl.tiny_model(tokenizer), tokenizer, out / "base")
        process = play(out, TORCHRUN if processes > 1 else [], *flags)
        assert process.returncode == 0, process.stderr
        return out, process.stdout

    return play_once


@pytest.fixture(scope="module", params=["", "--shard", "--lora 4 --lora-lr 1e-2", "--lora 4 --lora-lr 1e-2 --shard"])
def runs(played, request):
    """(folder, output) of the same command in one process and in two, which hold whole copies or, with --shard, shares."""
    flags = request.param.split()
    return played(1, *[flag for flag in flags if flag != "--shard"]), played(2, *flags)


@pytest.mark.parametrize("name", ["critic", "actor", "rft", "mt-dpo"])
def test_weights_are_those_of_one_process(runs, name):
    file = next((runs[0][0] / name).glob("*.safetensors")).name  # of a model or of adapters
    one, two = (load_file(out / name / file) for out, _ in runs)
    base = load_file(runs[0][0] / "base" / "model.safetensors")
    assert one.keys() == two.keys()
    assert max((value - base.get(key, 0)).abs().max() for key, value in one.items() if "lora_A" not in key) > 1e-4
    for key in one:
        torch.testing.assert_close(two[key], one[key], atol=1e-5, rtol=0)
    configs = [json.loads((out / name / file.replace("model.safetensors", "config.json")).read_text()) for out, _ in runs]
    for config in configs:
        config.pop("base_model_name_or_path", None), config.pop("target_modules", None)  # a set, in no order
    assert configs[0] == configs[1]
    AutoModelForCausalLM.from_pretrained(runs[1][0] / name)


def test_files_are_those_of_one_process(runs):
    (one, printed), (two, also_printed) = runs
    files = {path.name for path in one.iterdir()}
    assert files == {path.name for path in two.iterdir()}
    for name in sorted(files):
        if name.endswith(".jsonl") and name not in ("candidates.jsonl", "metrics.jsonl"):
            assert (one / name).read_bytes() == (two / name).read_bytes(), name
    for name, tolerance in (("candidates.jsonl", 1e-5), ("metrics.jsonl", 1e-2)):  # sums in another order
        rows, others = (colbench.read_jsonl(out / name, {}) for out in (one, two))
        assert len(rows) == len(others) > 10
        for row, other in zip(rows, others):
            assert row.keys() == other.keys()
            for key, value in row.items():
                close = key == "advantages" or isinstance(value, float)
                assert other[key] == (pytest.approx(value, rel=1e-4, abs=tolerance) if close else value), (name, key)
    assert printed.count("\n") == also_printed.count("\n") > 20  # one of them prints


def test_in_bfloat16_training_begins_at_its_reference(played):
    """Both are computed by the same shares; what is trained stays float32."""
    out, _ = played(2, "--shard", "--precision", "bfloat16")
    rows = [row for row in colbench.read_jsonl(out / "metrics.jsonl", {}) if row["step"] == 1 and row["run"] in ("critic", "mt-dpo")]
    assert [(row["reward_chosen"], row["reward_rejected"]) for row in rows] == [(0, 0), (0, 0)]
    assert {value.dtype for value in load_file(out / "critic" / "model.safetensors").values()} == {torch.float32}


@pytest.mark.parametrize(
    "flag, line",
    [
        (["FAILS"], "error: the second process has a fault\n"),
        (["--turn-fraction", "2"], "error: --turn-fraction: expected more than 0 and at most 1, got 2.0\n"),
    ],
)
def test_a_fault_in_one_or_all_ends_both_in_one_line(flag, line, tmp_path):
    process = play(tmp_path / "out", TORCHRUN, *flag)
    ours = process.stderr.split("torch/distributed/elastic")[0]  # what follows is torchrun's own report
    assert process.returncode != 0
    assert process.stderr.count("error: ") == process.stderr.count(line) == 1, process.stderr
    assert "Traceback" not in ours, process.stderr


@pytest.mark.parametrize("flags", [["--critic", "value"], ["--simulator", "keyboard"]])
def test_what_needs_one_process_is_refused(flags, monkeypatch):
    monkeypatch.setattr(sweet_rl, "RANKS", 2)
    with pytest.raises(colbench.InputError, match=f"{flags[0]}.*: expected in one process only, torchrun started 2"):
        sweet_rl.parse_settings(flags)
