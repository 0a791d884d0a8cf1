"""``plait calibrate``: measures the machine it is on and writes a cluster file for the planner.

A host without GPUs is measured with one rank, with a rank a core, and with two a core: ranks share cores, cache and
memory, so a device is one of so many. A host with GPUs is measured with a rank on each. Under torchrun or srun the
launcher's ranks measure each tier, and each pair of ranks.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from plait.comm.group import Group
from plait.comm.world import World
from plait.core.cluster_file import dump, load
from plait.core.errors import ConfigError
from plait.core.mesh import Mesh
from plait.core.topology import CommPoint, Device, Measured, Tier, Topology
from plait.planner.calibrate import best, fit_tier, in_steps, joined, known_device, peaks
from plait.planner.clusters import local_path
from plait.planner.host import cpu_name, host_memory
from plait.planner.local import doubt
from plait.train import calibrate_kernels as kernels
from plait.train import calibrate_links as links
from plait.train import calibrate_load as load_of
from plait.train import calibrate_steps as steps
from plait.train.calibrate_layer import bandwidth_in_steps, seconds_of_steps
from plait.train.calibrate_table import show, summary
from plait.train.exchange import gather_json
from plait.train.folder import private
from plait.train.launch import Worker, cores, launch, placed

BUDGET = 0.012
"""Seconds of one measurement of compute, in one pass."""
REPEATS = 8
"""Calls of a small collective, in one of the windows of a pass."""
PASSES, QUICK_PASSES = 2, 1
_NOT_MEASURED = 1e9
"""Stands in a share that measured its communication alone, for `joined` to replace."""
STAGES = ("matrix products", "attention", "memory, optimizer, launches", "collectives", "steps")
MOST_RANKS_IN_MATRIX = 4096


def run(
    output: str | Path | None = None,
    *,
    as_json: bool = False,
    quick: bool = False,
    processes: Sequence[int] | None = None,
    device: str = "auto",
    timeout: float = 60.0,
) -> int:
    """Measure, write the cluster file ``output`` (None: the cache's, which the cluster ``local`` reads), show it.

    ``processes``: the numbers of ranks to measure with. Returns 0. ConfigError for a file that cannot be written, or
    numbers of ranks that make no sense, before anything is measured.
    """
    target = local_path() if output is None else Path(output)
    place = placed()
    chief = place is None or place.rank == 0
    counts = [place.world_size] if place is not None else _counts(processes, device, quick)
    if chief:
        _writable(target)
    with private("plait-calibrate-") as folder:
        for count in counts:
            computes = place is not None or count <= cores() or len(counts) == 1
            args = [str(folder), quick, not as_json, computes, ", ".join(map(str, counts))]
            launch("plait.train.calibrate:run_rank", processes=count, args=args, device=device, timeout=timeout)
        if not chief:
            return 0
        found = _found(folder, counts)
    text = dump(found)
    target.write_text(text, encoding="utf-8")
    if as_json:
        print(json.dumps(summary(found) | {"file": str(target)}))
    else:
        show(found, target, Console(highlight=False))
    if doubt(found):
        print(f"warning: {doubt(found)}; its figures are off: plait calibrate again when it is quiet", file=sys.stderr)
    return 0


def _found(folder: Path, counts: Sequence[int]) -> Topology:
    """What all numbers of ranks left in ``folder``, brought together."""
    parts = [load(folder / f"{count}.toml") for count in counts]
    if parts[0].device.kind != "cpu":
        return parts[0]
    found = joined(parts, cores=cores())
    taken = {count: folder / f"{count}.json" for count in counts}
    rows = {count: json.loads(file.read_text(encoding="utf-8")) for count, file in taken.items() if file.is_file()}
    return in_steps(found, {count: steps.jobs(found.with_devices(count), runs) for count, runs in rows.items()})


def _counts(processes: Sequence[int] | None, device: str, quick: bool) -> list[int]:
    """Numbers of ranks to measure with, ascending."""
    if processes is not None:
        if not processes or min(processes) < 1:
            raise ConfigError(f"processes={list(processes)}: expected numbers of ranks, at least 1 each")
        return sorted({*processes, min(cores(), max(processes))})
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if gpus:
        return [gpus]
    return sorted({1, cores()} if quick else {1, cores(), 2 * cores()})


def _writable(target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cluster file {target} cannot be written: {error}") from error
    if target.is_dir() or not os.access(target if target.exists() else target.parent, os.W_OK):
        raise ConfigError(f"cluster file {target} cannot be written: expected a path that may be written")


def run_rank(worker: Worker, folder: str, quick: bool, shown: bool, computes: bool, counts: str) -> None:
    """One of the ranks that measure. Rank 0 leaves ``<world size>.toml`` in its ``folder``."""
    size = worker.place.world_size
    world = worker.connect(Mesh(dp=size))
    everyone = world.group("pp", "dp", "cp", "tp")
    bench = kernels.Bench(
        device=world.device,
        barrier=everyone.barrier,
        budget=BUDGET,
        crowded=computes and size > cores(),
    )
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    chief = world.rank == 0
    passes = QUICK_PASSES if quick else PASSES
    hosts = _hosts(world)
    groups = _groups(world, hosts)
    began = load_of.moment()
    with Progress(*columns, disable=not (shown and chief), transient=True, auto_refresh=False) as progress:
        task = progress.add_task("", total=passes * (len(STAGES) - 1) + 1)

        def stage(number: int) -> None:
            progress.update(task, advance=1, description=f"{size} of {counts} ranks: {STAGES[number]}", refresh=True)

        found, took = [], []
        for _ in range(passes):
            # Ranks that take turns on a core compute as one that has it, for their share of the time: see `joined`.
            measured = _compute(bench, quick, stage) if computes else Measured()
            if computes and world.device.type == "cpu":
                took.append(seconds_of_steps(bench))
            stage(3)
            idle = links.waiting(world) if world.device.type == "cpu" and size > 1 else None
            found.append(dataclasses.replace(measured, comm=tuple(_communication(world, groups)), waiting=idle))
        stage(4)
        taken = _in_steps(world, hosts, folder, quick)
    several_links = size > 2 and (world.device.type == "cuda" or len(hosts) > 1) and size <= MOST_RANKS_IN_MATRIX
    matrix = links.matrix(world) if several_links else []
    measured = best(found)
    if took:
        share = _device(world, measured, len(hosts[0]), "")
        measured = dataclasses.replace(measured, bandwidth=bandwidth_in_steps(min(took), share, measured))
    busy = load_of.foreign(world, hosts, began)
    if chief:
        measured = dataclasses.replace(measured, links=tuple(map(tuple, matrix)), busy=busy)
        (Path(folder) / f"{size}.toml").write_text(dump(_topology(world, hosts, measured)), encoding="utf-8")
        if taken:
            (Path(folder) / f"{size}.json").write_text(json.dumps(taken), encoding="utf-8")
    world.close()


def _in_steps(world: World, hosts: list[list[int]], folder: str, quick: bool) -> steps.Taken:
    """Steps of ranks that meet; none on GPUs, on several hosts, or where nobody is to be met."""
    if world.device.type != "cpu" or len(hosts) > 1 or world.mesh.world_size == 1:
        return []
    # Ranks of another launcher have a folder each.
    return steps.measure(world, Path(str(gather_json(world, folder)[0])), 1 if quick else steps.REPEATS)


def _compute(bench: kernels.Bench, quick: bool, stage: Callable[[int], None]) -> Measured:
    cuda = bench.device.type == "cuda"
    shapes = kernels.GPU_SHAPES if cuda else kernels.CPU_SHAPES
    attended = kernels.GPU_ATTENTION if cuda else kernels.CPU_ATTENTION
    stage(0)
    gemm = kernels.products(bench, shapes[::3] if quick else shapes)
    stage(1)
    attention = kernels.attention(bench, attended[:2] if quick else attended)
    stage(2)
    return Measured(
        gemm=tuple(gemm),
        attention=tuple(attention),
        bandwidth=kernels.memory_bandwidth(bench),
        optimizer_bandwidth=kernels.optimizer_bandwidth(bench),
        launch=kernels.launch_overhead(bench),
    )


def _hosts(world: World) -> list[list[int]]:
    """The ranks of each host. Hosts with unlike numbers of ranks count as one: only pairs are told apart then."""
    names = [str(name) for name in gather_json(world, socket.gethostname())]
    hosts = [[rank for rank, name in enumerate(names) if name == host] for host in dict.fromkeys(names)]
    return hosts if len({len(ranks) for ranks in hosts}) == 1 else [list(range(world.mesh.world_size))]


_Groups = list[tuple[str, list[tuple[int, ...]], Group]]
"""(tier, groups that work at once, this rank's)."""


def _groups(world: World, hosts: list[list[int]]) -> _Groups:
    """The groups of every tier and size; collective."""
    return [
        (tier, groups, world.partition(f"calibrate {number}", groups))
        for number, (tier, groups) in enumerate(links.partitions(hosts))
    ]


def _communication(world: World, groups: _Groups) -> list[CommPoint]:
    """Points of every tier and group size, and of messages."""
    sizes = links.GPU_SIZES if world.device.type == "cuda" else links.CPU_SIZES
    points: list[CommPoint] = []
    for tier, members, group in groups:
        points += links.collectives(world, tier, group, sizes, REPEATS)
        if len(members[0]) == 2:
            points += links.messages(world, tier, [(a, b) for a, b in members], sizes, REPEATS)
    return points


def _topology(world: World, hosts: list[list[int]], measured: Measured) -> Topology:
    size, points = world.mesh.world_size, measured.comm
    source = f"plait calibrate, torch {torch.__version__}"
    device = _device(world, measured, len(hosts[0]), source)
    sizes = {links.HOST: len(hosts[0]), links.NETWORK: size}
    tiers = [
        fit_tier(name, sizes[name], [point for point in points if point.tier == name], source)
        for name in (links.HOST, links.NETWORK)
        if any(point.tier == name for point in points)
    ]
    if not tiers:  # one rank: it has nobody to talk to, and reaches itself as fast as its memory
        latency = measured.launch or 1e-6
        alone = Tier(name=links.HOST, size=1, bandwidth=device.bandwidth, latency=latency, source=source)
        tiers = [alone]
    name = socket.gethostname()
    return Topology(name=name, device=device, devices=size, tiers=tuple(tiers), measured=measured, source=source)


def _device(world: World, measured: Measured, ranks_here: int, source: str) -> Device:
    rates = peaks(measured.gemm) or {"fp32": _NOT_MEASURED}
    bandwidth = measured.bandwidth or _NOT_MEASURED
    if world.device.type == "cpu":
        return Device(
            name=cpu_name(),
            memory=host_memory() / ranks_here,
            peaks=rates,
            bandwidth=bandwidth,
            kind="cpu",
            source=f"{source}, {torch.get_num_threads()} threads a rank, {ranks_here} ranks",
        )
    facts = torch.cuda.get_device_properties(world.device)
    memory = float(facts.total_memory)
    sheet = known_device(facts.name, memory)
    if sheet is not None:
        return dataclasses.replace(sheet, memory=memory)
    return Device(name=facts.name, memory=memory, peaks=rates, bandwidth=bandwidth, source=source)
