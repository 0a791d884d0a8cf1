"""`restore`: a run brought to what a checkpoint holds, whoever saved it, under whatever plan; every element counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from plait.checkpoint.reader import Checkpoint
from plait.comm.world import World
from plait.core.errors import WeightsError
from plait.core.shard import full
from plait.parallel.apply import Parallel
from plait.parallel.state import Stretch, begin_moments, set_own_state, settle, stretches
from plait.train.exchange import counted_elements, files_of, read_stretches, together
from plait.train.run import Setup
from plait.train.same import check_same, expected
from plait.train.step import Steps


def own_prefix(rank: int) -> str:
    """What stands before the names of what ``rank`` alone has under its plan."""
    return f"own/rank-{rank}/"


def restore(
    path: Path,
    setup: Setup,
    parallel: Parallel,
    steps: Steps,
    identity: Mapping[str, object],
    bring: Callable[[set[str]], None] | None,
) -> tuple[int, str | None]:
    """Set the run's state from the checkpoint in ``path``; the steps that it has done, and a warning. Collective.

    ``identity``: what the run is, which has to be what was saved. ``bring``: gets the files that this rank reads, by
    name, where the manifest alone has to be in ``path``; None: all files are there. ConfigError for another run's
    checkpoint, WeightsError for one that does not hold exactly the state of this model; the state is then undefined.
    """
    world = parallel.world
    opened: list[Checkpoint] = []
    shapes: dict[str, tuple[int, ...]] = {}
    counts: dict[str, int] = {}
    mine: list[Stretch] = []
    kept: list[str] = []
    files: set[str] = set()
    own: dict[str, torch.Tensor] = {}

    def look() -> None:
        opened.append(Checkpoint.open(path, only=None if bring is None else ()))
        check_same(path, opened[0].scalars, identity)
        shapes.update(expected(setup, opened[0]))

    def want() -> None:
        mine.extend(row for row in stretches(parallel, steps.optimizer) if row.name in shapes)
        kept.extend(name for name in opened[0].names if same_plan and name.startswith(own_prefix(world.rank)))
        if bring is not None:
            files.update(files_of(opened[0], mine))
            for name in kept:
                files.update(opened[0].files_of(name, [full(opened[0].shape(name))]))

    def read() -> None:
        read_stretches(opened[0], mine)
        counts.update(counted_elements(mine, world))
        prefix = own_prefix(world.rank)
        own.update({name.removeprefix(prefix): opened[0].read(name).to(world.device) for name in kept})

    together(world, look)
    scalars = opened[0].scalars
    done = int(scalars["step"])
    same_plan = scalars["plan"] == str(setup.plan) and scalars["ranks"] == world.mesh.world_size
    steps.resume(scalars, same_plan=same_plan)
    begin_moments(parallel, steps.optimizer, steps.updates)
    together(world, want)
    if bring is not None:
        bring(files)
    together(world, read)
    _all_there(shapes, counts, world)
    settle(parallel, step=done, previous=any(name.startswith("previous/") for name in shapes))
    set_own_state(parallel, own)
    if same_plan or not any(name.startswith("own/") for name in opened[0].names):
        return done, None
    return done, (
        f"{path.name} was saved by plan {scalars['plan']!r} on {scalars['ranks']} ranks: what its compression had kept "
        "back of the gradients is left out"
    )


def _all_there(shapes: Mapping[str, tuple[int, ...]], counts: Mapping[str, int], world: World) -> None:
    """WeightsError where the ranks together have not set every element of every tensor; collective."""
    mine = [float(counts.get(name, 0)) for name in shapes]
    total = torch.tensor(mine, dtype=torch.float64, device=world.device)
    found = world.group("pp", "dp", "cp", "tp").all_reduce(total).wait().tolist()
    for (name, shape), count in zip(shapes.items(), found, strict=True):
        if int(count) != math.prod(shape):
            raise WeightsError(f"{name}: {int(count)} of its {math.prod(shape)} elements were restored")
