"""What the time model says of a cell: seconds of each kind of layer, of the embedding, and of the head."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from plait.core.plan import Plan
from plait.planner.kernels import Machine
from plait.planner.ops import Slice
from plait.planner.pace import launch_of
from plait.planner.pipes import Floats
from plait.planner.space import MODES, Cell, Form, Request, plan_of
from plait.planner.stages import end_times, layer_times, slice_of


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Of one microbatch: each kind of layer, the embedding, the head."""

    phases: Floats
    """F, B and W on the device, with what they wait for [3, kinds + 2]."""
    host: Floats
    """Launches of the host, with the same [kinds + 2]."""


@final
class CellSeconds:
    """Those of one request, whose layers are of ``kinds`` (experts, window)."""

    def __init__(self, request: Request, machine: Machine, kinds: Sequence[tuple[bool, int | None]]) -> None:
        self._request, self._machine, self._kinds = request, machine, kinds
        practice = request.practice
        self._launch = 0.0 if practice.graph else launch_of(machine, practice)
        self._waits = 1.0 if self._launch else 0.0  # see `plait.planner.pace`

    @functools.cache  # noqa: B019 - lives as long as the search
    def of(self, cell: Cell, mode: str) -> Seconds:
        """With layers recomputed as ``mode`` says."""
        cut = self.slice(cell)
        known = mode if mode in MODES else "none"  # ranges of layers: no less than that
        parts = [layer_times(self._machine, cut, *kind, known) for kind in self._kinds]
        # The ends know nothing of experts and contexts: cells share them.
        ends = self.slice(dataclasses.replace(cell, ep=1, etp=cell.tp, context="ring"))
        parts += [end_times(self._machine, ends, last) for last in (False, True)]
        host = [sum(phase.launches * self._launch + phase.waits * self._waits for phase in part) for part in parts]
        return Seconds(phases=np.array([[phase.total for phase in part] for part in parts]).T, host=np.array(host))

    @functools.cache  # noqa: B019 - lives as long as the search
    def slice(self, cell: Cell) -> Slice:
        """A rank's share of a layer."""
        return slice_of(self._request.job(self.plan(cell)))

    def plan(self, cell: Cell) -> Plan:
        """A plan of the cell, whatever its form."""
        form = Form(pp=1, dp=1, schedule="1f1b", virtual=1, stages=None, recompute="none", zero=0)
        return plan_of(self._request, cell, form)
