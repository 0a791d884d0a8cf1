"""What `plait calibrate` measured, as a `Topology`: tiers fitted to messages, shares of a host brought together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean, median

from plait.core.errors import ConfigError
from plait.core.topology import CommPoint, Device, GemmPoint, Measured, MeetingPoint, Share, Tier, Topology
from plait.planner import layers
from plait.planner.clusters import presets
from plait.planner.job import Job
from plait.planner.stages import machine_of, slice_of, stages_of


def fit_tier(name: str, size: int, points: Sequence[CommPoint], source: str) -> Tier:
    """Latency and bandwidth of a tier: alpha-beta through the shortest and the longest message of two ranks.

    ``points``: the tier's; without messages of two ranks, its all-reduces (2 (n-1) steps of 1/n of the tensor each).
    """
    lines = sorted((_one_way(point) for point in points if point.op == "p2p"), key=lambda line: line[0])
    if not lines:
        lines = sorted((_one_way(point) for point in points if point.op == "all_reduce"), key=lambda line: line[0])
    if not lines:
        raise ConfigError(f"tier {name}: nothing was measured on it")
    (short, quick), (long, slow) = lines[0], lines[-1]
    per_byte = max((slow - quick) / max(long - short, 1.0), 1e-15)
    return Tier(
        name=name, size=size, bandwidth=1.0 / per_byte, latency=max(quick - short * per_byte, 1e-9), source=source
    )


def _one_way(point: CommPoint) -> tuple[float, float]:
    """Bytes and seconds of one step of the operation."""
    if point.op == "p2p":
        return point.size, point.seconds
    return point.size / point.ranks, point.seconds / (2 * (point.ranks - 1))


def peaks(points: Sequence[GemmPoint]) -> dict[str, float]:
    """Precision -> the best rate that a product reached."""
    best: dict[str, float] = {}
    for point in points:
        rate = 2.0 * point.m * point.n * point.k * point.batch / point.seconds
        best[point.precision] = max(best.get(point.precision, 0.0), rate)
    return best


def best(passes: Sequence[Measured]) -> Measured:
    """The same points measured several times: the least seconds of each, the highest rates.

    Other programs only ever make a measurement slower. Passes that are seconds apart do not all meet the same ones.
    """
    first = passes[0]
    gemm = [
        replace(points[0], seconds=min(point.seconds for point in points))
        for points in zip(*(each.gemm for each in passes), strict=True)
    ]
    attention = [
        replace(points[0], forward=min(p.forward for p in points), backward=min(p.backward for p in points))
        for points in zip(*(each.attention for each in passes), strict=True)
    ]
    comm = [
        replace(points[0], seconds=min(point.seconds for point in points))
        for points in zip(*(each.comm for each in passes), strict=True)
    ]
    return replace(
        first,
        gemm=tuple(gemm),
        attention=tuple(attention),
        comm=tuple(comm),
        bandwidth=max((each.bandwidth for each in passes if each.bandwidth), default=None),
        optimizer_bandwidth=max(
            (each.optimizer_bandwidth for each in passes if each.optimizer_bandwidth), default=None
        ),
        launch=min((each.launch for each in passes if each.launch), default=None),
        waiting=None if first.waiting is None else fmean(each.waiting or 0.0 for each in passes),
        spread=_spread(passes),
    )


def _spread(passes: Sequence[Measured]) -> float | None:
    """How far apart the passes were in what they computed; None for one pass, or none that computed."""
    rows = [[*(p.seconds for p in each.gemm), *(p.forward for p in each.attention)] for each in passes]
    if len(rows) < 2 or not rows[0]:
        return None
    return float(median(max(times) / min(times) - 1 for times in zip(*rows, strict=True)))


def known_device(driver_name: str, memory: float) -> Device | None:
    """The preset of a GPU by its driver's name (``NVIDIA H100 80GB HBM3``): of those that the name contains the family
    of, the nearest in memory; None for others."""
    word = driver_name.lower().replace("-", " ").split()
    found = [device for name, device in presets().items() if name.partition("-")[0] in word]
    near = min(found, key=lambda device: abs(device.memory - memory), default=None)
    return near if near is not None and abs(near.memory - memory) < 0.1 * memory else None


def joined(parts: Sequence[Topology], *, cores: int) -> Topology:
    """One cluster of what numbers of ranks of a CPU host measured, each as a `Topology` of so many devices.

    Ranks beyond the cores, which measured their communication alone, take turns: they compute at the rate of those that
    fill the cores, so much of the time. The cluster has as many devices as cores, or the most that were measured below;
    links are those of that number (with more ranks than cores, a message waits for its reader's turn).
    """
    ordered = sorted(parts, key=lambda part: part.devices)
    several = [part for part in ordered if part.devices > 1] or ordered
    base = next((part for part in reversed(several) if part.devices <= cores), several[0])
    full = max((part for part in ordered if part.measured.gemm), key=lambda part: part.devices)
    shares = []
    for part in ordered:
        device, measured = part.device, part.measured
        if not measured.gemm:
            turns = part.devices / max(full.devices, cores)
            device = replace(full.device.slowed(turns), memory=part.device.memory)
            measured = replace(full.measured.slowed(turns), comm=measured.comm, waiting=measured.waiting)
        shares.append(Share(ranks=part.devices, device=device, measured=measured))
    busy = max((part.measured.busy for part in ordered if part.measured.busy is not None), default=None)
    shares = [replace(share, measured=replace(share.measured, busy=busy)) for share in shares]
    base = replace(base, measured=replace(base.measured, busy=busy))
    size = ordered[-1].devices
    tiers = (*base.tiers[:-1], replace(base.tiers[-1], size=max(size, base.tiers[-1].size)))
    return replace(base, tiers=tiers, cores=cores, shares=tuple(shares))


def in_steps(found: Topology, runs: Mapping[int, Sequence[tuple[Job, float]]]) -> Topology:
    """``found`` with what ranks lose to each other in steps: where they meet, and where they share cores.

    ``runs``: by number of ranks, jobs of one stage and the seconds of their forward and backward, each on a topology of
    so many devices of ``found``: the first of one rank alone while all others do the same, the rest of ranks that meet.
    """
    shares = []
    for share in found.shares:
        measured, device = share.measured, share.device
        if share.ranks in runs:
            (alone, took), *cut = runs[share.ranks]
            work = _microbatch(alone)[0] * alone.microbatches
            pace = took / work
            meetings = tuple(_meeting(job, seconds, pace) for job, seconds in cut)
            if share.ranks > (found.cores or share.ranks):
                crowding = max(1.0, pace)
                measured = replace(measured.slowed(crowding), crowding=crowding)
                device = device.slowed(crowding)
                meetings = tuple(replace(point, apart=point.apart * crowding) for point in meetings)
            measured = replace(measured, meetings=meetings)
        shares.append(replace(share, measured=measured, device=device))
    base = next((share.measured for share in shares if share.ranks == found.devices), found.measured)
    return replace(found, shares=tuple(shares), measured=base)


def _meeting(job: Job, took: float, pace: float) -> MeetingPoint:
    """What the ranks of ``job`` lose in each of its meetings; its compute takes ``pace`` times the model's seconds."""
    device, waits, meetings, apart = _microbatch(job)
    beyond = took / job.microbatches - device * pace - waits
    return MeetingPoint(ranks=job.plan.tp * job.plan.cp, apart=apart, seconds=max(0.0, beyond / meetings))


def _microbatch(job: Job) -> tuple[float, float, int, float]:
    """Of a microbatch of one stage: seconds of compute, of collectives, the number of those that ranks meet in, and the
    seconds between two."""
    cut = slice_of(job)
    (stage,) = stages_of(machine_of(job.topology), cut, job.plan)
    phases = (stage.forward, stage.backward, stage.weight)
    works = [(layers.layer(cut, False, None), job.model.num_layers), (layers.embedding(cut), 1), (layers.head(cut), 1)]
    meetings = sum(times * (len(one.forward.messages) + len(one.backward.messages)) for one, times in works)
    apart = (stage.forward.device + stage.backward.device) / max(meetings, 1)
    return sum(p.device for p in phases), sum(p.waits for p in phases), meetings, apart
