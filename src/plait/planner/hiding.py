"""How much of a layer's communication its own compute hides: what the practice runs beside what."""

from __future__ import annotations

from plait.planner.kernels import Machine
from plait.planner.ops import Message, Slice
from plait.planner.overlap import Share, under


def hidden_by(
    machine: Machine, cut: Slice, message: Message, cost: float, name: str, device: float, core: float
) -> Share:
    """``cost`` seconds of a message in phase ``name`` (``F``, ``B``, ``W``).

    ``device`` and ``core``: the phase's seconds of compute, and of attention alone.
    """
    table, family, practice = machine.table, machine.family, cut.practice
    contention = table.of("contention", family)
    if message.op == "ring":
        return under(cost, core * (cut.cp - 1) / cut.cp, contention)
    if message.axis in ("tp", "etp"):
        if name == "W":
            # The input is gathered again while its gradient is computed.
            return under(cost, cost, contention)
        if name == "B" and message.op != "all_gather" and table.of("async_reduce", practice.framework):
            # The gradient of a column-parallel layer's input is summed while its weights' is computed.
            return under(cost, device / 2, contention)
        if practice.overlap_tp and table.of("split_own", practice.framework):
            # Half of a layer's products follow gathers, each of them of tp ranks' rows.
            if message.op == "all_gather":
                return under(cost, device / (4 * cut.tp), contention)
            # Behind it, the gradient of the weights.
            return under(cost, device / 2 if name == "B" else 0.0, contention)
        # Overlap in parts is of one domain of fast links (user buffers, symmetric memory).
        inside = cut.tp <= machine.topology.tiers[0].size
        split = cost * table.of("split_share", family) if practice.overlap_tp and inside else 0.0
        return under(cost, split, contention)
    if message.axis == "ep" and practice.overlap_ep:
        return under(cost, min(device, cost * table.of("expert_hidden", family)), contention)
    return under(cost, 0.0, contention)
