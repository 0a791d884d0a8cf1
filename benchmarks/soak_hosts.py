"""Two hosts whose ranks, or which themselves, die at random: the run ends as one that nothing befalls, bit for bit.

    python benchmarks/soak_hosts.py [--seed N] [--faults 4] [--steps 30] [--set SECTION.KEY=VALUE ...]

The hosts are two torchrun agents on this machine with two ranks and a folder of memory files each, and a replica after
every step; a checkpoint goes to the disk every seven. A fault is SIGKILL to a rank, or to an agent and its ranks, whose
memory goes with them and for which a new agent comes. Prints what befell the run and where it went on, then whether all
losses, norms and weights are those of the undisturbed run, and what is left behind. Exit code 1 where they are not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from plait.checkpoint.store import WeightFolder
from plait.telemetry.record import read_metrics
from plait.train.events_log import EVENTS, read
from plait.train.replicas import MEMORY, run_key

SETTINGS = (
    "model.hidden_size=256",
    "model.num_layers=4",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.ffn_size=512",
    "data.seq=64",
    "train.global_batch=8",
    "train.eval_every=10",
    "checkpoint.every=7",
    "run.replicas=1",
    "run.resume=true",
    "run.device=cpu",
    "plan.tp=2",
    "plan.pp=1",
    "plan.dp=2",
    "plan.zero=1",
)
PATIENCE = 600.0
"""Seconds that anything here may take."""


class Hosts:
    """The two agents of one run."""

    def __init__(self, folder: Path, settings: list[str]) -> None:
        self.folder, self._settings = folder, [*settings, f"run.dir={folder}"]
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self._port = found.getsockname()[1]
        self.agents = [self._start(number) for number in range(2)]

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._port}", "--rdzv-id=plait"]
        command += [f"--rdzv-conf=is_host={int(not number)},keep_alive_interval=1,keep_alive_max_attempt=3"]
        command += ["--monitor-interval=0.1", "--max-restarts=99", "--local-addr=127.0.0.1"]
        command += ["-m", "plait", "train", "--json"]
        for text in self._settings:
            command += ["--set", text]
        # See docs/recovery.md: without the second, an agent that comes later waits in vain.
        env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        env["OMP_NUM_THREADS"] = "1"
        with open(self.folder.with_name(f"{self.folder.name}-{number}.txt"), "ab") as errors:
            return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=errors)

    def lose_rank(self, host: int, which: int) -> None:
        """SIGKILL to one rank."""
        os.kill(ranks_of(self.agents[host])[which], signal.SIGKILL)

    def lose_host(self, number: int) -> None:
        """SIGKILL to an agent and its ranks, and their memory is gone; another comes."""
        gone = self.agents[number]
        for pid in (gone.pid, *ranks_of(gone)):
            os.kill(pid, signal.SIGKILL)
        gone.wait()
        for folder in MEMORY.glob(f"plait-memory-{gone.pid}-*"):
            shutil.rmtree(folder)
        self.agents[number] = self._start(number)

    def until(self, ready: Callable[[], bool]) -> None:
        """Wait for ``ready()``, while the agents are there."""
        deadline = time.monotonic() + PATIENCE
        while not ready():
            if time.monotonic() > deadline or any(agent.poll() not in (None, 0) for agent in self.agents):
                raise SystemExit(f"the run came to no end: {self.folder}-*.txt")
            time.sleep(0.02)

    def end(self) -> None:
        """Nothing of it is left, however it ended."""
        for agent in self.agents:
            if agent.poll() is None:
                for pid in (agent.pid, *ranks_of(agent)):
                    os.kill(pid, signal.SIGKILL)
            agent.wait()


def ranks_of(agent: subprocess.Popen[bytes]) -> list[int]:
    """Its ranks' processes."""
    return [int(word) for word in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text("ascii").split()]


def done(folder: Path) -> int:
    """Steps that the run has written."""
    lines = folder / "metrics.jsonl"
    return lines.read_bytes().count(b"\n") if lines.exists() else 0


def resumes(folder: Path) -> list[dict[str, object]]:
    """Where it went on, each time."""
    return [dict(event.fields) for event in read(folder / EVENTS) if event.kind == "resume"]


def run(folder: Path, settings: list[str], draw: random.Random, marks: list[int]) -> list[dict[str, object]]:
    """A run that meets a fault about each of the steps ``marks``; what they were."""
    hosts, told = Hosts(folder, settings), []
    try:
        for mark in marks:
            hosts.until(lambda mark=mark: done(folder) >= mark)  # type: ignore[misc]
            time.sleep(0.2 * draw.random())
            before, at, kind = len(resumes(folder)), done(folder), draw.choice(("rank", "rank", "host"))
            if kind == "host":
                hosts.lose_host(1)  # the other's agent holds what the agents meet by
            else:
                hosts.lose_rank(draw.randrange(2), draw.randrange(2))
            hosts.until(lambda before=before: len(resumes(folder)) > before)  # type: ignore[misc]
            after = resumes(folder)[-1]
            told.append({"lost": kind, "after": at, "from": after["step"], "source": after["source"]})
            print(f"{kind} lost after {at} steps: on from step {after['step']}, of the {after['source']}", flush=True)
        hosts.until(lambda: all(agent.poll() == 0 for agent in hosts.agents))
    finally:
        hosts.end()
    return told


def differences(folder: Path, calm: Path) -> list[str]:
    """What is not the same bits in both runs."""
    ours, theirs = read_metrics(folder / "metrics.jsonl"), read_metrics(calm / "metrics.jsonl")
    keys = ("step", "loss", "grad_norm")
    found = [f"{key} of the steps" for key in keys if [row[key] for row in ours] != [row[key] for row in theirs]]
    mine, other = WeightFolder(folder / "weights"), WeightFolder(calm / "weights")
    found += [name for name in other.names if not torch.equal(mine.read(name), other.read(name))]
    return found + [str(left) for left in MEMORY.glob(f"plait-memory-*-{run_key(folder)}")]


def main() -> None:
    """Run both, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    arguments = parser.parse_args()
    draw, settings = random.Random(arguments.seed), [*SETTINGS, f"train.steps={arguments.steps}", *arguments.set]
    marks = sorted(draw.sample(range(2, arguments.steps - 1), arguments.faults))
    with tempfile.TemporaryDirectory(prefix="plait-hosts-") as name:
        calm, folder = Path(name) / "calm", Path(name) / "run"
        run(calm, settings, draw, [])
        told = run(folder, settings, draw, marks)
        wrong = differences(folder, calm)
    print("all losses, norms and weights are the same bits, nothing is left" if not wrong else f"differs: {wrong}")
    print(json.dumps({"seed": arguments.seed, "faults": told, "wrong": wrong}))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
