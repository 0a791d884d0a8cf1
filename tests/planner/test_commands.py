"""From measured links to the order in which ranks are started."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from pathlib import Path

import pytest
from rich.console import Console

from plait.core.cluster_file import dump
from plait.core.topology import Measured
from plait.planner.clusters import cluster
from plait.planner.commands import plan_command


def with_links(path: Path, neighbours: set[frozenset[int]]) -> Path:
    """Four devices of two nodes; ``neighbours`` share one."""
    links = tuple(
        tuple(0.0 if a == b else 4e11 if frozenset((a, b)) in neighbours else 2e10 for b in range(4)) for a in range(4)
    )
    topology = cluster("h100", 4)
    measured = dataclasses.replace(topology.measured, links=links)
    path.write_text(dump(dataclasses.replace(topology, measured=measured)), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("nodes", "places"),
    [(((0, 2), (1, 3)), [0, 2, 1, 3]), (((0, 1), (2, 3)), [])],
    ids=["scrambled", "in order"],
)
def test_ranks_are_ordered_by_the_links_that_were_measured(
    nodes: tuple[tuple[int, int], ...], places: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "plan.toml"
    plan_command(
        model="llama3-8b",
        cluster_name=str(with_links(tmp_path / "cluster.toml", {frozenset(node) for node in nodes})),
        gpus=4,
        seq=2048,
        global_batch=16,
        fix=["tp=2", "pp=2"],
        as_json=True,
        output=output,
    )
    said = json.loads(capsys.readouterr().out)
    assert (said["devices"], said["doubt"]) == (places, "")
    assert ("order of devices: 0 2 1 3" in output.read_text()) == bool(places)
    assert tomllib.loads(output.read_text())["plan"]["tp"] == 2


def test_figures_of_a_busy_machine_are_said_to_be_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    topology = cluster("h100", 4)
    file = tmp_path / "cluster.toml"
    file.write_text(dump(dataclasses.replace(topology, measured=Measured(busy=0.4))), encoding="utf-8")
    plan_command(
        model="llama3-8b", cluster_name=str(file), gpus=4, seq=2048, global_batch=16, console=Console(width=200)
    )
    assert "measured on a busy machine: other programs took 40% of its cores" in capsys.readouterr().out
