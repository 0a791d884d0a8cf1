"""Another plan for the ranks that are there, when some are gone or have come back: same global batch, same data order.

A checkpoint loads under any plan, and every plan computes the same run. So a run that loses a device goes on under the
next plan that works: of ``run.fallback_plans`` in order, or the one nearest to its own, on as many ranks as can be
used.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from plait.core.config import Config
from plait.core.errors import PlanError
from plait.core.facts import Facts
from plait.core.legal import check, nearest_plans
from plait.core.plan import Plan
from plait.parallel.layout import model_shape
from plait.train.run import model_config

SLOTS = "PLAIT_SLOTS"
"""Environment variable that names a file with the places for ranks on this machine that can be used now, as numbers
from 0 with spaces between them: whoever takes a device away, or brings it back, writes it."""
FAILURES = 2
"""A rank that fails this many times in a row before its first step has lost its device."""


@dataclass(kw_only=True)
class Slots:
    """Which of the ``total`` places for ranks on this machine can be used.

    A place is lost when the same rank has failed `FAILURES` times in a row at once; it is tried again when the file
    that `SLOTS` names is written anew, which has the last word.
    """

    total: int
    file: Path | None = None
    lost: set[int] = field(default_factory=set)
    _written: int = 0

    @classmethod
    def of(cls, total: int, environment: Mapping[str, str] = os.environ) -> Slots:
        """The places of a run that wants ``total`` ranks here."""
        name = environment.get(SLOTS)
        return cls(total=total, file=Path(name) if name else None)

    def usable(self) -> tuple[int, ...]:
        """The places that are there, in order; all of them where no file says otherwise."""
        listed: Sequence[int] = range(self.total)
        if self.file is not None:
            try:
                written = self.file.stat().st_mtime_ns
                numbers = [int(word) for word in self.file.read_text(encoding="ascii").split()]
            except (OSError, ValueError):
                numbers, written = [*listed], self._written  # none, or half written: nothing has changed
            if written != self._written:
                self._written = written
                self.lost.clear()
            listed = sorted({number for number in numbers if 0 <= number < self.total})
        return tuple(place for place in listed if place not in self.lost)


def fit(config: Config, ranks: int) -> tuple[Config, int]:
    """``config`` under a plan for at most ``ranks`` ranks, and how many it uses; PlanError where none can work.

    Its own plan where that fits. Else the first of ``run.fallback_plans`` that does; without any, a plan that changes
    as little as it can (`nearest_plans`), on as many ranks as can be used.
    """
    shape, train = model_shape(model_config(config)), config.train
    given = [Plan.parse(text) for text in config.run.fallback_plans]
    for plan in [config.plan, *given]:
        for size in _sizes(plan, ranks, whole=plan is config.plan):
            try:
                check(plan, shape, world_size=size, global_batch=train.global_batch, seq=config.data.seq)
            except PlanError:
                continue
            return dataclasses.replace(config, plan=plan.resolve(size)), size
    if not given:
        free = dataclasses.replace(config.plan, dp=None, stages=None)
        for size in range(ranks, 0, -1):
            batch, seq = train.global_batch, config.data.seq
            facts = Facts(plan=free, shape=shape, world_size=size, global_batch=batch, seq=seq)
            found = _nearest(facts)
            if found is not None:
                return dataclasses.replace(config, plan=found.resolve(size)), size
    tried = f"none of run.fallback_plans = {list(config.run.fallback_plans)}" if given else "no plan"
    raise PlanError(
        f"{ranks} ranks are left, and {tried} works on so many or fewer; plan {str(config.plan)!r} needs more"
    )


def _sizes(plan: Plan, ranks: int, *, whole: bool) -> Sequence[int]:
    """Numbers of ranks to try a plan on, best first. ``whole``: the run's own plan, which leaves no rank out."""
    rest = plan.tp * plan.pp * plan.cp
    if plan.dp is not None:
        return [rest * plan.dp] if rest * plan.dp <= ranks and (not whole or rest * plan.dp == ranks) else []
    return [ranks] if whole else range(ranks - ranks % max(rest, 1), 0, -max(rest, 1))


def _nearest(facts: Facts) -> Plan | None:
    """The legal plan nearest to that of ``facts``; choices that hold it up are given up one after the other."""
    plan = facts.plan
    for other in (
        plan,
        dataclasses.replace(plan, zero_group=None, node=None),
        dataclasses.replace(plan, zero_group=None, node=None, schedule="1f1b", virtual=1, live=None),
        dataclasses.replace(plan, zero_group=None, node=None, schedule="1f1b", virtual=1, live=None, cp=1, ep=1),
    ):
        found = nearest_plans(dataclasses.replace(facts, plan=other), most=1)
        if found:
            return found[0]
    return None
