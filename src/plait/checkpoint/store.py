"""A model's weights in a folder: a checkpoint of weights alone, or the weights of a run's checkpoint.

The format is docs/checkpoint.md's, with ``step`` null and the model's mapping under ``scalars.model``. The folder is
written in place: every rank writes its file (`write_shard`), and when all have, one writes the manifest
(`write_manifest`). Files of two writes never share a name, so that the old weights stay whole until the rename of the
new manifest, and a crash at any point leaves the one or the other.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import final

import torch

from plait.checkpoint import disk
from plait.checkpoint.layout import Run, lay_out
from plait.checkpoint.manifest import MANIFEST, encode
from plait.checkpoint.reader import Checkpoint
from plait.checkpoint.reshard import volume
from plait.checkpoint.state import Piece
from plait.checkpoint.writer import Ring, Shard, ShardRecord, gather, joined, record_of, views, write_file
from plait.core.errors import WeightsError
from plait.core.shard import Box

WEIGHTS = "weights/"
"""What stands before a weight's name in a run's checkpoint."""


def write_shard(folder: Path, rank: int, pieces: Mapping[str, Sequence[tuple[Box, torch.Tensor]]]) -> list[ShardRecord]:
    """Write the blocks that ``rank`` owns to one file of ``folder``; nothing is readable before `write_manifest`.

    ``pieces``: tensor name -> (box in the whole tensor, its values). A block held by several ranks is written by one.
    WeightsError where a box and its values disagree, or the file cannot be written. Empty blocks are left out.
    """
    held: list[Piece] = []
    for name, blocks in pieces.items():
        for box, values in blocks:
            if tuple(values.shape) != tuple(stop - start for start, stop in box):
                raise WeightsError(f"{name}: values of shape {tuple(values.shape)} do not fill box {box}")
            # The whole shape is known to the one that commits.
            held.append(Piece(name=name, shape=(), values=values.detach().cpu().contiguous(), boxes=(box,)))
    runs = [Run(piece=index, box=piece.boxes[0], start=0) for index, piece in enumerate(held) if volume(piece.boxes[0])]
    layout = lay_out(held, runs)
    if not runs:
        return []
    file = f"rank-{rank:05d}-{secrets.token_hex(4)}.safetensors"
    shard = Shard(file=file, give=joined(views(held, layout), Ring()), record=record_of(held, layout))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [write_file(shard, folder, lambda _: None)]
    except OSError as error:
        _drop(folder / file)
        raise WeightsError(f"cannot write {folder / file}: {error}") from error


def write_manifest(
    folder: Path,
    model: Mapping[str, object],
    shapes: Mapping[str, Sequence[int]],
    records: Iterable[ShardRecord],
) -> None:
    """Commit what all ranks have written: check that it is whole, write the manifest, drop files it does not name.

    ``shapes``: tensor name -> shape of the whole tensor; ``records``: those of every rank's `write_shard`.
    WeightsError, and no manifest, where a tensor is not stored exactly once, or a file is not in ``folder`` as this
    rank sees it.
    """
    whole: list[ShardRecord] = []
    for record in records:
        for name in record["tensors"]:
            if name not in shapes:
                raise WeightsError(f"{record['file']} holds {name}, which is no tensor of this model")
        whole.append({**record, "tensors": {n: (list(shapes[n]), form[1]) for n, form in record["tensors"].items()}})
    found = {name for record in whole for name in record["tensors"]}
    unwritten = {name: (list(shape), "float32") for name, shape in shapes.items() if name not in found}
    whole.append(ShardRecord(file="", bytes=0, sums="", tensors=unwritten, pieces=[]))
    created = datetime.now(UTC).isoformat(timespec="milliseconds")
    manifest = gather(whole, step=None, created=created, scalars={"model": dict(model)})
    text = encode(manifest)
    for file in sorted(manifest.files):
        if not (folder / file).is_file():
            raise WeightsError(
                f"{folder} does not hold {file}, which another rank wrote there: "
                "run.dir must lie on storage that every node sees"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        disk.sync_folder(folder)
        disk.replace(folder / MANIFEST, text, lambda _: None)
        disk.sync_folder(folder)
    except OSError as error:
        raise WeightsError(f"cannot write {folder / MANIFEST}: {error}") from error
    for old in folder.glob("rank-*.safetensors*"):
        if old.name not in manifest.files:
            _drop(old)


@final
class WeightFolder:
    """The weights in a committed folder, checked when opened; a weight source (``read``).

    WeightsError naming the file for anything missing, truncated, outside the folder, or contradicting the manifest.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._opened = Checkpoint.open(path)
        self._opened.check_headers()
        model = self._opened.scalars.get("model")
        if not isinstance(model, dict):
            raise WeightsError(f"{path / MANIFEST}: its scalars hold no model")
        self.model: Mapping[str, object] = model
        """The mapping that `ModelConfig` was written as."""
        run = any(name.startswith(WEIGHTS) for name in self._opened.names)
        self._prefix = WEIGHTS if run else ""

    @property
    def names(self) -> tuple[str, ...]:
        """The weights' names."""
        found = (name for name in self._opened.names if name.startswith(self._prefix))
        return tuple(name.removeprefix(self._prefix) for name in found)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor ``name``."""
        return self._opened.shape(self._prefix + name)

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Tensor ``name``, or ``box`` of it, in its stored dtype; reads the bytes of the box alone."""
        if box is None:
            return self._opened.read(self._prefix + name)
        return self._opened.read(self._prefix + name, [box]).view([stop - start for start, stop in box])


def _drop(path: Path) -> None:
    with suppress(OSError):  # a file that stays behind only takes room: no manifest names it
        path.unlink()
