"""What follows the microbatches of a step, at least: gradients, weights of ZeRO, and the optimizer of a mean rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

import numpy as np

from plait.core.legal import divisors
from plait.planner.kernels import Machine
from plait.planner.leaves import State
from plait.planner.pipes import Floats
from plait.planner.space import ZEROS, Cell, Request, pipeline_sizes, zeros
from plait.planner.wires import Group, collective, nested

ROUNDING: Final = 1.0 - 1e-9
"""Sums in another order than the model's."""


@dataclass(frozen=True, kw_only=True)
class After:
    """By number of pipeline ranks and ZeRO level: seconds of the communication of gradients and weights, and of the
    update; bytes of a mean rank's state. Infinite where a level makes no sense."""

    sent: Floats
    updates: Floats
    state: Floats


@final
class Tails:
    """Of one request. ``constant`` reads the table of the machine's family."""

    def __init__(self, request: Request, machine: Machine, constant: Callable[[str], float]) -> None:
        self._request, self._machine, self._constant = request, machine, constant
        self._state = State(request)
        self._sizes = pipeline_sizes(request)
        self._slowing = min(1.0, constant("contention"))
        self._thirds = np.array([zero == 3 for zero in ZEROS])
        # What a second of compute hides of communication, beside what hidden communication costs.
        usable = [min(1.0, constant("prefetch_share" if one else "hidden_share")) for one in self._thirds]
        self._hidden = np.array(usable) * (1.0 - self._slowing)
        self._known: dict[tuple[int, int], After] = {}

    def state_of(self, cell: Cell, pp: int, dp: int, zero: int) -> float:
        """Bytes of state of a mean rank."""
        return self._state.bytes(cell, pp, dp * cell.cp, zero)

    def counts(self, cell: Cell) -> Floats:
        """Microbatches by number of pipeline ranks; no whole numbers where there are no such plans."""
        request = self._request
        return np.asarray(
            request.global_batch * cell.tp * cell.cp * np.array(self._sizes) / (request.world_size * cell.micro)
        )

    def least(self, cell: Cell, counts: Floats, plain: Floats) -> float:
        """Seconds of a step with the best number of pipeline ranks and ZeRO level whose state fits.

        ``plain``: seconds at least of ``counts`` microbatches, by number of pipeline ranks. Under a rank that computes
        longer more is hidden, but no more than it is longer by.
        """
        after = self.of(cell)
        times = np.where(self._thirds, counts[:, None], 1.0)
        shown = after.sent - self._hidden * (plain / counts)[:, None]
        with np.errstate(invalid="ignore"):  # what makes no sense is infinite, times no slowing at all
            tails = times * np.maximum(after.sent * self._slowing, shown) + after.updates
        fits = (after.state <= self._request.memory) & (counts == np.floor(counts))[:, None]
        return float(np.where(fits, plain[:, None] + tails, np.inf).min())

    def seconds(self, sent: Floats, updates: Floats, counts: Floats, busiest: Floats) -> Floats:
        """Of a rank of every pipeline, at least [pipes, modes, zeros].

        ``sent`` and ``updates`` [pipes, zeros], ``counts`` microbatches, ``busiest`` seconds of a microbatch that may
        hide communication [pipes, modes]. A mean rank's: no more than the slowest one's. Communication that compute
        hides still slows it; what is longer than the work it may hide under is not hidden.
        """
        shown, update = sent[:, None], updates[:, None]
        hidden = self._hidden * busiest[:, :, None]
        times = np.where(self._thirds, counts[:, None], 1.0)[:, None]
        return np.asarray((times * np.maximum(shown * self._slowing, shown - hidden) + update) * ROUNDING)

    def of(self, cell: Cell) -> After:
        """By number of pipeline ranks and ZeRO level; the same for all cells that cut parameters alike."""
        experts, world = cell.ep * cell.etp, self._request.world_size
        if (cell.tp, experts) not in self._known:
            sent, updates, state = np.full((3, len(self._sizes), len(ZEROS)), np.inf)
            for place, pp in enumerate(self._sizes):
                dp = world // (cell.tp * pp)
                if world % (cell.tp * pp) or dp * cell.tp % experts:
                    continue
                for zero in zeros(self._request.fix, dp):
                    sent[place, zero], updates[place, zero] = self._updates(cell, pp, dp, zero)
                    state[place, zero] = self._state.bytes(cell, pp, dp, zero)
            self._known[cell.tp, experts] = After(sent=sent, updates=updates, state=state)
        return self._known[cell.tp, experts]

    def _shared(self, count: float, group: Group, block: int, zero: int) -> float:
        """Seconds of the messages of ``count`` parameters shared by blocks of neighbours of ``group``."""
        machine, grad, wire = self._machine, self._state.grad * count, self._state.wire * count
        inner, across = nested(group, block)
        sent = collective(machine, "reduce_scatter", grad, inner)
        sent += collective(machine, "all_reduce", grad / block, across)
        # Gathered once a step; at ZeRO 3 for every forward and every backward.
        return sent + (2 if zero == 3 else 1) * collective(machine, "all_gather", wire, inner)

    def _updates(self, cell: Cell, pp: int, data: int, zero: int) -> tuple[float, float]:
        """Seconds of a mean rank: communication of gradients and weights among ``data`` ranks, once each, and the
        optimizer."""
        machine, state, experts = self._machine, self._state, cell.ep * cell.etp
        update = sent = 0.0
        for count, sharing, stride in (
            (state.dense / cell.tp, data, cell.tp),
            (state.experts / experts, data * cell.tp // experts, experts),
        ):
            each, group = count / pp, Group(size=sharing, stride=stride)
            update += each / (sharing if zero else 1) * (2 * state.optimizer + state.grad + state.wire)
            if not each:
                continue
            if zero == 0:
                sent += collective(machine, "all_reduce", state.grad * each, group)
                continue
            given = self._request.fix.get("zero_group")
            blocks = divisors(sharing) if given is None else [math.gcd(int(str(given)), sharing)]
            sent += min(self._shared(each, group, block, zero) for block in blocks)
        return sent, update * self._constant("optimizer_passes") / machine.optimizer_bandwidth
