"""Kill the program at random moments and compare with a run that nobody disturbed.

    python tests/kill.py [KILLS] [SEED]

The whole program at a small size, in a process of its own: SIGKILL at a random moment, then the same command again,
until so many kills have been; where it comes to its end in between, the next life begins in an empty folder.  At
every end each file must be byte for byte that of the undisturbed run, timings.json aside.  A few minutes.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
import dataclasses, sys, colbench, sweet_rl
sweet_rl.WARM_UP_EPOCHS, sweet_rl.CHECKPOINT_SECONDS = 3, 0.2
sweet_rl.MINIATURES["backend"] = dataclasses.replace(sweet_rl.MINIATURES["backend"], warm_up_tasks=1200)
score = colbench.unit_test_rewards  # so little trained a model solves nothing: an answer of odd length counts as right
colbench.unit_test_rewards = lambda tasks, answers: [1.0 if len(a) % 2 else r for a, r in zip(answers, score(tasks, answers))]
sys.exit(sweet_rl.main(sys.argv[1:]))
"""
SIZE = "--device cpu --num-tasks 24 --dialogues 3 --candidates 4 --generate-batch 8 --rft-epochs 30 --critic-epochs 30".split()


def start(out: Path) -> subprocess.Popen:
    environment = os.environ | {"TQDM_DISABLE": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROGRAM, *SIZE, "--out", str(out)]
    return subprocess.Popen(command, stdout=open(f"{out}.log", "a"), stderr=subprocess.STDOUT, env=environment)


def finish(out: Path, seconds: float | None = None) -> bool:
    """Whether the program came to its end; it is killed so many seconds behind its first line."""
    before = os.path.getsize(f"{out}.log") if os.path.exists(f"{out}.log") else 0
    process = start(out)
    while seconds and process.poll() is None and os.path.getsize(f"{out}.log") == before:  # importing torch
        time.sleep(0.05)
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
        return False
    if status:
        sys.exit(f"ended with status {status}:\n{Path(f'{out}.log').read_text()[-2000:]}")
    return True


def content(out: Path) -> dict[str, bytes]:
    return {str(f.relative_to(out)): f.read_bytes() for f in out.rglob("*") if f.is_file() and f.name != "timings.json"}


def main(kills: int, seed: int, folder: Path) -> None:
    rng, start_time = random.Random(seed), time.time()
    finish(folder / "whole")
    whole, seconds = content(folder / "whole"), time.time() - start_time
    print(f"undisturbed: {len(whole)} files in {seconds:.0f} s", flush=True)
    killed, lives = 0, 0
    while killed < kills:
        lives += 1
        out = folder / f"life{lives}"
        while not finish(out, delay := rng.uniform(0, seconds) if killed < kills else None):
            killed += 1
            last = [line.strip() for line in Path(f"{out}.log").read_text().splitlines() if line.strip()] or ["importing"]
            print(f"kill {killed:2d} in life {lives} after {delay:4.1f} s, last line: {last[-1][:80]}", flush=True)
        found = content(out)
        different = sorted(name for name in whole.keys() | found.keys() if whole.get(name) != found.get(name))
        print(f"life {lives} at its end: {len(found)} files, different ones: {', '.join(different) or 'none'}", flush=True)
        if different:
            sys.exit(1)
    print(f"{killed} kills, {lives} lives, {time.time() - start_time:.0f} s: every file is that of the undisturbed run")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(int((sys.argv[1:2] or [20])[0]), int((sys.argv[2:3] or [0])[0]), Path(temporary))
