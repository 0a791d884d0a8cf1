"""What ranks tell each other outside a step: short texts, and folders of tensors that all of them write together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from plait.checkpoint.reshard import flat_to_boxes, intersect, relative
from plait.checkpoint.store import PieceRecord, write_manifest, write_shard
from plait.comm.world import World
from plait.core.shard import Box
from plait.models.config import ModelConfig, parameter_shapes
from plait.parallel.flat import Held
from plait.parallel.rules import DATA_AXES
from plait.parallel.zero import Zero

Stretch = tuple[Held, int, Tensor]
"""(parameter, flat start in its local tensor, values from there on), as `Zero.masters` and `Zero.gradients` give."""


def gather_json(world: World, value: object) -> list[object]:
    """Every rank's ``value`` (JSON), in rank order, on every rank."""
    everyone = world.group("pp", "dp", "cp", "tp")
    content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(world.device)
    length = torch.tensor([content.numel()], device=world.device)
    lengths = everyone.all_gather(length).wait().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=world.device)
    padded[: content.numel()] = content
    rows = everyone.all_gather(padded).wait().cpu().view(len(lengths), -1)
    return [json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, lengths, strict=True)]


def write_weights(folder: Path, world: World, config: ModelConfig, zero: Zero) -> None:
    """Write the run's weights (fp32 masters; frozen ones as they are held) to a folder that any plan can read."""
    frozen = [(one, 0, view.detach().float().reshape(-1)) for one, view, _ in zero.parameters() if not one.trained]
    write_stretches(folder, world, config, zero.level, [*zero.masters(), *frozen])


def write_stretches(
    folder: Path, world: World, config: ModelConfig, level: int, stretches: Iterable[Stretch], names: Iterable[str] = ()
) -> None:
    """Write what the ranks hold of each parameter as whole tensors, every element once; collective over all ranks.

    ``level`` is the ZeRO stage that ``stretches`` are laid out for; ``names`` the parameters that are written (none
    given: all). The folder is there for readers when this returns, or a WeightsError says why not.
    """
    pieces: dict[str, list[tuple[Box, Tensor]]] = {}
    for one, start, values in stretches:
        if one.counted:
            found = owned_boxes(one, start, values, world.at, shared=level >= 1 and one.trained)
            pieces.setdefault(one.name, []).extend(found)
    shapes = parameter_shapes(config)
    wanted = list(names) or list(shapes)
    records = gather_json(world, write_shard(folder, world.rank, pieces))
    if world.rank == 0:
        rows = [record for rank_rows in records for record in cast("list[PieceRecord]", rank_rows)]
        write_manifest(folder, config.to_mapping(), {name: shapes[name] for name in wanted}, rows)
    world.group("pp", "dp", "cp", "tp").barrier()


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
            holders = [copies for copies in piece.copies if not (shared and copies.axis in DATA_AXES)]
            part = intersect(box, piece.local)
            if part is None or not all(at[copies.axis] == copies.first for copies in holders):
                continue
            inside = block[tuple(slice(*edge) for edge in relative(part, box))]
            shift = [whole - local for (whole, _), (local, _) in zip(piece.box, piece.local, strict=True)]
            home = tuple((begin + by, stop + by) for (begin, stop), by in zip(part, shift, strict=True))
            found.append((home, inside))
    return found
