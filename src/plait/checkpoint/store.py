"""plait's weight folder: boxes of tensors in safetensors files, one a writing rank, and a manifest that commits them.

``manifest.json``::

    {"format": "plait-weights", "version": 1, "model": {...},
     "tensors": {"norm.weight": {"shape": [64], "dtype": "float32",
                                 "pieces": [{"file": "rank-00000-1f2e3d4c.safetensors", "key": "norm.weight.0",
                                             "box": [[0, 64]]}]}}}

Commit protocol: every rank writes its file (`write_shard`), under a temporary name, synced and renamed; when all have,
one rank writes the manifest in the same way (`write_manifest`). Files of two writes never share a name, so that the old
weights stay whole until the rename of the new manifest, and a crash at any point leaves the one or the other.

A reader (`WeightFolder`) knows boxes alone: it asks for any box of a tensor and reads those bytes, whoever wrote them.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from plait.checkpoint.reshard import cover, relative, volume
from plait.core.errors import WeightsError
from plait.core.shard import Box, full

MANIFEST = "manifest.json"
FORMAT = "plait-weights"
VERSION = 1
DTYPES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""torch's name of a dtype -> the name in a safetensors header."""


class PieceRecord(TypedDict):
    """One stored block, as plain JSON: ranks send theirs to the one that writes the manifest."""

    name: str
    dtype: str
    file: str
    key: str
    box: list[list[int]]


@dataclass(frozen=True, kw_only=True)
class _Piece:
    file: str
    key: str
    box: Box


@dataclass(frozen=True, kw_only=True)
class _Stored:
    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[_Piece, ...]


def write_shard(folder: Path, rank: int, pieces: Mapping[str, Sequence[tuple[Box, torch.Tensor]]]) -> list[PieceRecord]:
    """Write the blocks that ``rank`` owns to one file of ``folder``; nothing is readable before `write_manifest`.

    ``pieces``: tensor name -> (box in the whole tensor, its values). A block held by several ranks is written by one.
    WeightsError where a box and its values disagree, or the file cannot be written. Empty blocks are left out.
    """
    file = f"rank-{rank:05d}-{secrets.token_hex(4)}.safetensors"
    tensors: dict[str, torch.Tensor] = {}
    records: list[PieceRecord] = []
    for name, blocks in pieces.items():
        for number, (box, values) in enumerate(blocks):
            if tuple(values.shape) != tuple(stop - start for start, stop in box):
                raise WeightsError(f"{name}: values of shape {tuple(values.shape)} do not fill box {box}")
            dtype = str(values.dtype).removeprefix("torch.")
            if dtype not in DTYPES:
                raise WeightsError(f"{name}: dtype {dtype} is not stored; known: {', '.join(DTYPES)}")
            if volume(box):
                key = f"{name}.{number}"
                tensors[key] = values.detach().cpu().contiguous()
                records.append(PieceRecord(name=name, dtype=dtype, file=file, key=key, box=[list(r) for r in box]))
    if not records:
        return []
    temporary = folder / f"{file}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, temporary)
        _commit(temporary, folder / file)
    except (OSError, SafetensorError) as error:
        _drop(temporary)
        raise WeightsError(f"cannot write {folder / file}: {error}") from error
    return records


def write_manifest(
    folder: Path,
    model: Mapping[str, object],
    shapes: Mapping[str, Sequence[int]],
    records: Iterable[PieceRecord],
) -> None:
    """Commit what all ranks have written: check that it is whole, write the manifest, drop files it does not name.

    ``shapes``: tensor name -> shape of the whole tensor; ``records``: those of every rank's `write_shard`.
    WeightsError, and no manifest, where a tensor is not stored exactly once, or a file is not in ``folder`` as this
    rank sees it.
    """
    tensors: dict[str, dict[str, object]] = {}
    by_name: dict[str, list[PieceRecord]] = {name: [] for name in shapes}
    for record in records:
        if record["name"] not in by_name:
            raise WeightsError(f"{record['file']} holds {record['name']}, which is no tensor of this model")
        by_name[record["name"]].append(record)
    for name, shape in shapes.items():
        found = by_name[name]
        dtypes = sorted({record["dtype"] for record in found})
        if len(dtypes) > 1:
            raise WeightsError(f"{name} was written in several dtypes: {', '.join(dtypes)}")
        pieces = [{"file": record["file"], "key": record["key"], "box": record["box"]} for record in found]
        tensors[name] = {"shape": list(shape), "dtype": dtypes[0] if dtypes else "float32", "pieces": pieces}
    document = {"format": FORMAT, "version": VERSION, "model": dict(model), "tensors": tensors}
    files = {piece.file for stored in _parse(document, folder / MANIFEST).values() for piece in stored.pieces}
    absent = [file for file in sorted(files) if not (folder / file).is_file()]
    if absent:
        raise WeightsError(
            f"{folder} does not hold {absent[0]}, which another rank wrote there: "
            "run.dir must lie on storage that every node sees"
        )
    temporary = folder / f"{MANIFEST}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        _commit(temporary, folder / MANIFEST)
    except (OSError, ValueError, TypeError) as error:
        _drop(temporary)
        raise WeightsError(f"cannot write {folder / MANIFEST}: {error}") from error
    for old in folder.glob("rank-*.safetensors*"):
        if old.name not in files:
            _drop(old)


class WeightFolder:
    """A committed weight folder, checked when opened; a weight source (``read``). Holds no file open between reads.

    WeightsError naming the file for anything missing, truncated, outside the folder, or contradicting the manifest.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        manifest = path / MANIFEST
        try:
            document = json.loads(manifest.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise WeightsError(f"{path} holds no {MANIFEST}: no weights, or a write that was not finished") from None
        except (OSError, ValueError, RecursionError) as error:
            raise WeightsError(f"{manifest} cannot be read: {error}") from error
        self._stored = _parse(document, manifest)
        self.model: Mapping[str, object] = document["model"]
        """The mapping that `ModelConfig` was written as."""
        self._check_files()

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors' names."""
        return tuple(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor ``name``."""
        return self._find(name).shape

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Tensor ``name``, or ``box`` of it, in its stored dtype; reads the bytes of the box alone."""
        stored = self._find(name)
        wanted = full(stored.shape) if box is None else box
        if len(wanted) != len(stored.shape) or any(
            not 0 <= start <= stop <= size for (start, stop), size in zip(wanted, stored.shape, strict=True)
        ):
            raise WeightsError(f"box {wanted} is not inside {name}, which has shape {stored.shape}")
        out = torch.empty([stop - start for start, stop in wanted], dtype=getattr(torch, stored.dtype))
        for index, part in cover(wanted, [piece.box for piece in stored.pieces]):
            piece = stored.pieces[index]
            try:
                with safe_open(self.path / piece.file, framework="pt") as file:
                    values = file.get_slice(piece.key)[_slices(relative(part, piece.box))]
                    # A copy: what safetensors gives is a view that would keep the whole file mapped.
                    out[_slices(relative(part, wanted))].copy_(values)
            except (OSError, SafetensorError) as error:
                raise WeightsError(f"{self.path / piece.file} cannot be read: {error}") from error
        return out

    def _find(self, name: str) -> _Stored:
        if name not in self._stored:
            raise WeightsError(f"{self.path} holds no tensor {name!r}")
        return self._stored[name]

    def _check_files(self) -> None:
        """Every piece lies in a whole file inside the folder, in the shape and dtype that the manifest says."""
        by_file: dict[str, list[tuple[str, _Stored, _Piece]]] = {}
        for name, stored in self._stored.items():
            for piece in stored.pieces:
                by_file.setdefault(piece.file, []).append((name, stored, piece))
        home = self.path.resolve()
        for file, held in by_file.items():
            where = self.path / file
            if where.resolve().parent != home:
                raise WeightsError(f"{where} is a link out of the weight folder")
            try:
                with safe_open(where, framework="pt") as opened:
                    for name, stored, piece in held:
                        block = opened.get_slice(piece.key)
                        shape = [stop - start for start, stop in piece.box]
                        is_shape, is_dtype = list(block.get_shape()), block.get_dtype()
                        if is_shape != shape or is_dtype != DTYPES[stored.dtype]:
                            raise WeightsError(
                                f"{where} holds {piece.key} as {is_dtype} {is_shape}; "
                                f"the manifest says {DTYPES[stored.dtype]} {shape} of {name}"
                            )
            except (OSError, SafetensorError) as error:
                raise WeightsError(f"{where} is missing or damaged: {error}") from error


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def _commit(temporary: Path, final: Path) -> None:
    """Bring ``temporary`` to the disk under the name ``final``: a crash leaves the old file or the whole new one."""
    _sync(temporary, os.O_RDWR)
    os.replace(temporary, final)
    _sync(final.parent, os.O_RDONLY)  # the folder holds the name


def _drop(path: Path) -> None:
    with suppress(OSError):  # a file that stays behind only takes room: no manifest names it
        path.unlink()


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _parse(document: object, where: Path) -> dict[str, _Stored]:
    """The tensors of a manifest; WeightsError where it is malformed or a tensor is not stored exactly once."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise WeightsError(f'{where}: not a manifest of plait weights ("format": "{FORMAT}")')
    if document.get("version") != VERSION:
        raise WeightsError(f"{where}: version {document.get('version')!r}; this plait reads version {VERSION}")
    tensors = document.get("tensors")
    if not isinstance(document.get("model"), dict) or not isinstance(tensors, dict):
        raise WeightsError(f'{where}: "model" and "tensors" have to be objects')
    stored: dict[str, _Stored] = {}
    for name, entry in tensors.items():
        try:
            shape = tuple(_natural(size) for size in entry["shape"])
            if entry["dtype"] not in DTYPES:
                raise ValueError(f"dtype {entry['dtype']!r} is unknown; known: {', '.join(DTYPES)}")
            pieces = tuple(_piece(piece, shape) for piece in entry["pieces"])
            cover(full(shape), [piece.box for piece in pieces])
        except (KeyError, TypeError, ValueError) as error:
            reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise WeightsError(f"{where}: tensor {name!r}: {reason}") from error
        stored[name] = _Stored(shape=shape, dtype=entry["dtype"], pieces=pieces)
    return stored


def _piece(entry: Mapping[str, object], shape: tuple[int, ...]) -> _Piece:
    file, key, ranges = entry["file"], entry["key"], entry["box"]
    if not isinstance(file, str) or not file.endswith(".safetensors") or any(sign in file for sign in "/\\\0:"):
        raise ValueError(f"file {file!r} is not the plain name of a .safetensors file in the folder")
    if not isinstance(key, str) or not isinstance(ranges, list) or len(ranges) != len(shape):
        raise ValueError(f"piece {key!r} has box {ranges!r}, which does not fit shape {shape}")
    box = tuple((_natural(start), _natural(stop)) for start, stop in ranges)
    if any(not start < stop <= size for (start, stop), size in zip(box, shape, strict=True)):
        raise ValueError(f"piece {key!r} has box {box}, which does not fit shape {shape}")
    return _Piece(file=file, key=key, box=box)


def _natural(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a size")
    return value
