"""How plait runs on hosts without GPUs: what of communication overlaps there, and ranks that take turns on cores."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import lru_cache

from plait.core.topology import Measured, Topology
from plait.planner.job import PLAIT, Job, Practice
from plait.planner.overlap import Pipeline, makespan
from plait.schedule.generate import generate
from plait.schedule.ir import Action, Kind, Schedule

BUSY, SPREAD = 0.1, 0.15
"""Shares of a host that others may take while it is measured, and of how far passes may lie apart, to be believed."""
MOST_ACTIONS = 20000
"""Of a schedule that is walked action by action; longer ones are taken as if every rank worked all the time."""


def practice(topology: Topology) -> Practice:
    """plait's practice on the devices of ``topology``.

    On CPUs a rank carries its own messages: the core that would compute copies and adds them, so nothing hides.
    """
    if topology.device.kind != "cpu":
        return PLAIT
    return Practice(overlap_grads=False, overlap_weights=False, overlap_pp=False)


def doubt(topology: Topology) -> str:
    """Why figures of ``topology`` are to be taken with care, in a few words; nothing where they are not."""
    measured = topology.measured
    if (measured.busy or 0.0) > BUSY:
        return f"measured on a busy machine: other programs took {measured.busy:.0%} of its cores"
    if (measured.spread or 0.0) > SPREAD:
        return f"measured on an unsteady machine: passes lay {measured.spread:.0%} apart"
    return "estimated, not measured: plait calibrate measures" if topology.source.startswith("estimated") else ""


def meeting(measured: Measured, ranks: int, apart: float) -> float:
    """Seconds that each of ``ranks`` loses where they meet after ``apart`` seconds of work, beyond the collective.

    Of the nearest group size that was measured, along the log of ``apart``; its ends are the last word.
    """
    if not measured.meetings or ranks < 2:
        return 0.0
    size = min({point.ranks for point in measured.meetings}, key=lambda size: abs(math.log(size / ranks)))
    points = sorted((max(point.apart, 1e-9), point.seconds) for point in measured.meetings if point.ranks == size)
    for (low, first), (high, second) in itertools.pairwise(points):
        if low < high >= apart:
            share = math.log(max(apart, low) / low) / math.log(high / low)
            return first + share * (second - first)
    return points[-1][1]


def crowded(topology: Topology, ranks: int) -> bool:
    """Whether ``ranks`` take turns on the cores of one host."""
    return topology.cores is not None and topology.cores < ranks <= topology.tiers[0].size


def own_cores(topology: Topology, ranks: int) -> Topology:
    """``topology`` as if each of ``ranks`` had a core to itself: what takes turns takes no less than there."""
    if not crowded(topology, ranks):
        return topology
    measured = topology.measured
    factor = (topology.cores or ranks) / (ranks * (measured.crowding or 1.0))
    comm = tuple(replace(point, seconds=point.seconds * factor) for point in measured.comm)
    meetings = tuple(replace(point, seconds=point.seconds * factor) for point in measured.meetings)
    tiers = tuple(replace(t, bandwidth=t.bandwidth / factor, latency=t.latency * factor) for t in topology.tiers)
    measured = replace(measured.slowed(factor), comm=comm, meetings=meetings)
    return replace(topology, device=topology.device.slowed(factor), tiers=tiers, measured=measured)


def span_of(pipe: Pipeline, job: Job) -> float:
    """Seconds of the pipeline of ``job``: ranks that are more than their host's cores work while others wait."""
    cores, world, measured = job.topology.cores, job.world_size, job.topology.measured
    if cores is None or not crowded(job.topology, world) or pipe.ranks == 1:
        return makespan(pipe)
    actions = pipe.microbatches * len(pipe.forward) * 3
    return (
        makespan(pipe)
        if actions > MOST_ACTIONS
        else turns(pipe, world // pipe.ranks, cores, measured.waiting or 0.0, measured.crowding or 1.0)
    )


@lru_cache(maxsize=4096)
def turns(pipe: Pipeline, copies: int, cores: int, waiting: float, crowding: float) -> float:
    """Seconds of a pipeline each rank of which stands for ``copies`` alike, all on ``cores`` that they share fairly.

    The pipeline's seconds are those of an action while every rank works. A rank whose turn comes oftener, because
    others wait, is faster in proportion, up to a core of its own, where it is spared the ``crowding`` too; but a rank
    that waits looks again and again, which takes ``waiting`` of a core.
    """
    shared = max(1.0, pipe.ranks * copies / cores)
    slowed = shared * crowding if shared > 1 else 1.0
    name = pipe.name if pipe.virtual == 1 or pipe.name != "1f1b" else "interleaved"
    schedule = generate(name, ranks=pipe.ranks, microbatches=pipe.microbatches, virtual=pipe.virtual)
    rows = [list(row) for row in schedule.ranks]
    done: set[Action] = set()
    at, left = [0] * pipe.ranks, [0.0] * pipe.ranks
    working = [False] * pipe.ranks
    now = 0.0
    while any(at[rank] < len(rows[rank]) for rank in range(pipe.ranks)):
        for rank, row in enumerate(rows):
            if not working[rank] and at[rank] < len(row) and _ready(row[at[rank]], schedule, done):
                working[rank] = True
                left[rank] = _seconds(row[at[rank]], pipe, schedule) / slowed
        busy = [rank for rank in range(pipe.ranks) if working[rank]]
        assert busy, "generated schedules do not deadlock"
        # Those that wait are spread over the cores: they slow a rank that has a core to itself as well.
        free = max(1 - waiting * copies * (pipe.ranks - len(busy)) / cores, waiting)
        crowd = len(busy) * copies / cores
        rate = free / (crowd * crowding if crowd > 1 else 1.0)
        passed = min(left[rank] for rank in busy)
        now += passed / rate
        for rank in busy:
            left[rank] -= passed
            if left[rank] <= 1e-12 * now:
                done.add(rows[rank][at[rank]])
                at[rank] += 1
                working[rank] = False
    return now


def _ready(action: Action, schedule: Schedule, done: set[Action]) -> bool:
    """Whether what ``action`` takes has been made; a rank's own actions are in order."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.F:
        return stage == 0 or Action(Kind.F, stage - 1, microbatch) in done
    if action.kind is Kind.B:
        return stage == schedule.stages - 1 or Action(Kind.B, stage + 1, microbatch) in done
    return True


def _seconds(action: Action, pipe: Pipeline, schedule: Schedule) -> float:
    """Seconds of an action, with the copies of its messages: one in and one out, where it has neighbours."""
    stage = action.stage
    if action.kind is Kind.W:
        return pipe.weight[stage]
    sides = (stage > 0) + (stage < schedule.stages - 1)
    if action.kind is Kind.F:
        return pipe.forward[stage] + sides * pipe.transfer / 2
    whole = pipe.backward[stage] + (0.0 if stage in schedule.splits else pipe.weight[stage])
    return whole + sides * pipe.transfer / 2
