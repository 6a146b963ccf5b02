"""Pages a second of `render`: small ones, and rows of ColBench's frontend file with the stylesheet.  No test: figures.

    python tests/bench_render.py [ROWS STYLESHEET]
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from colbench import BENCHMARKS, load_tasks, miniature_page_tasks, render

if __name__ == "__main__":
    sets = {"small": ([task.ground_truth for task in miniature_page_tasks("train", 100)], None)}
    if len(sys.argv) == 3:
        rows = load_tasks(sys.argv[1], BENCHMARKS["frontend"].task_fields)
        sets["real"] = [task.ground_truth for task in rows], sys.argv[2]
    for name, (pages, stylesheet) in sets.items():
        start = time.perf_counter()
        render(pages, stylesheet)
        seconds, count = time.perf_counter() - start, len(set(pages))  # equal pages are drawn once
        print(f"{count:5} {name} pages: {seconds:6.2f} s, {count / seconds:5.1f} pages a second, the browser's start included")
