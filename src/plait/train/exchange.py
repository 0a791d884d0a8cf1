"""What ranks do together outside a step: short texts, work that takes its time, and folders that all of them write."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, final

import torch
from torch import Tensor

from plait.checkpoint.reader import Checkpoint, Request
from plait.checkpoint.reshard import flat_to_boxes, intersect, relative, volume
from plait.checkpoint.state import Piece as Stored
from plait.checkpoint.store import write_manifest, write_shard
from plait.checkpoint.writer import ShardRecord
from plait.comm.aside import aside
from plait.comm.group import Group
from plait.comm.world import World
from plait.core.errors import ConfigError, PlaitError, RankError, WeightsError
from plait.core.shard import Box, Piece
from plait.models.config import ModelConfig, parameter_shapes
from plait.parallel.flat import Held
from plait.parallel.grouping import is_data
from plait.parallel.state import Stretch
from plait.parallel.zero import Zero
from plait.train.run import Setup, open_samples

Run = tuple[Held, int, Tensor]
"""(parameter, flat start in its local tensor, values from there on), as `Zero.masters` and `Zero.gradients` give."""


PATIENCE = 86400.0
"""Seconds that ranks wait for what may rightly take longer than a step: text to encode, weights to write."""


def gather_json(world: World, value: object, group: Group | None = None) -> list[object]:
    """Every rank's ``value`` (JSON), in rank order, on every rank; over ``group`` of all ranks, where one is given."""
    everyone = world.group("pp", "dp", "cp", "tp") if group is None else group
    device = everyone.device
    content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    length = torch.tensor([content.numel()], device=device)
    lengths = everyone.all_gather(length).wait().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: content.numel()] = content
    rows = everyone.all_gather(padded).wait().cpu().view(len(lengths), -1)
    return [json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, lengths, strict=True)]


@final
class Peers:
    """All ranks, as `plait.checkpoint` speaks with them: over a group of their own, from a thread of their own."""

    def __init__(self, world: World, group: Group | None = None) -> None:
        self._world = world
        self._group = aside(world) if group is None else group

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value`` (plain JSON), in rank order, on every rank."""
        return gather_json(self._world, value, self._group)

    def barrier(self) -> None:
        """Return when every rank has come here."""
        self._group.barrier()


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
    folder: Path, world: World, config: ModelConfig, level: int, stretches: Iterable[Run], names: Iterable[str] = ()
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
    rows = [record for rank_rows in records for record in cast("list[ShardRecord]", rank_rows)]

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
    blocks = _blocks(one.shape, one.pieces, start, values)
    return [(box, block) for piece, box, block in blocks if _first(piece, at, data=not shared)]


def _first(piece: Piece, at: Mapping[str, int], *, data: bool) -> bool:
    """Whether the rank at ``at`` is the first of the block's holders; along the data axes too where ``data``."""
    return all(at[copies.axis] == copies.first for copies in piece.copies if data or not is_data(copies.axis))


def _blocks(
    local: tuple[int, ...], pieces: Iterable[Piece], start: int, values: Tensor
) -> list[tuple[Piece, Box, Tensor]]:
    """``values`` [n], the flat run from ``start`` on of a part of shape ``local`` that is made of ``pieces``, as blocks
    of the whole tensor: (the piece it is of, its box, a view of its values)."""
    found: list[tuple[Piece, Box, Tensor]] = []
    offset = 0
    for box in flat_to_boxes(local, start, start + values.numel()):
        shape = [stop - begin for begin, stop in box]
        size = torch.Size(shape).numel()
        block = values[offset : offset + size].view(shape)
        offset += size
        for piece in pieces:
            part = intersect(box, piece.local)
            if part is not None:
                inside = block[tuple(slice(*edge) for edge in relative(part, box))]
                shift = [whole - near for (whole, _), (near, _) in zip(piece.box, piece.local, strict=True)]
                home = tuple((begin + by, stop + by) for (begin, stop), by in zip(part, shift, strict=True))
                found.append((piece, home, inside))
    return found


def pieces_of(stretches: Iterable[Stretch], at: Mapping[str, int]) -> list[Stored]:
    """What the rank at ``at`` gives to a checkpoint of its stretches: along axes that are no data axes, the first of a
    block's holders alone gives it. Views of the live state, but for parts that lie scattered in it."""
    found: list[Stored] = []
    for one in stretches:
        blocks = [
            (box, block)
            for piece, box, block in _blocks(one.local, one.pieces, one.start, one.values)
            if one.counted and _first(piece, at, data=False)
        ]
        if blocks:
            values = _joined([block for _, block in blocks])
            boxes = tuple(box for box, _ in blocks)
            found.append(Stored(name=one.name, shape=one.shape, values=values, boxes=boxes, replicas=one.replicas))
    return found


def _joined(blocks: Sequence[Tensor]) -> Tensor:
    """The blocks' values, one after the other: a view where they are neighbours in memory, else a copy."""
    size = sum(block.numel() for block in blocks)
    at = blocks[0].storage_offset()
    for block in blocks:
        if not block.is_contiguous() or block.storage_offset() != at:
            return torch.cat([block.reshape(-1) for block in blocks])
        at += block.numel()
    return blocks[0].as_strided((size,), (1,))


def files_of(checkpoint: Checkpoint, stretches: Iterable[Stretch]) -> set[str]:
    """The files that `read_stretches` reads; WeightsError where a tensor is missing."""
    found: set[str] = set()
    for one in stretches:
        boxes = [box for _, box, _ in _blocks(one.local, one.pieces, one.start, one.values)]
        found |= checkpoint.files_of(one.name, boxes)
    return found


@torch.no_grad()
def read_stretches(checkpoint: Checkpoint, stretches: Iterable[Stretch]) -> None:
    """Set every stretch from the tensor of its name; WeightsError where one is missing, or of another shape."""
    requests: list[Request] = []
    scattered: list[tuple[Tensor, list[Tensor]]] = []
    for one in stretches:
        if checkpoint.shape(one.name) != one.shape:
            have, want = list(checkpoint.shape(one.name)), list(one.shape)
            raise WeightsError(f"{checkpoint.path} holds {one.name} as {have}, the model has it as {want}")
        blocks = _blocks(one.local, one.pieces, one.start, one.values)
        boxes, views = [box for _, box, _ in blocks], [block for _, _, block in blocks]
        out = _joined(views)
        if out.data_ptr() != one.values.data_ptr():
            scattered.append((out, views))
        requests.append(Request(name=one.name, boxes=boxes, out=out))
    checkpoint.load(requests)
    for out, views in scattered:
        for view, part in zip(views, torch.split(out, [view.numel() for view in views]), strict=True):
            view.copy_(part.view_as(view))


def counted_elements(stretches: Iterable[Stretch], world: World) -> dict[str, int]:
    """Elements of each tensor that this rank, and no other, answers for."""
    found: dict[str, int] = {}
    for one in stretches:
        if one.counted and world.rank == min(one.replicas):
            for piece, box, _ in _blocks(one.local, one.pieces, one.start, one.values):
                if _first(piece, world.at, data=False):
                    found[one.name] = found.get(one.name, 0) + volume(box)
    return found
