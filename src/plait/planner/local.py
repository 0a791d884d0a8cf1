"""How plait runs on a host without GPUs: what of communication overlaps there, which is little."""

from __future__ import annotations

from plait.core.topology import Topology
from plait.planner.job import PLAIT, Practice


def practice(topology: Topology) -> Practice:
    """plait's practice on the devices of ``topology``.

    On CPUs a rank carries its own messages: the core that would compute copies and adds them, so nothing hides.
    """
    if topology.device.kind != "cpu":
        return PLAIT
    return Practice(overlap_grads=False, overlap_weights=False, overlap_pp=False)
