"""The measured bubble beside the simulator's and the formula's, for the pipeline schedules.

    python benchmarks/bubble.py [--steps 15] [--json FILE]

Runs ``plait train`` for each row and reads its ``metrics.jsonl``. ``measured`` and ``simulated`` are medians over the
steps (first ones left out); the simulator is fed with the stage costs of the same step. ``formula`` is the bubble as
a share of the step with equal stages: (p-1)/(m+p-1), or (p-1)/(vm+p-1) for interleaved.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROWS = (
    ("gpipe", 1, 4),
    ("1f1b", 1, 4),
    ("1f1b", 1, 8),
    ("interleaved", 2, 4),
    ("interleaved", 2, 8),
)
"""(schedule, virtual stages a rank, microbatches), on two ranks."""
WARM = 3


def measure(schedule: str, virtual: int, microbatches: int, steps: int) -> dict[str, Any]:
    """One row, from a run of its own."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        settings = {
            "plan.tp": 1,
            "plan.pp": 2,
            "plan.schedule": f'"{schedule}"',
            "plan.virtual": virtual,
            "plan.micro": 2,
            "train.global_batch": 2 * microbatches,
            "train.steps": steps + WARM,
            "train.eval_every": 0,
            "model.hidden_size": 256,
            "model.num_layers": 8,
            "model.ffn_size": 704,
            "model.head_dim": 64,
            "data.seq": 256,
            "run.dir": f'"{run}"',
        }
        sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        subprocess.run([sys.executable, "-m", "plait", "train", *sets], check=True, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][WARM:]
    measured = statistics.median(row["bubble_rate"] for row in rows)
    simulated = statistics.median(row["bubble_rate_predicted"] for row in rows)
    apart = statistics.median(abs(row["bubble_rate"] - row["bubble_rate_predicted"]) for row in rows)
    return {
        "schedule": schedule,
        "virtual": virtual,
        "microbatches": microbatches,
        "measured": measured,
        "simulated": simulated,
        "apart": apart,
        "formula": 1 / (virtual * microbatches + 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"{'schedule':12} {'v':>2} {'m':>3} {'measured':>9} {'simulated':>10} {'apart':>6} {'formula':>8}")
    rows = []
    for schedule, virtual, microbatches in ROWS:
        row = measure(schedule, virtual, microbatches, options.steps)
        rows.append(row)
        print(
            f"{schedule:12} {virtual:2d} {microbatches:3d} {row['measured']:9.3f} {row['simulated']:10.3f} "
            f"{row['apart']:6.3f} {row['formula']:8.3f}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
