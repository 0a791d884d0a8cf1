"""From measured links to the order in which ranks are started."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from pathlib import Path

import pytest

from plait.core.cluster_file import dump
from plait.planner.clusters import cluster
from plait.planner.commands import plan_command


def scrambled(path: Path) -> Path:
    """Four devices of two nodes; 0 and 2 are neighbours, 1 and 3."""
    fast, slow = 4e11, 2e10
    links = tuple(tuple(0.0 if a == b else fast if (a - b) % 2 == 0 else slow for b in range(4)) for a in range(4))
    topology = cluster("h100", 4)
    measured = dataclasses.replace(topology.measured, links=links)
    path.write_text(dump(dataclasses.replace(topology, measured=measured)), encoding="utf-8")
    return path


@pytest.mark.parametrize(("fix", "places"), [(["tp=2", "pp=2"], [0, 2, 1, 3]), (["dp=4"], None)])
def test_ranks_are_ordered_by_the_links_that_were_measured(
    fix: list[str], places: list[int] | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "plan.toml"
    plan_command(
        model="llama3-8b",
        cluster_name=str(scrambled(tmp_path / "cluster.toml")),
        gpus=4,
        seq=2048,
        global_batch=16,
        fix=[*fix, "zero=3"] if fix == ["dp=4"] else fix,
        as_json=True,
        output=output,
    )
    found = json.loads(capsys.readouterr().out)["devices"]
    if places is not None:
        assert found == places
        assert "order of devices: 0 2 1 3" in output.read_text()
    assert sorted(found) in ([], [0, 1, 2, 3])
    assert tomllib.loads(output.read_text())["plan"]
