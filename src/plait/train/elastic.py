"""Another plan for the ranks that are there, when some are gone or have come back: same global batch, same data order.

A checkpoint loads under any plan, and every plan computes the same run. So a run that loses a device goes on under the
next plan that works: of ``run.fallback_plans`` in order, or the planner's, or the one nearest to its own, on as many
ranks as can be used.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from plait.core.config import Config
from plait.core.errors import ConfigError, PlanError
from plait.core.facts import Facts
from plait.core.legal import check, nearest_plans
from plait.core.plan import Plan
from plait.parallel.layout import model_shape
from plait.train.auto import planned
from plait.train.launch import placed
from plait.train.run import model_config
from plait.train.supervise import restarted

SLOTS = "PLAIT_SLOTS"
"""Environment variable that names a file with the places for ranks on this machine that can be used now, as numbers
from 0 with spaces between them: whoever takes a device away, or brings it back, writes it."""
_KEPT = ("bucket_mb", "compress", "precision")
"""Plan keys that a run goes on with: what its numbers are rounded to."""
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


def fit(config: Config, ranks: int, *, exactly: bool = False) -> tuple[Config, int]:
    """``config`` under a plan for at most ``ranks`` ranks, and how many it uses; PlanError where none can work.

    Its own plan where that fits. Else the first of ``run.fallback_plans`` that does; without any, the planner's, and
    where it finds none a plan that changes as little as it can (`nearest_plans`), on as many ranks as can be used.
    ``exactly``: every rank has to be used, as those have that another launcher started.
    """
    shape, train, seq = model_shape(model_config(config)), config.train, config.data.seq
    given = [Plan.parse(text) for text in config.run.fallback_plans]
    least = ranks if exactly else 1
    for plan in [config.plan, *given]:
        for size in range(ranks, (ranks if plan is config.plan else least) - 1, -1):
            try:
                check(plan, shape, world_size=size, global_batch=train.global_batch, seq=seq)
            except PlanError:
                continue
            return dataclasses.replace(config, plan=plan.resolve(size)), size
    if not given:
        free = dataclasses.replace(config.plan, dp=None, stages=None)
        for size in range(ranks, least - 1, -1):
            best = _best(config, size, alone=not exactly)
            if best is not None:
                return dataclasses.replace(config, plan=best.resolve(size)), size
            facts = Facts(plan=free, shape=shape, world_size=size, global_batch=train.global_batch, seq=seq)
            found = _nearest(facts)
            if found is not None:
                return dataclasses.replace(config, plan=found.resolve(size)), size
    tried = f"none of run.fallback_plans = {list(config.run.fallback_plans)}" if given else "no plan near it"
    fewer = "" if exactly else " or fewer"
    raise PlanError(f"plan {str(config.plan)!r} does not work on {ranks} ranks, and {tried} does on so many{fewer}")


def rejoined(config: Config) -> Config:
    """``config`` as ranks go on with it that another launcher started, perhaps again, perhaps another number of them.

    After a restart by torchrun a run with a folder goes on where its last commit is; a run that goes on does so under
    a plan for the ranks that there are. Any other run is left as it is. PlanError where no plan can work.
    """
    place = placed()
    if restarted() and config.run.dir is not None:
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, resume=True))
    if place is None or not config.run.resume:
        return config
    return fit(config, place.world_size, exactly=True)[0]


def _best(config: Config, ranks: int, *, alone: bool) -> Plan | None:
    """The planner's plan for ``ranks`` of this machine, of the same numbers on the wire; None where it finds none."""
    try:
        return planned(dataclasses.replace(config, auto=_KEPT), ranks=ranks, alone=alone).plan
    except (ConfigError, PlanError):
        return None


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
