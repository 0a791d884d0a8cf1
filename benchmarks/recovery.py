"""From the kill of a rank to the first new step of the run: how long, and which part takes it.

    python benchmarks/recovery.py [--runs N] [--set SECTION.KEY=VALUE ...]

The default model on two ranks, a checkpoint every 10 steps. Once step 15 is done, rank 1 gets SIGKILL. The parts, by
the clock of the files that the run writes: notice (the failure is known, the others are ended), start and load
(processes, torch, the model, its checkpoint), first step. One line a run, then medians, then JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PARTS = ("notice", "start and load", "first step", "all")


def measure(settings: list[str], folder: Path) -> dict[str, float]:
    """Seconds of each part of one recovery."""
    command = [sys.executable, "-m", "plait", "train", "--json"]
    for text in (
        "plan.tp=1",
        "plan.pp=1",
        "plan.dp=2",
        "checkpoint.every=10",
        "train.steps=40",
        f"run.dir={folder}",
        *settings,
    ):
        command += ["--set", text]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    lines, events = folder / "metrics.jsonl", folder / "events.jsonl"
    try:
        until(lambda: rows(lines) >= 15, run)
        ranks = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text(encoding="ascii").split()
        killed = time.time()
        os.kill(int(ranks[1]), signal.SIGKILL)
        until(lambda: events.exists() and '"resume"' in events.read_text(encoding="utf-8"), run)
        before = rows(lines)
        until(lambda: rows(lines) > before, run)
        stepped = time.time()
        _, errors = run.communicate(timeout=600)
    finally:
        run.kill()
        run.wait()
    if run.returncode:
        raise SystemExit(f"the run did not recover: {errors}")
    at = {event["kind"]: event["time"] for event in map(json.loads, events.read_text(encoding="utf-8").splitlines())}
    return {
        "notice": at["restart"] - killed,
        "start and load": at["resume"] - at["restart"],
        "first step": stepped - at["resume"],
        "all": stepped - killed,
    }


def rows(path: Path) -> int:
    """Steps that the run has written."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def until(ready: Callable[[], bool], run: subprocess.Popen[str], seconds: float = 600.0) -> None:
    """Wait for ``ready()``, while the run lasts."""
    deadline = time.monotonic() + seconds
    while not ready():
        if run.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the run ended too early, with code {run.poll()}")
        time.sleep(0.01)


def main() -> None:
    """Measure, and print."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the run that is measured ends with this one
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    arguments = parser.parse_args()
    found: list[dict[str, float]] = []
    for number in range(arguments.runs):
        with tempfile.TemporaryDirectory() as name:
            found.append(measure(arguments.set, Path(name) / "run"))
        print(f"run {number + 1}: " + ", ".join(f"{part} {found[-1][part]:.2f} s" for part in PARTS), flush=True)
    medians = {part: statistics.median(one[part] for one in found) for part in PARTS}
    print("median: " + ", ".join(f"{part} {medians[part]:.2f} s" for part in PARTS))
    print(json.dumps({"runs": found, "median": medians, "load_average": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
