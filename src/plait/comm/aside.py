"""A group beside the run's own: for a thread that speaks with its like on other ranks while training goes on."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from plait.comm.group import Alone, Book, Group
from plait.comm.torch_group import TorchGroup
from plait.comm.world import World

PATIENCE = 86400.0
"""Seconds that a wait may take: the others may be writing to a slow disk."""


def aside(world: World) -> Group:
    """All ranks of ``world``, on the CPU, over gloo; collective. Nothing of it is booked: bytes and time are the
    thread's own. The world's `close` ends it."""
    cpu, book = torch.device("cpu"), Book(rank=world.rank, timeout=PATIENCE)
    if world.mesh.world_size == 1:
        return Alone("aside", book, cpu)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE))
    assert isinstance(group, dist.ProcessGroup)
    return TorchGroup("aside", tuple(range(world.mesh.world_size)), book, group, cpu)
