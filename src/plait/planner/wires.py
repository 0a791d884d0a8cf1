"""Seconds of a collective over a group of ranks on the tiers of a cluster.

Alpha-beta: a fixed latency, one for each step, and bytes over the bandwidth of the narrowest tier that a ring crosses
(Thakur et al. 2005; nccl-tests, doc/PERFORMANCE.md for the bus convention). A group with g members in a node crosses
the network over g cards, so that its ring has g times a device's share of the network. Measured curves of the cluster
file take precedence.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from plait.core.topology import CommPoint
from plait.planner.kernels import Machine

_FACTORS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0, "broadcast": 1.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """``size`` ranks, each ``stride`` away from the next; or ``block`` of them, and the next block ``jump`` ranks
    after it."""

    size: int
    stride: int
    block: int = 0
    jump: int = 0

    def within(self, ranks: int) -> int:
        """Members among so many ranks that begin with the first."""
        if self.block and ranks >= self.jump:
            return min(self.size, ranks // self.jump * self.block)
        return min(self.block or self.size, ranks // self.stride)


def laid(size: int, stride: int, run: int, apart: int) -> Group:
    """``size`` of the ranks of a pipeline rank, each ``stride`` of them away from the next, where ``run`` of them lie
    side by side, the next ones ``apart`` times that further on (`plait.core.mesh`)."""
    if apart == 1 or size * stride <= run:
        return Group(size=size, stride=stride)
    if stride >= run:
        return Group(size=size, stride=stride * apart)
    return Group(size=size, stride=stride, block=run // stride, jump=run * apart)


def nested(group: Group, inner: int) -> tuple[Group, Group]:
    """Blocks of ``inner`` neighbours of a group, and those at the same place in all blocks."""
    count = group.size // inner
    if not group.block:
        return Group(size=inner, stride=group.stride), Group(size=count, stride=group.stride * inner)
    if inner >= group.block:
        block = Group(size=inner, stride=group.stride, block=group.block, jump=group.jump)
        return block, Group(size=count, stride=inner // group.block * group.jump)
    across = Group(size=count, stride=group.stride * inner, block=group.block // inner, jump=group.jump)
    return Group(size=inner, stride=group.stride), across


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """One tier a group crosses: ``count`` members (or domains of the tier below), ``lanes`` of a device's bandwidth."""

    tier: int
    count: int
    lanes: int


@lru_cache(maxsize=1 << 12)
def levels(machine: Machine, group: Group) -> tuple[Level, ...]:
    """The tiers that ``group`` crosses, from the innermost out."""
    found: list[Level] = []
    inside = 1
    for index, tier in enumerate(machine.topology.tiers):
        last = index == len(machine.topology.tiers) - 1
        within = group.size if last else max(inside, group.within(tier.size))
        # Members do not always fill domains evenly: whole domains are counted.
        domains = math.ceil(within / inside)
        if domains > 1:
            found.append(Level(tier=index, count=domains, lanes=inside))
        inside = within
        if inside >= group.size:
            break
    return tuple(found)


@lru_cache(maxsize=1 << 16)
def collective(machine: Machine, op: str, size: float, group: Group) -> float:
    """Seconds of ``op`` over ``group``.

    ``size`` is the whole tensor's bytes; for all_to_all, p2p and ring those that a rank sends.
    """
    if group.size <= 1 or size <= 0:
        return 0.0
    crossed = levels(machine, group)
    if op in ("p2p", "ring"):
        return _message(machine, size, crossed)
    measured = _measured(machine, op, size, group, crossed)
    if measured is not None:
        return measured
    if op == "all_to_all":
        return _exchange(machine, size, group, crossed)
    table, family = machine.table, machine.family
    share = 1.0 if op == "all_reduce" else table.of("gather_share", family)
    latency = _latency(machine, crossed, op, group.size)
    # A ring carries (n-1)/n of everything over each of its links; trees between N nodes only (N-1)/N.
    around = (group.size - 1) / group.size
    moved = [
        ((level.count - 1) / level.count if op == "all_reduce" and level.tier > 0 else around)
        / (_bandwidth(machine, level) * level.lanes)
        for level in crossed
    ]
    return float(table.of("collective_base", family) + latency + _FACTORS[op] * size * max(moved) / share)


def _bandwidth(machine: Machine, level: Level) -> float:
    """Bytes/s of one device on this tier, bus convention."""
    tier = machine.topology.tiers[level.tier]
    name = "link_share" if level.tier == 0 else "network_share"
    pair = machine.table.of("pair_share", machine.family) if level.tier == 0 and level.count == 2 else 1.0
    return tier.bandwidth * machine.table.of(name, machine.family) * pair


def _latency(machine: Machine, crossed: Sequence[Level], op: str, ranks: int) -> float:
    """Seconds of a ring's steps; all-reduces over several nodes go by trees between them (NCCL's choice)."""
    link = machine.table.of("link_step", machine.family)
    network = machine.table.of("network_step", machine.family)
    nodes = math.prod(level.count for level in crossed if level.tier > 0)
    if op == "all_reduce":
        return link * (ranks // nodes - 1) + 2 * network * math.log2(nodes)
    return link * (ranks - nodes) + network * (nodes - 1)


def _message(machine: Machine, size: float, crossed: tuple[Level, ...]) -> float:
    level = crossed[-1]
    tier = machine.topology.tiers[level.tier]
    for point in machine.measured.comm:
        if point.op == "p2p" and point.tier == tier.name:
            return _curve(machine, [p for p in machine.measured.comm if p.op == "p2p" and p.tier == tier.name], size)
    step = machine.table.of("link_step" if level.tier == 0 else "network_step", machine.family)
    share = machine.table.of("p2p_share", machine.family)
    return step + size / (tier.bandwidth * share)


def exchange(machine: Machine, size: float, group: Group, copies: int, once: bool) -> float:
    """Seconds of the all-to-all of experts: ``copies`` of each token leave a rank.

    ``once``: a token that several experts of a node want crosses the network once (DeepEP). Then of N nodes,
    N (1 - (1 - 1/N)^copies) are met in the mean.
    """
    crossed = levels(machine, group)
    if not once or len(crossed) < 2:
        return collective(machine, "all_to_all", size, group)
    nodes = group.size / crossed[0].count
    return _exchange(machine, size, group, crossed, nodes * (1 - (1 - 1 / nodes) ** copies) / copies)


def _exchange(machine: Machine, size: float, group: Group, crossed: tuple[Level, ...], thinned: float = 1.0) -> float:
    """All-to-all: what stays in a domain and what leaves it go at the same time."""
    table, family = machine.table, machine.family
    share = table.of("exchange_share", family)
    far = share if thinned == 1.0 else table.of("exchange_once", family) / table.of("network_share", family)
    inside, slowest, latency = 1, 0.0, table.of("collective_base", family)
    for level in crossed:
        reached = inside * level.count
        inner = level.tier == 0
        part = size * (reached - inside) / group.size * (1.0 if inner else thinned)
        slowest = max(slowest, part / (_bandwidth(machine, level) * (share if inner else far)))
        # Messages to all peers are under way at once.
        step = table.of("link_step" if inner else "network_step", family)
        latency += 2 * step * math.log2(level.count)
        inside = reached
    return latency + slowest


def _measured(machine: Machine, op: str, size: float, group: Group, crossed: tuple[Level, ...]) -> float | None:
    """From measured points of the same operation, tier and nearest group size, scaled to this one."""
    tier = machine.topology.tiers[crossed[-1].tier].name
    points = [point for point in machine.measured.comm if point.op == op and point.tier == tier]
    if not points:
        return None
    ranks = min({point.ranks for point in points}, key=lambda n: abs(math.log(n / group.size)))
    here = [point for point in points if point.ranks == ranks]
    scale = ((group.size - 1) / group.size) / ((ranks - 1) / ranks)
    return _curve(machine, here, size) * scale


def _curve(machine: Machine, points: list[CommPoint], size: float) -> float:
    """Seconds at ``size``: linear between neighbours, the ends continued at their bandwidth or latency."""
    points = sorted(points, key=lambda point: point.size)
    if size <= points[0].size:
        return points[0].seconds
    for low, high in itertools.pairwise(points):
        if size <= high.size:
            share = (size - low.size) / (high.size - low.size)
            return low.seconds + share * (high.seconds - low.seconds)
    last = points[-1]
    return last.seconds * size / last.size
