"""`Recut`: the stage cut changes while a run goes on, where its ranks turn out to be of unequal speed (run.rebalance).

Every rank sees what each rank computed in each step, so all come to the same answer; they compare it before they act.
The trainer then saves the state, and the same processes go on from it under the new cut (`plait.train.trainer`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import cast, final

import torch

from plait.comm.world import World
from plait.core import cluster_file
from plait.core.errors import PlanError
from plait.core.legal import check
from plait.core.plan import Plan
from plait.core.topology import Topology
from plait.parallel.layout import model_shape, stage_layers
from plait.planner.clusters import cluster
from plait.planner.job import Job
from plait.planner.local import practice
from plait.planner.memory import Ranks
from plait.planner.recut import Line, best_cut, parts_of, slowness
from plait.train.auto import device_of, machine
from plait.train.events_log import EVENTS, FAILURE, read
from plait.train.exchange import gather_json
from plait.train.run import Setup

REBALANCED = "rebalanced"
"""The event of a change: ``step``, ``old`` and ``new`` cut, the pipeline ranks' slowness beside the fastest one
(``slow``), the share of a step that the change saves (``gain``), the new ``plan``."""
WORTH = 0.05
"""Least gain, as a share of the step, for which the cut is changed."""
LEAST_STEPS = 8
"""Steps that are looked at, whatever ``run.rebalance`` says: medians of fewer say little."""
_WARM = 2
"""First steps under a cut, which set up kernels and buffers."""
_UNKNOWN = "a100"
"""Whose ratios of layers, embedding and head stand in for those of a GPU that the planner does not know."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """What to go on with: the setup under the new cut, and the fields of the event that says why."""

    setup: Setup
    fields: dict[str, object]

    def __str__(self) -> str:
        told = self.fields
        return (
            f"step {told['step']}: layers by stage were {told['old']}, are {told['new']} from now on: for like work "
            f"pipeline ranks take {told['slow']} times the fastest's seconds, a step is to take {told['gain']:.0%} less"
        )


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One step: its seconds, and what each rank computed in it."""

    seconds: float
    computes: Sequence[float]


@final
class Recut:
    """Watches the ranks' speeds under one cut. Making one is collective over all ranks.

    It looks when ``run.rebalance`` steps have been measured, and twice as many after each change that the run has made
    before: however speeds swing, a run of n steps changes its cut log2(n / rebalance) times at most. A cut has to be
    worth `WORTH` in both halves of the steps, so what passes within one of them changes nothing.
    """

    def __init__(self, setup: Setup, world: World) -> None:
        self._setup, self._world = setup, world
        self._line = world.mesh.groups(("dp", "cp", "tp"))
        self._rows: list[_Row] = []
        self._warm = _WARM
        # What is known of the machine, and what the run has done, is rank 0's.
        told = gather_json(world, self._told() if world.rank == 0 else None)[0]
        text, changes, fallen = cast("tuple[str, int, list[list[int]]]", told)
        self._fallen = {tuple(cut) for cut in fallen}
        self._steps = max(LEAST_STEPS, setup.config.run.rebalance) << changes
        self._topology = cluster_file.parse(text)
        self._parts = parts_of(self._job(setup.plan))

    def _told(self) -> tuple[str, int, list[list[int]]]:
        size = self._setup.world_size
        found = machine(device_of(self._setup.config), size) or _unknown(size)
        changes = _changes(self._setup.config.run.dir)
        return cluster_file.dump(found), len(changes), [list(each.plan.stages or ()) for each in changes if each.fallen]

    def _job(self, plan: Plan) -> Job:
        train = self._setup.config.train
        return Job(
            model=self._setup.model,
            plan=plan,
            topology=self._topology,
            seq=self._setup.config.data.seq,
            global_batch=train.global_batch,
            practice=practice(self._topology),
        )

    def observe(self, step: int, seconds: float, computes: Sequence[float]) -> Change | None:
        """Take a step: its ``seconds``, and what each rank computed in it; ``step`` are done. The change to make now,
        the same on every rank; collective where it looks.

        Nothing changes when fewer steps are left than were looked at.
        """
        if self._warm:
            self._warm -= 1
            return None
        self._rows.append(_Row(seconds=seconds, computes=tuple(computes)))
        if len(self._rows) < self._steps:
            return None
        rows, self._rows = self._rows, []
        change = self._wanted(rows, step) if self._setup.config.train.steps - step >= self._steps else None
        answers = gather_json(self._world, None if change is None else change.fields["new"])
        return change if all(answer == answers[0] for answer in answers) else None

    def _wanted(self, rows: Sequence[_Row], step: int) -> Change | None:
        setup = self._setup
        now = stage_layers(setup.model, setup.plan)
        line = self._pipeline(rows, now)
        new = best_cut(line, now, self._fits)
        half = len(rows) // 2
        gains = [self._gain(part, now, new) for part in (rows[:half], rows[half:], rows)]
        if min(gains) < WORTH:
            return None
        plan = dataclasses.replace(setup.plan, stages=new)
        config = dataclasses.replace(setup.config, plan=plan, run=dataclasses.replace(setup.config.run, resume=True))
        fields: dict[str, object] = {
            "step": step,
            "old": list(now),
            "new": list(new),
            "slow": [round(slow / min(line.slow), 3) for slow in line.slow],
            "gain": round(gains[-1], 3),
            "plan": str(plan),
        }
        return Change(setup=dataclasses.replace(setup, plan=plan, config=config), fields=fields)

    def _gain(self, rows: Sequence[_Row], now: Sequence[int], new: Sequence[int]) -> float:
        """The share of a step that ``new`` saves by what ``rows`` say."""
        line = self._pipeline(rows, now)
        before = line.seconds(now)
        return (before - line.seconds(new)) / max(before, median(row.seconds for row in rows))

    def _pipeline(self, rows: Sequence[_Row], now: Sequence[int]) -> Line:
        """The pipeline as ``rows`` show it. Of the ranks that share a stage the slowest counts: the others wait."""
        plan, m = self._setup.plan, self._setup.microbatches
        ranks = [median(values) for values in zip(*(row.computes for row in rows), strict=True)]
        seconds = [0.0] * plan.pp
        for members in self._line:
            seconds[self._world.mesh.coordinate(members[0])["pp"]] = max(ranks[rank] for rank in members)
        slow = slowness(self._parts, plan, now, seconds, m)
        return Line(plan=plan, parts=self._parts, slow=tuple(slow), microbatches=m)

    def _fits(self, cut: tuple[int, ...]) -> bool:
        """Whether every rank has room for ``cut``: by the memory model, or no more than it has now; and whether it has
        not been tried in vain."""
        plan = self._setup.plan
        if cut in self._fallen:
            return False
        room = max(self._topology.device.memory, self._peak(plan))
        return self._peak(dataclasses.replace(plan, stages=cut)) <= room

    def _peak(self, plan: Plan) -> float:
        return Ranks(self._job(plan)).report().fullest.peak


def _unknown(devices: int) -> Topology:
    """Devices that the planner does not know, with the memory that they have."""
    found = cluster(_UNKNOWN, devices)
    if not torch.cuda.is_available():
        return found
    memory = float(torch.cuda.get_device_properties(0).total_memory)
    return dataclasses.replace(found, device=dataclasses.replace(found.device, memory=memory))


def watches(setup: Setup) -> bool:
    """Whether the run's cut may change: it has one, and ``run.rebalance`` asks for it."""
    return bool(setup.config.run.rebalance) and setup.plan.pp > 1


def recalled(setup: Setup) -> Setup:
    """``setup`` under the last cut that a run which goes on had under this plan, where it has changed it and taken a
    step since: one under which a rank has failed before that may have no room, whatever the memory model says.

    Which cut a plan gives makes no other difference, so a run that may change it takes it up where it was.
    """
    if not (watches(setup) and setup.config.run.resume):
        return setup
    for change in reversed(_changes(setup.config.run.dir)):
        plan = change.plan
        if change.fallen:
            if plan.stages != setup.plan.stages:
                continue
            plan = dataclasses.replace(plan, stages=change.old)  # the run's folder has the cut that was tried in vain
        if dataclasses.replace(plan, stages=None) != dataclasses.replace(setup.plan, stages=None):
            continue
        train, shape = setup.config.train, model_shape(setup.model)
        try:
            size, batch = setup.world_size, train.global_batch
            check(plan, shape, world_size=size, global_batch=batch, seq=setup.config.data.seq)
        except PlanError:
            continue
        return dataclasses.replace(setup, plan=plan, config=dataclasses.replace(setup.config, plan=plan))
    return setup


def agreed(setup: Setup, world: World) -> Setup:
    """``setup`` under the plan that rank 0 has: ranks of other hosts may have read an older log. Collective."""
    plan = Plan.parse(str(gather_json(world, str(setup.plan))[0]))
    if plan == setup.plan:
        return setup
    return dataclasses.replace(setup, plan=plan, config=dataclasses.replace(setup.config, plan=plan))


@dataclass(frozen=True, kw_only=True)
class _Made:
    """A change that a run has made, and whether a rank failed under it before it had taken a step."""

    plan: Plan
    old: tuple[int, ...]
    fallen: bool


def _changes(folder: Path | None) -> list[_Made]:
    """What the run in ``folder`` has changed to, oldest first."""
    found = read(folder / EVENTS) if folder is not None else []
    made = []
    for place, event in enumerate(found):
        if event.kind == REBALANCED:
            # The first that came after it decides: ranks that have taken steps may fail there again after a restart.
            after = next((one for one in found[place + 1 :] if one.kind in (REBALANCED, FAILURE)), event)
            fallen = after.kind == FAILURE and after.fields.get("step", 0) <= event.fields.get("step", 0)
            plan, old = Plan.parse(str(event.fields["plan"])), tuple(event.fields.get("old", ()))
            made.append(_Made(plan=plan, old=old, fallen=fallen))
    return made
