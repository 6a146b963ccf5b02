"""What the default command promises of SWEET-RL against zero-shot, checked on its results: python tests/check_results.py out/backend-tiny"""

import json
import sys
from pathlib import Path

out = Path(sys.argv[1])
success = {name: 100 * figures["success"] for name, figures in json.loads((out / "results.json").read_text())["methods"].items()}
seconds = sum(json.loads((out / "timings.json").read_text()).values())
print("success %:", ", ".join(f"{name} {value:.1f}" for name, value in success.items()), f"in {seconds:.0f} s")
assert success["sweet"] >= success["zero-shot"] + 5, "SWEET-RL should beat zero-shot by 5 points"
print(f"SWEET-RL against Multi-Turn DPO: {success['sweet'] - success['mt-dpo']:+.1f} points")
