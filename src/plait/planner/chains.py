"""The longest chains of actions of simulated steps: with other seconds a step takes no less than any of its chains.

A step's time is that of the longest chain of actions that wait for each other, so that a chain found once bounds all
steps of the same lists from below, whatever their costs; with costs alike it is nearly the time itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, final

import numpy as np

from plait.planner.fast_lists import B, Lists, W, make_lists
from plait.planner.fast_simulate import Floats, Timing, simulate_lists
from plait.schedule.simulate import Cost

SIMULATED: Final = ("zb-h1", "zb-h2", "zb-v", "dualpipe-v")
"""Schedules whose time has no closed form."""
_MOST_ACTIONS: Final = 40_000
"""Of a step that is simulated whole, without its period."""
_MOST: Final = 6
"""Chains that are kept of one step."""

Step = tuple[str, int, int, int]
"""Schedule, ranks, microbatches, virtual stages a rank."""


@dataclass(frozen=True, kw_only=True)
class Chain:
    """How often a chain goes through F, B and W of each stage [3, stages], and across boundaries between ranks."""

    times: Floats
    hops: int


def longest(timing: Timing) -> Chain:
    """The chain that ends last, back from its end: each action begins as the one before it ends, on its rank or another
    from which its data come."""
    lists = timing.lists
    times, hops = np.zeros((3, lists.stages)), 0
    numbers = np.concatenate([[0], np.cumsum(lists.lengths)])
    rank, place = (int(at) for at in np.unravel_index(int(timing.ends.argmax()), timing.ends.shape))
    while True:
        times[lists.kinds[rank, place], lists.stage[rank, place]] += 1
        start = timing.starts[rank, place]
        if start <= 0:
            break
        need = int(lists.needs.need[rank, place])
        if place > 0 and (timing.ends[rank, place - 1] >= start or need >= lists.needs.size):
            place -= 1
            continue
        hops += int(lists.needs.boundary[rank, place] < lists.stages - 1)
        rank = int(np.searchsorted(numbers, need, side="right")) - 1
        place = need - int(numbers[rank])
    times[W] += np.where(lists.splits, 0.0, times[B])  # a backward that is not split is one action
    return Chain(times=times, hops=hops)


@lru_cache(maxsize=64)
def _lists(step: Step) -> Lists:
    name, ranks, microbatches, virtual = step
    return make_lists(name, ranks=ranks, microbatches=microbatches, virtual=virtual)


@final
class Chains:
    """Those that one search has found."""

    def __init__(self) -> None:
        self._known: dict[Step, list[Chain]] = {}

    def learn(self, step: Step, costs: Sequence[Cost], transfer: float) -> None:
        """Keep the chain of a step of these costs, one a stage, unless there are many of it already."""
        name, ranks, microbatches, virtual = step
        kept = self._known.setdefault(step, [])
        if name in SIMULATED and len(kept) < _MOST and 3 * ranks * microbatches * virtual <= _MOST_ACTIONS:
            kept.append(longest(simulate_lists(_lists(step), costs, transfer)))

    def knows(self, step: Step) -> bool:
        """Whether there is a chain of such a step."""
        return bool(self._known.get(step))

    def seconds(self, step: Step, costs: Floats, hop: float, extra: Floats | None = None) -> float:
        """Of a step, at least; 0 where no chain is known.

        ``costs``: F, B and W of the stages [3, stages]; ``hop`` a transfer; ``extra``: what each rank computes more in
        the backwards of one microbatch, in which of its stages is not known [ranks].
        """
        found = 0.0
        for chain in self._known.get(step, ()):
            took = float((chain.times * costs).sum()) + chain.hops * hop
            if extra is not None:
                took += float((self._least(step, chain) * extra).sum())
            found = max(found, took)
        return found

    def _least(self, step: Step, chain: Chain) -> Floats:
        """Backwards of the stage of each rank that the chain meets least [ranks]."""
        homes, backwards = _lists(step).homes, chain.times[B]
        found = np.full(step[1], np.inf)
        np.minimum.at(found, homes, backwards)
        return found
