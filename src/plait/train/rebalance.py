"""Placement of experts by load, between steps: measured loads decide which rank holds which experts.

Loads are smoothed over steps, and experts move only when that evens the ranks out by more than `WORTH`: a move sends
the weights and both moments of what moves. The hottest experts are shadowed where that pays (`shadows_for`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast, final

import torch
from torch import Tensor

from plait.parallel.apply import Parallel
from plait.parallel.placement import Placement, identity, loads, place
from plait.train.exchange import gather_json

EVERY = 10
"""Steps between two looks at the loads."""
KEEP = 0.7
"""Share of the smoothed load that a new step leaves."""
WORTH = 0.05
"""Least gain, as a share of the fullest rank's load, that experts are moved for."""


@final
class Rebalance:
    """Watches the loads of a run with ``ep`` ranks and places its experts anew."""

    def __init__(self, parallel: Parallel) -> None:
        self._parallel = parallel
        self._smooth: dict[int, list[float]] = {}

    def after_step(self, step: int, routers: Mapping[int, Tensor], optimizer: torch.optim.Optimizer | None) -> None:
        """Take in a step's loads, the same on every rank; every `EVERY` steps move what pays. Collective then."""
        for layer, load in self._parallel.loads(routers).items():
            old = self._smooth.get(layer, load)
            self._smooth[layer] = [KEEP * a + (1 - KEEP) * b for a, b in zip(old, load, strict=True)]
        if (step + 1) % EVERY:
            return
        moved = False
        for layer, load in self._smooth.items():
            mixture = self._parallel.mixtures.get(layer)
            if mixture is None:
                continue  # on other pipeline ranks
            wanted = better(load, mixture.placement)
            if wanted is not None:
                self._parallel.place_experts(layer, wanted, optimizer)
                moved = True
        if moved:
            self._parallel.zero.publish()

    def state(self) -> dict[str, Any]:
        """Smoothed loads and placements of all layers, as plain JSON, the same on every rank. Collective."""
        here = {
            str(layer): {"order": list(mixture.placement.order), "shadows": list(mixture.placement.shadows)}
            for layer, mixture in self._parallel.mixtures.items()
        }
        found: dict[str, object] = {}
        for rows in cast("list[dict[str, object]]", gather_json(self._parallel.world, here)):
            found |= rows
        loads_of = {str(layer): load for layer, load in self._smooth.items()}
        return {"ep": self._parallel.plan.ep, "smooth": loads_of, "placements": found}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave, before the experts' weights are read. Other ``ep``: experts are where a new run
        has them, and what is known of their loads places them at the next look."""
        self._smooth = {int(layer): list(load) for layer, load in state["smooth"].items()}
        for layer, mixture in self._parallel.mixtures.items():
            kept, ranks = state["placements"].get(str(layer)), mixture.ep.size
            wanted = identity(len(mixture.placement.order), ranks)
            if kept is not None and state["ep"] == ranks:
                wanted = Placement(order=tuple(kept["order"]), ranks=ranks, shadows=tuple(kept["shadows"]))
            self._parallel.lay_experts(layer, wanted)


def better(load: Sequence[float], now: Placement) -> Placement | None:
    """The placement to go to from ``now``, or None where none is enough of a gain."""
    found = [place(load, now.ranks, shadows, before=now) for shadows in range(shadows_for(load, now.ranks) + 1)]
    # Of placements as good as the best, the one with the fewest copies.
    best = min(found, key=lambda one: (round(max(loads(one, load)) / max(sum(load), 1.0), 3), len(one.shadows)))
    fullest = max(loads(now, load))
    return best if max(loads(best, load)) < fullest * (1 - WORTH) else None


def shadows_for(load: Sequence[float], ranks: int) -> int:
    """Most experts worth a copy on every rank: those that alone are more than a rank's even share of the load."""
    return sum(one > sum(load) / ranks for one in load)
