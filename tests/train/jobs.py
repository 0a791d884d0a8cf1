"""Functions that tests launch on ranks."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import torch

from plait.core.config import loads
from plait.core.mesh import Mesh
from plait.train.launch import Worker
from plait.train.run import prepare
from plait.train.trainer import train
from tests.pool import Connect


def ranks(worker: Worker, folder: str, end: str) -> None:
    """Meet, leave a note, and end as ``end`` says; rank 1 is the one that fails."""
    world = worker.connect(Mesh(tp=worker.place.world_size))
    total = world.group("tp").all_reduce(torch.ones(1)).wait().item()
    note = {"pid": os.getpid(), "total": total, "omp": os.environ["OMP_NUM_THREADS"]}
    draft = Path(folder) / f"{world.rank}.tmp"
    draft.write_text(json.dumps(note))
    draft.rename(Path(folder) / f"{world.rank}.json")
    if world.rank == 1 and end == "raise":
        raise ValueError("rank one's own trouble")
    if world.rank == 1 and end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "wait":
        time.sleep(60)
    if end != "ok":  # stuck in a collective that rank 1 never joins
        world.group("tp").all_reduce(torch.ones(1)).wait()
    world.close()


def train_in_pool(connect: Connect, text: str, world_size: int) -> None:
    """One rank of a training run on the test session's workers."""
    setup = prepare(loads(text), world_size=world_size)
    train(setup, connect(setup.plan.mesh(world_size)), as_json=True)
