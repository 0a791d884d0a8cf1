"""`plait calibrate`: what ranks measure, which groups and pairs, what is refused, and the file it leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from itertools import combinations
from pathlib import Path

import pytest
import torch
from rich.console import Console

from plait.comm.world import World
from plait.core.cluster_file import load
from plait.core.errors import ConfigError
from plait.core.mesh import Mesh
from plait.core.topology import Device, GemmPoint, Measured, MeetingPoint, Share, Tier, Topology
from plait.models.config import PRESETS
from plait.planner.clusters import cluster
from plait.planner.local import BUSY
from plait.train import calibrate, calibrate_kernels, calibrate_layer, calibrate_links, calibrate_load, calibrate_steps
from plait.train.calibrate_links import HOST, NETWORK, partitions, tournament
from plait.train.calibrate_table import show
from plait.train.launch import Place
from tests.pool import Connect, Pool


@pytest.mark.parametrize("size", [2, 3, 6, 7])
def test_everybody_meets_everybody_once(size: int) -> None:
    rounds = list(tournament(size))
    assert len(rounds) == size - 1 + size % 2
    met = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert sorted(map(sorted, met)) == sorted(map(sorted, map(frozenset, combinations(range(size), 2))))
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks))


def test_groups_of_each_tier() -> None:
    one = list(partitions([[0, 1, 2, 3]]))
    assert one == [(HOST, [(0, 1), (2, 3)]), (HOST, [(0, 1, 2, 3)])]
    two = list(partitions([[0, 1], [2, 3], [4, 5]]))
    assert two == [
        (HOST, [(0, 1), (2, 3), (4, 5)]),
        (NETWORK, [(0, 2, 4), (1, 3, 5)]),
        (NETWORK, [(0, 1, 2, 3, 4, 5)]),
    ]
    assert list(partitions([[0], [1]])) == [(NETWORK, [(0, 1)])]


def test_products_take_their_time() -> None:
    bench = calibrate_kernels.Bench(device=torch.device("cpu"), barrier=lambda: None, budget=1e-3)
    points = calibrate_kernels.products(bench, [(8, 16, 24), (64, 256, 256)])
    assert all(isinstance(point, GemmPoint) and point.seconds > 0 for point in points)
    shapes = [(p.m, p.n, p.k) for p in points if p.precision == "fp32"]
    assert shapes == [(8, 16, 24), (64, 256, 256), (256, 256, 64)]
    (attended,) = calibrate_kernels.attention(bench, [(1, 2, 1, 32, 16)])[:1]
    assert attended.forward > 0
    assert attended.backward > 0


def _measure(connect: Connect) -> tuple[list[str], float, list[list[float]]]:
    world = connect(Mesh(dp=4))
    group = world.partition("pairs", [(0, 1), (2, 3)])
    points = calibrate_links.collectives(world, HOST, group, (4096, 65536), 2)
    points += calibrate_links.messages(world, HOST, [(0, 1), (2, 3)], (4096,), 2)
    assert all(point.seconds > 0 for point in points if point.op != "p2p")
    found = [point.op for point in points], calibrate_links.waiting(world), calibrate_links.matrix(world)
    world.close()
    return found


class _Taking(calibrate_kernels.Bench):
    """Measures whatever it is given as so many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__(device=torch.device("cpu"), barrier=lambda: None, budget=0.0)
        object.__setattr__(self, "answer", seconds)

    def seconds(self, work: Callable[[], object]) -> float:
        return float(vars(self)["answer"])


def test_ranks_measure_collectives_messages_and_all_pairs(pool: Pool) -> None:
    results = pool.run(4, _measure)
    ops, idle, matrix = results[0]
    assert ops == [*calibrate_links.COLLECTIVES, *calibrate_links.COLLECTIVES, "p2p"]
    assert 0 <= idle <= 1
    for _, _, other in results:
        assert other == matrix
    assert all((matrix[a][b] == 0) == (a == b) for a in range(4) for b in range(4))
    assert matrix[1][2] == matrix[2][1]


def _steps(connect: Connect, folder: str) -> list[tuple[int, int, float]]:
    world = connect(Mesh(dp=4))
    with pytest.MonkeyPatch.context() as patch:
        for module in (calibrate_layer, calibrate_steps):
            patch.setattr(module, "MODEL", replace(PRESETS["tiny"], num_layers=1, num_kv_heads=4))
            patch.setattr(module, "SEQ", 16)
        found = calibrate_steps.measure(world, Path(folder), repeats=1)
    world.close()
    return found


def test_ranks_take_steps_alone_and_together(pool: Pool, tmp_path: Path) -> None:
    (found, *_) = pool.run(4, _steps, str(tmp_path))
    assert [(ranks, micro) for ranks, micro, _ in found] == [(1, 2), (2, 1), (2, 4), (4, 1), (4, 4)]
    assert all(seconds > 0 for _, _, seconds in found)
    jobs = [job for job, _ in calibrate_steps.jobs(cluster("h100", 4), found)]
    assert [(job.plan.tp, job.plan.micro, job.microbatches) for job in jobs] == [
        (1, 2, 2),
        (2, 1, 4),
        (2, 4, 1),
        (4, 1, 4),
        (4, 4, 1),
    ]


def test_what_other_programs_take_is_told_from_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    worked = iter([100.0, 100.0 + 3.0])
    monkeypatch.setattr(calibrate_load, "_worked", lambda: next(worked))
    monkeypatch.setattr(calibrate_load.os, "cpu_count", lambda: 2)
    begun = calibrate_load.moment()
    # Two seconds ago, with one second of this process's own: of four seconds of two cores, others took two.
    begun = replace(begun, at=begun.at - 2.0, own=begun.own - 1.0)
    assert calibrate_load.foreign(World.alone(), [[0]], begun) == pytest.approx(0.5, abs=0.05)
    monkeypatch.setattr(calibrate_load, "_worked", lambda: None)
    assert calibrate_load.foreign(World.alone(), [[0]], begun) is None


class _Host:
    """A launched rank of two hosts with two ranks each."""

    def __init__(self, connect: Connect) -> None:
        self.connect = connect
        self.place = Place(rank=connect.rank, local_rank=connect.rank % 2, world_size=4, local_size=2)


def _two_hosts(connect: Connect, folder: str) -> None:
    worker = _Host(connect)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate.socket, "gethostname", lambda: f"node{connect.rank // 2}")
        calibrate.run_rank(worker, folder, quick=True, shown=False, computes=False, counts="4")  # type: ignore[arg-type]


def test_two_hosts_have_two_tiers_and_a_matrix_of_pairs(pool: Pool, tmp_path: Path) -> None:
    pool.run(4, _two_hosts, str(tmp_path))
    found = load(tmp_path / "4.toml")
    assert [(tier.name, tier.size) for tier in found.tiers] == [(HOST, 2), (NETWORK, 4)]
    assert {(p.tier, p.ranks) for p in found.measured.comm if p.op == "all_reduce"} == {
        (HOST, 2),
        (NETWORK, 2),
        (NETWORK, 4),
    }
    assert {p.tier for p in found.measured.comm if p.op == "p2p"} == {HOST, NETWORK}
    assert len(found.measured.links) == 4
    assert found.tier_index([0, 1]) == 0
    assert found.tier_index([1, 2]) == 1


def test_one_rank_writes_a_cluster_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate_kernels, "CPU_SHAPES", ((64, 64, 64), (128, 64, 64)))
    monkeypatch.setattr(calibrate_kernels, "CPU_ATTENTION", ((1, 2, 2, 64, 16),))
    monkeypatch.setattr(calibrate_layer, "MODEL", replace(PRESETS["tiny"], num_layers=1))
    monkeypatch.setattr(calibrate_layer, "SEQ", 32)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    threads = torch.get_num_threads()
    assert calibrate.run(None, as_json=True, quick=True, processes=[1], device="cpu") == 0
    torch.set_num_threads(threads)
    printed = capsys.readouterr()
    said = json.loads(printed.out)
    found = load(said["file"])
    assert found == cluster("local", found.devices)
    assert found.device.kind == "cpu"
    assert found.cores is not None
    assert found.measured.bandwidth is not None
    assert {point.precision for point in found.measured.gemm} == {"fp32", "bf16"}
    assert said["points"]["gemm"] == len(found.measured.gemm)
    assert said["busy"] == found.measured.busy is not None
    assert ("busy machine" in printed.err) == (said["busy"] > BUSY)
    assert found.with_devices(2).measured.launch == pytest.approx(
        (found.measured.launch or 0) * max(1, 2 / found.cores), rel=1e-6
    )


def test_operators_in_steps_are_at_most_as_fast_as_alone() -> None:
    """A step that takes no time, or for ever, leaves a figure between the one alone and a tenth of it."""
    device = Device(name="cpu", memory=8e9, peaks={"fp32": 1e11}, bandwidth=1e10, kind="cpu")
    measured = Measured(bandwidth=1e10)
    for seconds, found in ((0.0, 1e10), (1e9, 1e9)):
        took = calibrate_layer.seconds_of_steps(_Taking(seconds))
        assert calibrate_layer.bandwidth_in_steps(took, device, measured) == pytest.approx(found)


def test_the_table_is_plain_and_fits_a_terminal() -> None:
    late = MeetingPoint(ranks=2, apart=1e-2, seconds=2e-3)
    point = GemmPoint(m=8, n=8, k=8, precision="fp32", seconds=1e-6)
    measured = Measured(gemm=(point,), bandwidth=1e10, launch=3e-6, meetings=(late, replace(late, seconds=3e-3)))
    device = Device(name="A CPU", memory=8e9, peaks={"fp32": 1e11}, bandwidth=1e10, kind="cpu")
    shares = tuple(Share(ranks=ranks, device=device, measured=measured) for ranks in (1, 2, 4))
    tier = Tier(name="host", size=4, bandwidth=1e9, latency=1e-5)
    page = Console(width=80, file=StringIO(), highlight=False)
    show(Topology(name="here", device=device, devices=2, tiers=(tier,), shares=shares), Path("out.toml"), page)
    lines = page.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert not any(heavy in line for heavy in "┏┃━" for line in lines)
    assert [line.split()[0] for line in lines if "2.0 to 3.0" in line] == ["1", "2", "4"]


def test_what_cannot_be_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"processes=\[0\]: expected numbers of ranks, at least 1"):
        calibrate.run(tmp_path / "out.toml", processes=[0])
    with pytest.raises(ConfigError, match="cannot be written"):
        calibrate.run(tmp_path, processes=[1])
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be written"):
        calibrate.run(tmp_path / "file" / "out.toml", processes=[1])
