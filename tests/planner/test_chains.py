"""Chains of actions: the one that is found is a step's time, and bounds other steps of the same lists."""

from __future__ import annotations

import random

import numpy as np
import pytest

from plait.planner.chains import Chains, longest
from plait.planner.fast_lists import make_lists
from plait.planner.fast_simulate import simulate_lists
from plait.schedule.simulate import Cost


def drawn(draw: random.Random, stages: int) -> list[Cost]:
    return [
        Cost(forward=draw.uniform(1, 2), backward=draw.uniform(1, 2), weight=draw.uniform(0.5, 1.5))
        for _ in range(stages)
    ]


def table(costs: list[Cost]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    return np.array([[one.forward, one.backward, one.weight] for one in costs]).T


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "zb-v", "dualpipe-v"])
def test_the_longest_chain_is_the_step(name: str) -> None:
    draw, virtual = random.Random(name), 2 if name.endswith("-v") else 1
    for ranks, microbatches in ((2, 4), (4, 8), (4, 16)):
        lists = make_lists(name, ranks=ranks, microbatches=microbatches, virtual=virtual)
        costs, transfer = drawn(draw, ranks * virtual), draw.uniform(0, 0.3)
        timing = simulate_lists(lists, costs, transfer)
        chain = longest(timing)
        assert (chain.times * table(costs)).sum() + chain.hops * transfer == pytest.approx(timing.makespan)
        chains, step = Chains(), (name, ranks, microbatches, virtual)
        assert chains.seconds(step, table(costs), transfer) == 0.0
        chains.learn(step, costs, transfer)
        near = [
            Cost(
                forward=one.forward * draw.uniform(0.98, 1.02),
                backward=one.backward * draw.uniform(0.98, 1.02),
                weight=one.weight * draw.uniform(0.98, 1.02),
            )
            for one in costs
        ]
        assert chains.seconds(step, table(near), transfer) > 0.96 * simulate_lists(lists, near, transfer).makespan
        for _ in range(10):
            others, hop = drawn(draw, ranks * virtual), draw.uniform(0, 0.3)
            took = simulate_lists(lists, others, hop).makespan
            assert 0 < chains.seconds(step, table(others), hop) <= took * (1 + 1e-12)
            # What a rank computes more in its backwards, in whichever of its stages.
            more = np.array([draw.uniform(0, 2) for _ in range(ranks)])
            share = draw.random()
            for rank in range(ranks):
                held = [stage for stage in range(ranks * virtual) if lists.homes[stage] == rank]
                for stage, part in zip(held, (share, 1 - share) if virtual == 2 else (1.0,), strict=True):
                    one = others[stage]
                    others[stage] = Cost(
                        forward=one.forward, backward=one.backward + part * more[rank], weight=one.weight
                    )
            longer = simulate_lists(lists, others, hop).makespan
            assert chains.seconds(step, table(others), hop) <= longer * (1 + 1e-12)
            assert chains.seconds(step, table(others), hop, more) >= chains.seconds(step, table(others), hop)


def test_extra_seconds_are_counted_once_a_backward() -> None:
    step, costs = ("zb-v", 2, 4, 2), [Cost(forward=1, backward=1, weight=1)] * 4
    lists = make_lists("zb-v", ranks=2, microbatches=4, virtual=2)
    chains = Chains()
    chains.learn(step, costs, 0.0)
    for more in ([1.0, 0.0], [0.0, 1.0], [0.5, 2.0]):
        for first in (0.0, 0.3, 1.0):
            changed = [
                Cost(forward=1, backward=1 + more[lists.homes[stage]] * (first if stage < 2 else 1 - first), weight=1)
                for stage in range(4)
            ]
            took = simulate_lists(lists, changed, 0.0).makespan
            assert chains.seconds(step, table(costs), 0.0, np.array(more)) <= took + 1e-12
