"""What the claims are measured with: ``plait train`` in processes of its own, and functions on every rank of a plan."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from plait.comm.world import World
from plait.core.plan import Plan
from plait.models.batch import Batch
from plait.models.config import ModelConfig
from plait.models.decoder import Decoder
from plait.models.init import InitSource
from plait.parallel.apply import Parallel, parallelize

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One line of the table: what is said, by whom, what this machine shows, and whether the two agree."""

    claim: str
    published: str
    measured: str
    verdict: str


def train(settings: Mapping[str, object]) -> list[Row]:
    """Rows of ``metrics.jsonl`` of one run on one thread a rank; ``settings`` go over the built-in run."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        every = {"run.dir": str(run), "run.threads": 1, "train.eval_every": 0, **settings}
        sets = [word for key, value in every.items() for word in ("--set", f"{key}={json.dumps(value)}")]
        command = [sys.executable, "-m", "plait", "train", *sets]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
        return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


class Trainer:
    """A cut model with AdamW and one batch of random tokens, the same in every step."""

    def __init__(self, config: ModelConfig, plan: Plan, world: World, samples: int, seq: int) -> None:
        with torch.device("meta"):
            model = Decoder(config)
        self.parallel: Parallel = parallelize(model, plan, world, weights=InitSource(config, 0))
        decay, rest = self.parallel.zero.optimizer_groups()
        groups = [{"params": group} for group in (decay, rest) if group]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)
        self.tokens = samples * seq
        share = samples // world.mesh.dp
        begin = world.at["dp"] * share
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(config.vocab_size, (samples, seq + 1), generator=generator)
        self.batches = [
            Batch(
                tokens_BT=ids[at : at + plan.micro, :-1].contiguous(),
                targets_BT=ids[at : at + plan.micro, 1:].contiguous(),
                sample_B=torch.arange(at, at + plan.micro),
                step=0,
            )
            for at in range(begin, begin + share, plan.micro)
        ]

    def forward_backward(self) -> None:
        self.parallel.forward_backward(self.batches, self.tokens)

    def step(self) -> None:
        self.forward_backward()
        self.parallel.zero.square_norm()
        self.optimizer.step()
        self.parallel.zero.publish()


@dataclass(frozen=True, kw_only=True)
class Job:
    """A plan on ranks of their own. ``work`` (a function of a module) gets the trainer and the world of a rank."""

    config: ModelConfig
    plan: str
    ranks: int
    samples: int
    seq: int
    work: Callable[[Trainer, World], Any]


def on_ranks(job: Job) -> list[Any]:
    """What ``job.work`` returns on each rank (it must be JSON), in order of ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(job, port, folder), nprocs=job.ranks)
        return [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(job.ranks)]


def _rank(rank: int, job: Job, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(job.ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    plan = Plan.parse(job.plan).resolve(job.ranks)
    world = World.connect(plan.mesh(job.ranks), device=torch.device("cpu"), timeout=300.0)
    found = job.work(Trainer(job.config, plan, world, job.samples, job.seq), world)
    (Path(folder) / str(rank)).write_text(json.dumps(found))
    world.close()
