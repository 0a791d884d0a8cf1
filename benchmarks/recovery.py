"""From the kill of a rank to the first new step of the run: how long, and which part takes it.

    python benchmarks/recovery.py [--runs N] [--set SECTION.KEY=VALUE ...]

The default model on two ranks, a checkpoint every 10 steps. Once step 15 is done, rank 1 gets SIGKILL. The parts, by
the files that the run and its ranks write: notice (the other rank has been ended for it), stop (all are gone, the
events are on the disk), start (processes, torch, the ranks meet, the model is built), load (the checkpoint is found,
checked and read), first step. ``processor``: seconds of a core that a new rank took until then, which is what start and
load take on a machine with a core for each. One line a run, then medians, then JSON.
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

from plait.train.heartbeat import read_beat

PARTS = ("notice", "stop", "start", "load", "first step", "all", "processor")


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
    private = folder.parent / "private"  # where the supervisor keeps its ranks' signs of life
    private.mkdir()
    env = {**os.environ, "TMPDIR": str(private)}
    run = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    lines, events = folder / "metrics.jsonl", folder / "events.jsonl"
    try:
        until(lambda: rows(lines) >= 15, run)
        (before,) = private.glob("plait-*")
        first, second = children(run.pid)
        killed = time.time()
        os.kill(second, signal.SIGKILL)
        until(lambda: not runs(first), run)
        noticed = time.time()
        until(lambda: phase(private, before) is not None, run)
        loading = time.time()
        until(lambda: events.exists() and '"resume"' in events.read_text(encoding="utf-8"), run)
        done = rows(lines)
        until(lambda: rows(lines) > done, run)
        stepped = time.time()
        processor = max(processor_seconds(rank) for rank in children(run.pid))
        _, errors = run.communicate(timeout=600)
    finally:
        run.kill()
        run.wait()
    if run.returncode:
        raise SystemExit(f"the run did not recover: {errors}")
    at = {event["kind"]: event["time"] for event in map(json.loads, events.read_text(encoding="utf-8").splitlines())}
    return {
        "notice": noticed - killed,
        "stop": at["restart"] - noticed,
        "start": loading - at["restart"],
        "load": at["resume"] - loading,
        "first step": stepped - at["resume"],
        "all": stepped - killed,
        "processor": processor,
    }


def children(pid: int) -> list[int]:
    """The run's ranks, in order."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]


def runs(pid: int) -> bool:
    """Whether process ``pid`` is there, and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def processor_seconds(pid: int) -> float:
    """Seconds of a core that process ``pid`` has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def phase(private: Path, before: Path) -> str | None:
    """What rank 0 of the ranks that were started again does; None before it says so."""
    for folder in private.glob("plait-*"):
        beat = read_beat(folder, 0) if folder != before else None
        if beat is not None:
            return beat.phase
    return None


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
