"""Seconds of collectives: closed forms, tiers, measured curves; and measured all-reduces of A100 nodes."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from pathlib import Path

import pytest

from plait.core.topology import CommPoint, Measured
from plait.planner.clusters import cluster
from plait.planner.kernels import Machine
from plait.planner.wires import Group, collective, exchange, laid, levels, nested

NODES = Machine(cluster("h100", 64))
GIB = 1024.0**3


def test_a_group_of_one_sends_nothing() -> None:
    assert collective(NODES, "all_reduce", GIB, Group(size=1, stride=1)) == 0


@pytest.mark.parametrize(
    ("group", "crossed"),
    [
        (Group(size=8, stride=1), [(0, 8, 1)]),
        (Group(size=8, stride=8), [(1, 8, 1)]),
        (Group(size=16, stride=4), [(0, 2, 1), (1, 8, 2)]),
        (Group(size=64, stride=1), [(0, 8, 1), (1, 8, 8)]),
        # Two of a run of four, the next run behind those of three other stages: none of it in a node of eight.
        (laid(8, 2, 4, 4), [(0, 2, 1), (1, 4, 2)]),
        (laid(2, 2, 4, 4), [(0, 2, 1)]),
        (laid(4, 4, 4, 4), [(1, 4, 1)]),
        (laid(4, 1, 2, 2), [(0, 4, 1)]),
        (nested(laid(8, 2, 4, 4), 2)[1], [(1, 4, 1)]),
        (nested(laid(8, 2, 4, 4), 4)[0], [(0, 2, 1), (1, 2, 2)]),
    ],
)
def test_tiers_that_a_group_crosses(group: Group, crossed: list[tuple[int, int, int]]) -> None:
    assert [(level.tier, level.count, level.lanes) for level in levels(NODES, group)] == crossed


def test_all_reduce_is_a_scatter_and_a_gather_and_not_slower() -> None:
    group = Group(size=8, stride=1)
    one = collective(NODES, "all_reduce", GIB, group)
    two = collective(NODES, "reduce_scatter", GIB, group) + collective(NODES, "all_gather", GIB, group)
    assert one < two < 1.3 * one


def test_large_messages_go_at_the_bandwidth_of_the_narrowest_tier() -> None:
    size = 64 * GIB
    network = 50e9 * NODES.table.of("network_share", NODES.family)
    links = 450e9 * NODES.table.of("link_share", NODES.family)
    gather = NODES.table.of("gather_share", NODES.family)
    one, all_ = Group(size=8, stride=8), Group(size=64, stride=1)
    assert collective(NODES, "all_reduce", size, one) == pytest.approx(2 * 7 / 8 * size / network, rel=0.02)
    # Eight cards a node; trees send 7/8 of everything between eight nodes, rings 63/64 over every link.
    among = max(7 / 8 / (8 * network), 63 / 64 / links)
    assert collective(NODES, "all_reduce", size, all_) == pytest.approx(2 * among * size, rel=0.02)
    ring = 63 / 64 / min(8 * network, links) / gather
    assert collective(NODES, "all_gather", size, all_) == pytest.approx(ring * size, rel=0.02)


def test_small_messages_are_latency() -> None:
    inside = collective(NODES, "all_gather", 1024.0, Group(size=8, stride=1))
    across = collective(NODES, "all_gather", 1024.0, Group(size=8, stride=8))
    assert 1e-6 < inside < across < 1e-3


def test_neighbours_in_a_node_are_nearer_than_across() -> None:
    inside = collective(NODES, "p2p", 1e8, Group(size=2, stride=1))
    across = collective(NODES, "p2p", 1e8, Group(size=2, stride=8))
    assert across > 4 * inside


def test_a_token_that_goes_to_a_node_once_costs_less() -> None:
    group = Group(size=32, stride=1)
    often = exchange(NODES, GIB, group, 8, once=False)
    once = exchange(NODES, GIB, group, 8, once=True)
    nodes = 4
    met = nodes * (1 - (1 - 1 / nodes) ** 8) / 8
    assert once < often * met * 1.1
    inside = Group(size=8, stride=1)
    assert exchange(NODES, GIB, inside, 8, once=True) == exchange(NODES, GIB, inside, 8, once=False)


def test_measured_curves_take_precedence() -> None:
    topology = cluster("h100", 8)
    tier = topology.tiers[0].name
    points = tuple(
        CommPoint(op="all_reduce", tier=tier, ranks=8, size=size, seconds=time)
        for size, time in ((1e6, 1e-3), (1e7, 2e-3), (1e8, 11e-3))
    )
    machine = Machine(dataclasses.replace(topology, measured=Measured(comm=points)))
    group = Group(size=8, stride=1)
    assert collective(machine, "all_reduce", 1e7, group) == pytest.approx(2e-3)
    assert collective(machine, "all_reduce", 5.5e7, group) == pytest.approx(6.5e-3)
    assert collective(machine, "all_reduce", 1e3, group) == pytest.approx(1e-3)
    assert collective(machine, "all_reduce", 1e9, group) == pytest.approx(0.11)


def test_measured_all_reduces_of_a_node(shared: Path) -> None:
    rows = json.loads((shared / "published" / "calib_nccl_allreduce_vtrain.json").read_text(encoding="utf-8"))["rows"]
    machine = Machine(cluster("a100-80g", 8))
    errors = [
        abs(math.log(collective(machine, "all_reduce", row["bytes"], Group(size=row["ngpus"], stride=1)) / time))
        for row in rows
        if row["gpu"] == "A100" and (time := row["time_ns"] * 1e-9)
    ]
    assert len(errors) > 100
    assert statistics.median(errors) < 0.1
    assert max(errors) < 0.4
