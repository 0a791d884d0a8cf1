"""What a stage's F, B and W and a message take on these ranks: the input of a searched schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from plait.comm.world import World
from plait.models.batch import Batch
from plait.models.router import unrecorded
from plait.parallel.pipeline import Executor, Stage
from plait.parallel.zero import Zero
from plait.schedule.ir import COMPUTE_KINDS, Schedule
from plait.schedule.lower import lower
from plait.schedule.placement import looped
from plait.schedule.simulate import Cost
from plait.schedule.zero_bubble import zb_h1, zb_v

_RUNS = 3
"""Steps that are run; the first, which allocates, does not count."""
_PINGS = 5


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measured seconds, the same numbers on every rank."""

    costs: tuple[Cost, ...]
    """Of each virtual stage: means over its ranks of the medians of its actions."""
    transfers: tuple[float, ...]
    """Across each boundary between stages, one way; 0 where both lie on one rank."""


def measure(
    stages: Sequence[Stage],
    executor: Executor,
    zero: Zero,
    world: World,
    homes: tuple[int, ...],
    batches: Sequence[Batch],
) -> Calibration:
    """Run ``batches`` (a few microbatches of this rank) under ZB-H1 or ZB-V and time every action; collective.

    ``homes``: rank of each stage. Weights stay as they are: the gradients are reduced, and dropped by the next step;
    routers do not count the tokens.
    """
    schedule = _schedule(world.mesh.pp, homes, len(batches))
    spans: dict[tuple[int, int], list[float]] = {}
    counts = [0]

    def sink(stream: str, kind: str, name: str, start: float, end: float, size: int = 0) -> None:
        if counts[0] and kind in COMPUTE_KINDS:
            key = int(name.partition(kind)[0]), COMPUTE_KINDS.index(kind)
            spans.setdefault(key, []).append(end - start)

    with unrecorded(*(stage.module for stage in stages)):
        for run in range(_RUNS):
            counts[0] = run
            executor.run(schedule, batches.__getitem__, count=1, sink=sink)
            zero.finish()
    sums = torch.zeros(len(homes), len(COMPUTE_KINDS), 2, dtype=torch.float64)
    for key, seconds in spans.items():
        sums[key] = torch.tensor([median(seconds), 1.0], dtype=torch.float64)
    links = _pings(stages, world, homes, batches[0])
    shared = world.group("pp", "dp", "cp", "tp").all_reduce(torch.cat([sums.flatten(), links]).to(world.device)).wait()
    sums, links = shared[: sums.numel()].view_as(sums).cpu(), shared[sums.numel() :].cpu()
    means = (sums[..., 0] / sums[..., 1]).tolist()
    lines = world.mesh.world_size // world.mesh.pp
    return Calibration(
        costs=tuple(Cost(forward=f, backward=b, weight=w) for f, b, w in means),
        transfers=tuple((links / lines).tolist()),
    )


def _schedule(ranks: int, homes: tuple[int, ...], microbatches: int) -> Schedule:
    plain = homes == looped(ranks)
    return lower(zb_h1(ranks, microbatches) if plain else zb_v(ranks, microbatches))


def _pings(stages: Sequence[Stage], world: World, homes: tuple[int, ...], batch: Batch) -> Tensor:
    """float64, one a boundary: half the time there and back, on the lower rank of the two; 0 on the others.

    All pairs of neighbours in turn, in the same order on every rank.
    """
    took = torch.zeros(len(homes) - 1, dtype=torch.float64)
    line, here = world.mesh.group(world.rank, ["pp"]), world.at["pp"]
    found: dict[tuple[int, int], float] = {}
    for boundary, pair in enumerate(pairwise(homes)):
        low, high = sorted(pair)
        if low == high or here not in pair:
            continue
        if (low, high) not in found:
            peer = line[high if here == low else low]
            found[low, high] = _ping(stages[0], world, batch, peer, first=here == low)
        if here == low:  # which sends first, and waits for nothing but the answer
            took[boundary] = found[low, high]
    return took


def _ping(stage: Stage, world: World, batch: Batch, peer: int, *, first: bool) -> float:
    message = torch.zeros(stage.hidden(batch), dtype=stage.dtype, device=world.device)
    times = []
    for _ in range(_PINGS):
        begin = perf_counter()
        if first:
            world.wire.send(message, peer)
        world.wire.recv(torch.empty_like(message), peer).wait()
        if not first:
            world.wire.send(message, peer)
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        times.append((perf_counter() - begin) / 2)
    world.wire.flush()
    return median(times)
