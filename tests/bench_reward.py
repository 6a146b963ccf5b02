"""Answers a second of `unit_test_rewards`, for short answers with 10 quick tests each.  No test: a figure."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from colbench import Task, unit_test_rewards

TASK = Task(
    "Write a function that adds what is due on an order.",
    "def due(price, number):\n    total = price * number\n    return total if total > 50 else total + 5",
    {f"test{i}": f"due({i}, {i + 1})" for i in range(10)},
)

if __name__ == "__main__":
    for count in 100, 1000:
        answers = [f"{TASK.ground_truth}\n# answer {i}" for i in range(count)]  # equal answers are run once
        start = time.perf_counter()
        rewards = unit_test_rewards([TASK] * count, answers)
        seconds = time.perf_counter() - start
        assert rewards == [1.0] * count
        print(f"{count:5} answers: {seconds:6.2f} s, {count / seconds:5.0f} answers a second")
