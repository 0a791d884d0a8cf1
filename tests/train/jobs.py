"""Functions that tests launch on ranks."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from plait.core.config import loads
from plait.core.errors import WeightsError
from plait.core.mesh import Mesh
from plait.train.launch import Worker
from plait.train.progress import _Terminal
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


def leave(worker: Worker, folder: str, how: str) -> None:
    """Rank 1 leaves as ``how`` says, with a transfer under way on gloo's threads, after a note; rank 0 never comes."""
    world = worker.connect(Mesh(tp=2))
    if world.rank == 0:
        time.sleep(60)
    pending = dist.all_reduce(torch.ones(1 << 20), async_op=True)
    assert pending is not None
    (Path(folder) / "left").write_text(str(torch.get_num_threads()))
    if how == "exit":
        sys.exit(3)
    raise WeightsError("these weights are damaged") if how == "refuse" else ValueError("rank one's own trouble")


def chatter(worker: Worker, folder: str) -> None:
    """Rank 0 shows lines until its reader has left."""
    (Path(folder) / f"{worker.place.rank}.json").write_text(json.dumps({"pid": os.getpid()}))
    while worker.place.rank == 0:
        _Terminal().print("a line")
    time.sleep(60)


def train_in_pool(connect: Connect, text: str, world_size: int) -> None:
    """One rank of a training run on the test session's workers."""
    setup = prepare(loads(text), world_size=world_size)
    train(setup, connect(setup.plan.mesh(world_size)), as_json=True)


def deaf(worker: Worker, folder: str) -> None:
    """A rank that says where it is, and heeds no signal."""
    draft = Path(folder) / f"{worker.place.rank}.tmp"
    draft.write_text(json.dumps({"pid": os.getpid()}))
    draft.rename(Path(folder) / f"{worker.place.rank}.json")
    time.sleep(60)
