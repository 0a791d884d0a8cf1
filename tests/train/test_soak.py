"""A small soak: benchmarks/soak.py with two ranks, 40 steps, three faults; by hand it is run with 4, 300 and 15."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.train.test_launch import ENV, ROOT


def test_a_run_whose_ranks_keep_failing_ends_as_one_that_nothing_disturbs(tmp_path: Path) -> None:
    """A rank is killed in a step and in the middle of a save, a place goes and comes back."""
    kinds = ["kill", "save-kill", "slot"]
    words = ["--steps", "40", "--ranks", "2", "--faults", "3", "--kinds", ",".join(kinds)]
    command = [sys.executable, "soak.py", *words, "--folder", str(tmp_path / "runs"), "--json", str(tmp_path / "json")]
    done = subprocess.run(
        command, cwd=ROOT / "benchmarks", env=ENV, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    report = json.loads((tmp_path / "json").read_text())
    assert report["wrong"] == []
    assert sorted(row["kind"] for row in report["faults"]) == sorted([*kinds, "slot back"])
    assert all(row["noticed"] and row["after"] < row["step_after"] for row in report["faults"])
    assert 0 < report["plan_changed_at"] < 40
    assert report["difference"]["before"] == 0.0
    assert set(report["difference"]) == {"before", "after", "weights", "exp_avg", "exp_avg_sq"}
