"""From measured points to a cluster: the line through messages, the best of passes, shares of a host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.core.errors import ConfigError
from plait.core.plan import Plan
from plait.core.topology import AttentionPoint, CommPoint, Device, GemmPoint, Measured, Tier, Topology
from plait.models.config import PRESETS
from plait.planner.calibrate import best, fit_tier, in_steps, joined, known_device, peaks
from plait.planner.job import Job
from plait.planner.stages import machine_of, slice_of, stages_of


def _message(size: float, op: str = "p2p", ranks: int = 2) -> CommPoint:
    """10 us and 2 GB/s a step."""
    steps = 1 if op == "p2p" else 2 * (ranks - 1)
    part = size if op == "p2p" else size / ranks
    return CommPoint(op=op, tier="host", ranks=ranks, size=size, seconds=steps * (1e-5 + part / 2e9))


def test_latency_and_bandwidth_of_messages() -> None:
    found = fit_tier("host", 8, [_message(size) for size in (4e3, 1e6, 8e6)], "here")
    assert found.latency == pytest.approx(1e-5)
    assert found.bandwidth == pytest.approx(2e9)
    assert (found.name, found.size) == ("host", 8)


def test_all_reduces_serve_where_no_two_ranks_talk() -> None:
    found = fit_tier("network", 6, [_message(size, "all_reduce", 3) for size in (3e3, 3e7)], "here")
    assert found.latency == pytest.approx(1e-5)
    assert found.bandwidth == pytest.approx(2e9)
    with pytest.raises(ConfigError, match="tier network: nothing was measured"):
        fit_tier("network", 6, [], "here")


def _measured(seconds: float, rate: float) -> Measured:
    return Measured(
        gemm=(GemmPoint(m=100, n=100, k=100, precision="fp32", seconds=seconds),),
        attention=(
            AttentionPoint(
                batch=1, heads=1, kv_heads=1, seq=8, head_dim=8, precision="fp32", forward=seconds, backward=3 * seconds
            ),
        ),
        comm=(CommPoint(op="p2p", tier="host", ranks=2, size=8.0, seconds=seconds),),
        bandwidth=rate,
        launch=seconds,
    )


def test_the_best_of_passes() -> None:
    found = best([_measured(2.0, 1e9), replace(_measured(3.0, 2e9), launch=1.0)])
    assert found == replace(_measured(2.0, 2e9), launch=1.0, spread=0.5), "the slower pass took half as long again"
    assert best([Measured(), Measured()]) == Measured()


def test_peaks_by_precision() -> None:
    points = [GemmPoint(m=10, n=10, k=10, precision="fp32", seconds=s, batch=b) for s, b in ((2.0, 1), (1.0, 4))]
    assert peaks(points) == {"fp32": 8000.0}


@pytest.mark.parametrize(
    ("name", "gib", "found"),
    [
        ("NVIDIA H100 80GB HBM3", 79.2, "H100-80GB-SXM"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100-40GB-SXM"),
        ("NVIDIA H200", 139.8, "H200-141GB-SXM"),
        ("NVIDIA GeForce RTX 4090", 24.0, None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 9.5, None),
    ],
)
def test_devices_by_their_drivers_name(name: str, gib: float, found: str | None) -> None:
    device = known_device(name, gib * 1024**3)
    assert (device.name if device else None) == found


def _part(devices: int, measured: Measured) -> Topology:
    device = Device(name="cpu", memory=16e9 / devices, peaks={"fp32": 1e11}, bandwidth=1e10, kind="cpu")
    tier = Tier(name="host", size=max(devices, 1), bandwidth=devices * 1e9, latency=1e-5)
    return Topology(name="here", device=device, devices=devices, tiers=(tier,), measured=measured)


def test_shares_of_a_host_brought_together() -> None:
    comm = (CommPoint(op="all_reduce", tier="host", ranks=4, size=8.0, seconds=0.5),)
    crowded = Measured(comm=comm, waiting=0.2)
    found = joined([_part(4, crowded), _part(1, _measured(1.0, 4e9)), _part(2, _measured(2.0, 2e9))], cores=2)
    assert found.cores == 2
    assert [share.ranks for share in found.shares] == [1, 2, 4]
    assert (found.devices, found.tiers[0].size, found.tiers[0].bandwidth) == (2, 4, 2e9)
    four = found.with_devices(4)
    assert four.measured.gemm[0].seconds == 4.0, "two turns of what two ranks on two cores take"
    assert four.measured.comm == comm
    assert four.measured.waiting == 0.2
    assert four.device.memory == 4e9
    assert found.with_devices(1).measured.gemm[0].seconds == 1.0
    assert four.measured.busy is None


def test_a_host_is_as_busy_as_it_was_at_worst() -> None:
    parts = [_part(n, replace(_measured(1.0, 1e9), busy=busy)) for n, busy in ((1, 0.02), (2, 0.4), (4, None))]
    found = joined(parts, cores=2)
    assert [found.with_devices(n).measured.busy for n in (1, 2, 4)] == [0.4, 0.4, 0.4]


def _job(found: Topology, ranks: int, tp: int, micro: int) -> Job:
    plan = Plan(dp=1, tp=tp, micro=micro)
    return Job(model=PRESETS["tiny"], plan=plan, topology=found.with_devices(ranks), seq=64, global_batch=4)


def _seconds(job: Job, crowding: float, lost: float) -> float:
    """Of a step of ranks that compute ``crowding`` times as long and lose ``lost`` in each meeting."""
    (stage,) = stages_of(machine_of(job.topology), slice_of(job), job.plan)
    phases = (stage.forward, stage.backward, stage.weight)
    each = sum(crowding * phase.device + phase.waits for phase in phases)
    meetings = 8 * job.model.num_layers + 3 if job.plan.tp > 1 else 0  # with sequence parallelism
    return (each + meetings * lost) * job.microbatches


def test_what_steps_lose_is_found_again() -> None:
    ops = ("all_reduce", "all_gather", "reduce_scatter")
    comm = tuple(CommPoint(op=op, tier="host", ranks=2, size=s, seconds=1e-4) for op in ops for s in (1e3, 1e6))
    compute = replace(_measured(1e-4, 1e9), comm=comm)
    plain = joined([_part(1, compute), _part(2, compute), _part(4, Measured(comm=comm))], cores=2)
    runs = {}
    for ranks, crowding in ((2, 1.1), (4, 1.25)):
        jobs = [(_job(plain, ranks, tp, micro), lost) for tp, micro, lost in ((1, 2, 0.0), (2, 1, 1e-3), (2, 4, 3e-3))]
        runs[ranks] = [(job, _seconds(job, crowding, lost)) for job, lost in jobs]
    found = in_steps(plain, runs)
    for ranks in (2, 4):
        measured = found.with_devices(ranks).measured
        assert [point.seconds for point in measured.meetings] == pytest.approx([1e-3, 3e-3])
        assert measured.meetings[0].apart < measured.meetings[1].apart
    two, four = (found.with_devices(ranks).measured for ranks in (2, 4))
    # A machine that is slower now than when it was measured is no crowd.
    assert (two.crowding, two.gemm) == (None, plain.with_devices(2).measured.gemm)
    assert four.crowding == pytest.approx(1.25)
    assert four.gemm[0].seconds == pytest.approx(1.25 * plain.with_devices(4).measured.gemm[0].seconds)
    assert found.with_devices(1).measured.meetings == ()
