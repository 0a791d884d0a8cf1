"""What ranks do together outside a step: short texts, work that takes its time, and folders that all of them write."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from plait.checkpoint.reshard import flat_to_boxes, intersect, relative
from plait.checkpoint.store import PieceRecord, write_manifest, write_shard
from plait.comm.group import Group
from plait.comm.world import World
from plait.core.errors import ConfigError, PlaitError, RankError, WeightsError
from plait.core.shard import Box
from plait.models.config import ModelConfig, parameter_shapes
from plait.parallel.flat import Held, is_data
from plait.parallel.zero import Zero
from plait.train.run import Setup, open_samples

Stretch = tuple[Held, int, Tensor]
"""(parameter, flat start in its local tensor, values from there on), as `Zero.masters` and `Zero.gradients` give."""


PATIENCE = 86400.0
"""Seconds that ranks wait for what may rightly take longer than a step: text to encode, weights to write."""


def gather_json(world: World, value: object, group: Group | None = None) -> list[object]:
    """Every rank's ``value`` (JSON), in rank order, on every rank; over ``group`` of all ranks, where one is given."""
    everyone = world.group("pp", "dp", "cp", "tp") if group is None else group
    content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(world.device)
    length = torch.tensor([content.numel()], device=world.device)
    lengths = everyone.all_gather(length).wait().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=world.device)
    padded[: content.numel()] = content
    rows = everyone.all_gather(padded).wait().cpu().view(len(lengths), -1)
    return [json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, lengths, strict=True)]


def together(world: World, work: Callable[[], object]) -> list[object]:
    """Do ``work`` on every rank; what it gave (JSON), in rank order, on every rank. The step's time-out is not its own.

    A PlaitError of one rank's work ends all at once: that rank raises it, the others one of the same class.
    """
    world.group("pp", "dp", "cp", "tp").barrier()  # a rank that does not even come here is missed in the usual time
    usual = world.book.timeout
    world.book.timeout = PATIENCE
    try:
        # Groups of torch.distributed keep the time-out that they were made with, others read the book's.
        everyone = world.shared("world", [tuple(range(world.mesh.world_size))])
        everyone.barrier()  # NCCL connects at first use, and is not patient then
        trouble: PlaitError | None = None
        result: object = None
        try:
            result = work()
        except PlaitError as error:
            trouble = error
        said = None if trouble is None else [type(trouble).__name__, str(trouble)]
        rows = cast("list[list[object]]", gather_json(world, [said, result], everyone))
    finally:
        world.book.timeout = usual
    if trouble is not None:
        raise trouble
    for rank, (failure, _) in enumerate(rows):
        if failure is not None:
            name, text = cast("list[str]", failure)
            known = {kind.__name__: kind for kind in (ConfigError, WeightsError)}
            raise known.get(name, RankError)(f"rank {rank}: {text}")
    return [row[1] for row in rows]


def shared_folder(world: World, folder: Path | None, source: str) -> Path:
    """Rank 0's ``folder``, on every rank; ConfigError where a rank does not see it. ``source`` is what names it."""
    probe = f".probe-{secrets.token_hex(4)}"
    if world.rank == 0:
        assert folder is not None
        (folder / probe).write_bytes(b"")
    home, name = cast("list[str]", gather_json(world, [str(folder), probe])[0])
    seen = cast("list[tuple[bool, str]]", gather_json(world, [os.path.exists(f"{home}/{name}"), socket.gethostname()]))
    if world.rank == 0:
        (Path(home) / name).unlink()
    blind = [(rank, host) for rank, (sees, host) in enumerate(seen) if not sees]
    if blind:
        raise ConfigError(
            f"{source} = {home}, which rank 0 on {seen[0][1]} made, is not there for rank {blind[0][0]} "
            f"on {blind[0][1]}: {source} must lie on storage that every node sees"
        )
    return Path(home)


def make_tokens(setup: Setup, world: World, local_rank: int) -> None:
    """Encode text where that is still to be done: rank 0 first, then one rank of each host that does not see its file.

    ConfigError for data that cannot serve.
    """

    def encode() -> None:
        open_samples(setup)

    for mine in (world.rank == 0, local_rank == 0):
        together(world, encode if mine else lambda: None)


def write_weights(folder: Path, world: World, config: ModelConfig, zero: Zero) -> None:
    """Write the run's weights (fp32 masters; frozen ones as they are held) to a folder that any plan can read."""
    frozen = [(one, start, values.float()) for one, start, values in zero.frozen()]
    write_stretches(folder, world, config, zero.level, [*zero.masters(), *frozen])


def write_stretches(
    folder: Path, world: World, config: ModelConfig, level: int, stretches: Iterable[Stretch], names: Iterable[str] = ()
) -> None:
    """Write what the ranks hold of each parameter as whole tensors, every element once; collective over all ranks.

    ``level`` is the ZeRO stage that ``stretches`` are laid out for; ``names`` the parameters that are written (none
    given: all). The folder is there for readers when this returns, or a WeightsError says why not. A slow disk takes
    its time: the step's time-out is not for it.
    """
    pieces: dict[str, list[tuple[Box, Tensor]]] = {}
    for one, start, values in stretches:
        if one.counted:
            found = owned_boxes(one, start, values, world.at, shared=level >= 1)
            pieces.setdefault(one.name, []).extend(found)
    shapes = parameter_shapes(config)
    wanted = list(names) or list(shapes)
    records = together(world, lambda: write_shard(folder, world.rank, pieces))
    rows = [record for rank_rows in records for record in cast("list[PieceRecord]", rank_rows)]

    def commit() -> None:
        if world.rank == 0:
            write_manifest(folder, config.to_mapping(), {name: shapes[name] for name in wanted}, rows)

    together(world, commit)


def owned_boxes(
    one: Held, start: int, values: Tensor, at: Mapping[str, int], *, shared: bool
) -> list[tuple[Box, Tensor]]:
    """The blocks of the whole tensor that the rank at ``at`` writes of a stretch: (box, values).

    ``shared``: each data rank has another stretch, and writes it; else the first data rank writes for all.
    """
    found: list[tuple[Box, Tensor]] = []
    offset = 0
    for box in flat_to_boxes(one.shape, start, start + values.numel()):
        shape = [stop - begin for begin, stop in box]
        size = torch.Size(shape).numel()
        block = values[offset : offset + size].view(shape)
        offset += size
        for piece in one.pieces:
            holders = [copies for copies in piece.copies if not (shared and is_data(copies.axis))]
            part = intersect(box, piece.local)
            if part is None or not all(at[copies.axis] == copies.first for copies in holders):
                continue
            inside = block[tuple(slice(*edge) for edge in relative(part, box))]
            shift = [whole - local for (whole, _), (local, _) in zip(piece.box, piece.local, strict=True)]
            home = tuple((begin + by, stop + by) for (begin, stop), by in zip(part, shift, strict=True))
            found.append((home, inside))
    return found
