"""Predicted and measured peak memory of SmolLM2-135M-Instruct on the CPU.  No test: figures (tests/test_real.py compares them).

    python tests/bench_memory.py FOLDER    as tests/smollm2.py makes it

Each case runs in a process of its own; measured is what the process holds at its peak beyond what it held before the model.
"""

import gc
import json
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch

from sweet_rl import (
    RANKS,
    Branch,
    Example,
    Sweet,
    dpo_objective,
    gathered,
    memory_needed,
    parse_settings,
    processes,
    return_freed_memory,
)

LENGTH = 256
CASES = {  # how many processes, and flags
    "training": (1, []),
    "training --lora 16": (1, ["--lora", "16"]),
    "dialogues": (1, []),
    "training, 2 processes": (2, []),
    "dialogues, 2 processes --shard": (2, ["--shard"]),
}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def resident(what: str) -> int:
    """Bytes that this process holds (VmRSS), or held at its peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


def measure(folder: str, case: str) -> dict[str, float]:
    """GB of one case, in the process that needs most, with every dialogue as long as --max-length."""
    flags = ["--model", folder, "--tasks", "none", "--trajectories", "none", "--simulator", "scripted", "--device", "cpu"]
    sizes = ["--max-length", LENGTH, "--micro-batch", 2, "--generate-batch", 8, "--max-new-tokens", LENGTH // 8]
    settings = parse_settings([*flags, *map(str, sizes), "--out", tempfile.mkdtemp(), *CASES[case][1]])
    rng, kind = random.Random(0), re.match("[a-z]+", case).group()
    predicted = sum(memory_needed(settings, torch.float32)[kind])
    return_freed_memory()
    sweet, before = Sweet(settings), resident("VmRSS")
    model, tokenizer, _ = sweet.model("base", train=kind == "training")
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here: not that of loading
    if kind == "training":  # two micro-batches a step: gradients are there while the second is computed
        draw = lambda: Branch([[rng.randrange(100, 40000)]], [[rng.randrange(100, 40000) for _ in range(LENGTH - 1)]])  # noqa: E731
        examples = [Example([draw(), draw()]) for _ in range(2 * RANKS)]
        sweet.trainer.train(model, examples, dpo_objective(0.1, 0.01), "bench", 2e-7, 2, 2 * RANKS)
    else:
        agent, ids = sweet.agent(model, tokenizer), tokenizer("one two three four")["input_ids"] * LENGTH
        agent.ends = [model.config.vocab_size]  # no sampled id: every message is as long as it may be
        agent.generate([tokenizer.decode(ids[: LENGTH - LENGTH // 8])] * 8, 1)
    return {"predicted": predicted / 2**30, "measured": max(gathered(resident("VmHWM") - before)) / 2**30}


def compare(folder: str, case: str) -> dict[str, float]:
    """`measure` in a process of its own."""
    count = CASES[case][0]
    several = [*TORCHRUN, str(count)] if count > 1 else []
    return json.loads(subprocess.check_output([sys.executable, *several, __file__, folder, case]).splitlines()[-1])


if __name__ == "__main__":
    if len(sys.argv) == 3:
        with processes():
            print(json.dumps(measure(*sys.argv[1:])))
    else:
        for case in CASES:
            print(f"{case:30s} " + ", ".join(f"{what} {gb:.2f} GB" for what, gb in compare(sys.argv[1], case).items()))
