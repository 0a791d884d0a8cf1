"""What ranks of one host lose to each other in real steps of a small model, beyond what they compute and send.

Each time ranks meet in a collective the slowest is waited for; where they share cores, each waits for its turn, and
finds the caches full of another's. So every rank takes the same steps by itself, at the same time as all others, and
then steps of the model cut over 2, 4, ... of them, in turn. What the cut ones take beyond their share of the work and
their collectives is lost in meetings (`plait.planner.calibrate.in_steps`).
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from time import perf_counter

from torch.distributed import FileStore  # type: ignore[attr-defined]  # public, yet torch does not list it

from plait.comm.world import SHARED_MEMORY_RANKS, World
from plait.core.mesh import Mesh
from plait.core.topology import Topology
from plait.planner.job import Job
from plait.planner.local import practice
from plait.train.calibrate_layer import BATCH, MODEL, PLAN, SEQ, step
from plait.train.calibrate_links import sizes_of

MICROS = (1, 4)
"""Samples of a microbatch: meetings lie a fourfold apart."""
REPEATS = 5

Taken = list[tuple[int, int, float]]
"""(ranks that a step is cut over, samples of a microbatch, seconds); the first is of a rank alone."""


def measure(world: World, folder: Path, repeats: int = REPEATS) -> Taken:
    """Seconds of a forward and backward, the medians of ``repeats`` on this rank's clock; every rank calls this.

    ``folder``: where ranks of this host may leave files to find each other by. All ranks are on it, and without GPUs.
    """
    runs = {(1, PLAN.micro): step(World.alone(), PLAN)}
    for size in sizes_of(world.mesh.world_size):
        if size <= SHARED_MEMORY_RANKS and MODEL.num_kv_heads % size == 0:
            own = _of_pair(world, size, folder)
            runs |= {(size, micro): step(own, replace(PLAN, tp=size, micro=micro)) for micro in MICROS}
    everyone = world.group("pp", "dp", "cp", "tp")
    times: dict[tuple[int, int], list[float]] = {key: [] for key in runs}
    for _ in range(1 + repeats):  # the first allocates
        for key, run in runs.items():
            everyone.barrier()
            begin = perf_counter()
            run()
            everyone.barrier()
            times[key].append(perf_counter() - begin)
    return [(*key, median(rows[1:])) for key, rows in times.items()]


def jobs(topology: Topology, taken: Taken) -> list[tuple[Job, float]]:
    """What was measured, as jobs of ranks of ``topology`` (so many devices) and their seconds."""
    found = []
    for size, micro, seconds in taken:
        plan = replace(PLAN, tp=size, micro=micro)
        job = Job(model=MODEL, plan=plan, topology=topology, seq=SEQ, global_batch=BATCH, practice=practice(topology))
        found.append((job, seconds))
    return found


def _of_pair(world: World, size: int, folder: Path) -> World:
    """The ``size`` neighbours that this rank is one of, as a world of their own."""
    name = f"{world.mesh.world_size}-ranks-by-{size}-{world.rank // size}"
    store = FileStore(str(folder / name), size)
    store.set_timeout(timedelta(seconds=world.book.timeout))
    return World(
        Mesh(tp=size),
        rank=world.rank % size,
        device=world.device,
        store=store,
        timeout=world.book.timeout,
        transport="auto",
    )
