"""What follows the microbatches of a step, at least: gradients, weights of ZeRO, and the optimizer of a mean rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from plait.core.legal import divisors
from plait.planner.kernels import Machine
from plait.planner.leaves import State
from plait.planner.pipes import Floats
from plait.planner.saved import is_plait
from plait.planner.space import ZEROS, Cell, Request, pipeline_sizes, zeros
from plait.planner.wires import Group, collective, nested

_LONG: Final = 1e18
"""Seconds of what makes no sense."""
ROUNDING: Final = 1.0 - 1e-9
"""Sums in another order than the model's."""


Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class After:
    """By number of pipeline ranks and ZeRO level, and where groups may share state by group as well."""

    sent: Floats
    """Seconds of the communication of gradients and weights, a microbatch or a step [pipes, zeros, groups]."""
    once: Floats
    """That what is sent once a step beside it adds [pipes, zeros, groups]."""
    updates: Floats
    """Of the update [pipes, zeros]."""
    state: Floats
    """Bytes of a mean rank's state; infinite where a level makes no sense [pipes, zeros]."""


@final
class Tails:
    """Of one request. ``constant`` reads the table of the machine's family."""

    def __init__(self, request: Request, machine: Machine, constant: Callable[[str], float]) -> None:
        self._request, self._machine, self._constant = request, machine, constant
        self._state = State(request)
        self._sizes = pipeline_sizes(request)
        self._slowing = min(1.0, constant("contention"))
        # What goes with every microbatch (`plait.planner.updates`).
        own = is_plait(request.practice)
        self._beside = 1.0 if own else self._slowing
        self._each = np.array([zero == 3 or (zero == 2 and own) for zero in ZEROS])
        # What a second of compute hides of communication, beside what hidden communication costs.
        usable = [min(1.0, constant("prefetch_share" if zero == 3 else "hidden_share")) for zero in ZEROS]
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
        tails = self._added(after.sent, after.once, counts, (plain / counts)[:, None]) + after.updates
        fits = (after.state <= self._request.memory) & (counts == np.floor(counts))[:, None]
        return float(np.where(fits, plain[:, None] + tails, np.inf).min())

    def seconds(self, after: After, pipes: Ints, counts: Floats, busiest: Floats) -> Floats:
        """Of a rank of every pipeline, at least [pipes, modes, zeros].

        ``pipes``: the place of each one's number of ranks, ``counts`` microbatches, ``busiest`` seconds of a microbatch
        that may hide communication [pipes, modes]. A mean rank's: no more than the slowest one's.
        """
        sent, once, updates = after.sent[pipes][:, None], after.once[pipes][:, None], after.updates[pipes][:, None]
        return np.asarray((self._added(sent, once, counts[:, None], busiest[:, :, None]) + updates) * ROUNDING)

    def _added(self, sent: Floats, once: Floats, counts: Floats, busiest: Floats) -> Floats:
        """Seconds that the best group's communication adds [..., zeros].

        Communication that compute hides still slows it; what is longer than the work it may hide under is not hidden.
        """
        times = np.where(self._each, counts[..., None], 1.0)[..., None]
        shown = sent - (self._hidden * busiest)[..., None]
        return np.asarray((times * np.maximum(sent * self._slowing, shown) + once).min(axis=-1))

    def of(self, cell: Cell) -> After:
        """By number of pipeline ranks and ZeRO level; the same for all cells that cut parameters alike."""
        experts, world = cell.ep * cell.etp, self._request.world_size
        if (cell.tp, experts) not in self._known:
            shape = len(self._sizes), len(ZEROS)
            updates, state = np.full((2, *shape), np.inf)
            rows: dict[tuple[int, int], list[tuple[float, float]]] = {}
            for place, pp in enumerate(self._sizes):
                dp = world // (cell.tp * pp)
                if world % (cell.tp * pp) or dp * cell.tp % experts:
                    continue
                for zero in zeros(self._request.fix, dp):
                    state[place, zero] = self._state.bytes(cell, pp, dp, zero)
                    updates[place, zero] = self._updates(cell, pp, dp, zero)
                    groups = self._groups(cell, pp, dp, zero)
                    rows[place, zero] = [self._sent(cell, pp, dp, zero, group) for group in groups]
            both = np.full((2, *shape, max(map(len, rows.values()), default=1)), _LONG)
            for (place, zero), pairs in rows.items():
                both[:, place, zero, : len(pairs)] = np.array(pairs).T
            self._known[cell.tp, experts] = After(sent=both[0], once=both[1], updates=updates, state=state)
        return self._known[cell.tp, experts]

    def _groups(self, cell: Cell, pp: int, data: int, zero: int) -> list[int]:
        """Ranks that may share state: what is given, or all (0), or some of a domain where that fits."""
        given = self._request.fix.get("zero_group")
        if zero == 0 or given is not None:
            return [0 if zero == 0 else int(str(given))]
        largest = max((tier.size // cell.tp for tier in self._machine.topology.tiers[:-1]), default=1)
        smaller = [group for group in divisors(data) if 1 < group < data and group <= largest]
        fits = [self._state.bytes(cell, pp, data, zero, group) <= self._request.memory for group in smaller]
        return [0, *(group for group, fit in zip(smaller, fits, strict=True) if fit)]

    def _parts(self, cell: Cell, pp: int, data: int) -> tuple[tuple[float, Group], ...]:
        """Parameters of a mean rank, and who has copies of them: dense ones, and those of experts."""
        state, experts = self._state, cell.ep * cell.etp
        return (
            (state.dense / cell.tp / pp, Group(size=data, stride=cell.tp)),
            (state.experts / experts / pp, Group(size=data * cell.tp // experts, stride=experts)),
        )

    def _sent(self, cell: Cell, pp: int, data: int, zero: int, group: int) -> tuple[float, float]:
        """Seconds of the messages of a mean rank, where ``group`` ranks share state (0: all); what those beside add."""
        machine, sent, once = self._machine, 0.0, 0.0
        for count, copies in self._parts(cell, pp, data):
            grad, wire = self._state.grad * count, self._state.wire * count
            if zero == 0:
                sent += collective(machine, "all_reduce", grad, copies)
                continue
            block = math.gcd(group, copies.size)
            inner, across = nested(copies, block)
            scatter, gather = (
                collective(machine, op, size, inner) for op, size in (("reduce_scatter", grad), ("all_gather", wire))
            )
            summed = collective(machine, "all_reduce", grad / block, across)
            if zero == 3:  # gathered for every forward and every backward, or once
                keeps = self._request.fix.get("gather") == "step"
                sent += scatter + (0 if keeps else 2) * gather
                once += self._beside * summed + (self._slowing * gather if keeps else 0)
            elif zero == 2 or is_plait(self._request.practice):
                sent, once = sent + scatter, once + self._beside * (summed + gather)
            else:
                sent += scatter + summed + gather
        return sent, once

    def _updates(self, cell: Cell, pp: int, data: int, zero: int) -> float:
        """Seconds of a mean rank's optimizer."""
        state, update = self._state, 0.0
        for count, copies in self._parts(cell, pp, data):
            update += count / (copies.size if zero else 1) * (2 * state.optimizer + state.grad + state.wire)
        return update * self._constant("optimizer_passes") / self._machine.optimizer_bandwidth
