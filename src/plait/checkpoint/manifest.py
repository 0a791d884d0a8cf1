"""The manifest of a stored folder: what tensors it holds, in which bytes of which files, and what else was saved.

Pure: text to values and back, every claim of the text checked before anything is read or allocated by it. The format
is described in docs/checkpoint.md.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.checkpoint.disk import BLOCK, SUM, read_plain
from plait.checkpoint.reshard import cover, volume
from plait.core.errors import WeightsError
from plait.core.shard import Box, full

MANIFEST = "manifest.json"
FORMAT = "plait-checkpoint"
VERSION = 1
LIMIT = 1 << 30
"""Bytes of a manifest that are read; a larger one is refused. A million pieces take 100 MB."""
DTYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}
"""torch's name of a dtype -> its name in a safetensors header, and bytes an element."""
_SEAL = re.compile(rb'^(?P<content>.*,)\n "sha256": "(?P<digest>[0-9a-f]{64})"\n\}\n$', re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file of the folder: its length, and the CRC-32 of each of its blocks, eight hex digits each."""

    bytes: int
    sums: str


@dataclass(frozen=True, kw_only=True)
class StoredPiece:
    """One block of a tensor: row-major content of ``box`` from byte ``offset`` of ``file``, there under ``key``."""

    file: str
    key: str
    offset: int
    box: Box


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A whole tensor; its pieces hold every element once."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[StoredPiece, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All of it. ``step``: steps done, None for weights alone; ``created``: UTC, ISO 8601."""

    step: int | None
    created: str
    files: Mapping[str, StoredFile]
    tensors: Mapping[str, StoredTensor]
    scalars: Mapping[str, Any]

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.bytes for file in self.files.values())


def encode(manifest: Manifest) -> bytes:
    """The file's content; WeightsError where the manifest is none that `decode` takes (a tensor stored twice, say)."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "created": manifest.created,
        "step": manifest.step,
        "hash": SUM,
        "block": BLOCK,
        "files": {name: {"bytes": file.bytes, SUM: file.sums} for name, file in manifest.files.items()},
        "scalars": dict(manifest.scalars),
        "tensors": {
            name: {
                "shape": list(tensor.shape),
                "dtype": tensor.dtype,
                "pieces": [
                    {"file": piece.file, "key": piece.key, "offset": piece.offset, "box": [list(r) for r in piece.box]}
                    for piece in tensor.pieces
                ],
            }
            for name, tensor in manifest.tensors.items()
        },
    }
    _manifest(document, MANIFEST)
    return seal(document)


def seal(document: Mapping[str, Any]) -> bytes:
    """``document`` as JSON text, one line an entry, closed by the SHA-256 of all that stands before its line."""
    try:
        lines = [f" {json.dumps(key)}: {_dump(key, value)}" for key, value in document.items() if key != "sha256"]
    except (TypeError, ValueError, RecursionError) as error:
        raise WeightsError(f"{MANIFEST}: what is to be saved is no plain JSON: {error}") from error
    content = ("{\n" + ",\n".join(lines) + ",").encode()
    return content + f'\n "sha256": "{hashlib.sha256(content).hexdigest()}"\n}}\n'.encode()


def _dump(key: str, value: Any) -> str:
    if key not in ("files", "tensors") or not value:
        return json.dumps(value, allow_nan=False)
    rows = [f"  {json.dumps(name)}: {json.dumps(entry, allow_nan=False)}" for name, entry in value.items()]
    return "{\n" + ",\n".join(rows) + "\n }"


def load(folder: Path) -> Manifest:
    """The manifest of ``folder``, checked. WeightsError naming the file for anything missing or untrue."""
    path = folder / MANIFEST
    try:
        text = read_plain(path, LIMIT)
    except FileNotFoundError:
        raise WeightsError(
            f"{folder} holds no {MANIFEST}: nothing was stored, or a write that was not finished"
        ) from None
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror or error}") from error
    return decode(text, str(path))


def decode(text: bytes, where: str) -> Manifest:
    """`encode`'s inverse; ``where`` names the text in the WeightsError that refuses it."""
    try:
        document = json.loads(text, object_pairs_hook=_once, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{where} cannot be read: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise WeightsError(f'{where}: not a manifest of plait ("format": "{FORMAT}")')
    if document.get("version") != VERSION:
        raise WeightsError(f"{where}: version {document.get('version')!r}; this plait reads version {VERSION}")
    sealed = _SEAL.match(text)
    if sealed is None or hashlib.sha256(sealed["content"]).hexdigest() != sealed["digest"].decode():
        raise WeightsError(f"{where} is damaged: its sha256 does not hold")
    return _manifest(document, where)


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice in one object")
    return found


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _manifest(document: Mapping[str, Any], where: str) -> Manifest:
    """The values of a document; WeightsError where it is malformed or a tensor is not stored exactly once."""
    files, tensors, scalars = document.get("files"), document.get("tensors"), document.get("scalars")
    if not isinstance(files, dict) or not isinstance(tensors, dict) or not isinstance(scalars, dict):
        raise WeightsError(f'{where}: "files", "tensors" and "scalars" have to be objects')
    step, created = document.get("step"), document.get("created")
    if (document.get("hash"), document.get("block")) != (SUM, BLOCK):
        raise WeightsError(f"{where}: hash and block have to be {SUM} and {BLOCK}")
    try:
        step = None if step is None else natural(step)
        if not isinstance(created, str):
            raise ValueError(f"created {created!r} is no time")
        known = {name: _file(name, entry) for name, entry in files.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsError(f"{where}: {_reason(error)}") from error
    stored: dict[str, StoredTensor] = {}
    for name, entry in tensors.items():
        try:
            stored[name] = _tensor(entry, known)
        except (KeyError, TypeError, ValueError) as error:
            raise WeightsError(f"{where}: tensor {name!r}: {_reason(error)}") from error
    _disjoint(stored, where)
    return Manifest(step=step, created=created, files=known, tensors=stored, scalars=scalars)


def _reason(error: Exception) -> str:
    return f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)


def _file(name: str, entry: Mapping[str, Any]) -> StoredFile:
    if not name.endswith(".safetensors") or any(sign in name for sign in "/\\\0:"):
        raise ValueError(f"file {name!r} is not the plain name of a .safetensors file in the folder")
    size, sums = natural(entry["bytes"]), entry[SUM]
    if not isinstance(sums, str) or not re.fullmatch(r"(?:[0-9a-f]{8})*", sums) or len(sums) != 8 * -(-size // BLOCK):
        raise ValueError(f"file {name!r}: {SUM} is not eight hex digits for each {BLOCK} of {size} bytes")
    return StoredFile(bytes=size, sums=sums)


def _tensor(entry: Mapping[str, Any], files: Mapping[str, StoredFile]) -> StoredTensor:
    shape = tuple(natural(size) for size in entry["shape"])
    if math.prod(max(size, 1) for size in shape) >= 1 << 60 or len(shape) > 32:
        raise ValueError(f"shape {list(shape)} is larger than any tensor")
    dtype = entry["dtype"]
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is unknown; known: {', '.join(DTYPES)}")
    pieces = tuple(_piece(piece, shape) for piece in entry["pieces"])
    for piece in pieces:
        if piece.file not in files:
            raise ValueError(f"piece {piece.key!r} lies in {piece.file!r}, which is none of the files")
        if piece.offset % DTYPES[dtype][1]:
            raise ValueError(f"piece {piece.key!r} begins at byte {piece.offset}, inside an element")
        if piece.offset + volume(piece.box) * DTYPES[dtype][1] > files[piece.file].bytes:
            raise ValueError(f"piece {piece.key!r} reaches past the {files[piece.file].bytes} bytes of {piece.file}")
    cover(full(shape), [piece.box for piece in pieces])
    return StoredTensor(shape=shape, dtype=dtype, pieces=pieces)


def _piece(entry: Mapping[str, Any], shape: tuple[int, ...]) -> StoredPiece:
    file, key, offset, ranges = entry["file"], entry["key"], natural(entry["offset"]), entry["box"]
    if not isinstance(file, str) or not isinstance(key, str):
        raise ValueError(f"file {file!r} and key {key!r} have to be names")
    if not isinstance(ranges, list) or len(ranges) != len(shape):
        raise ValueError(f"piece {key!r} has box {ranges!r}, which does not fit shape {shape}")
    box = tuple((natural(start), natural(stop)) for start, stop in ranges)
    if any(not start < stop <= size for (start, stop), size in zip(box, shape, strict=True)):
        raise ValueError(f"piece {key!r} has box {box}, which does not fit shape {shape}")
    return StoredPiece(file=file, key=key, offset=offset, box=box)


def _disjoint(tensors: Mapping[str, StoredTensor], where: str) -> None:
    """No byte of a file belongs to two pieces."""
    spans: dict[str, list[tuple[int, int, str]]] = {}
    for tensor in tensors.values():
        for piece in tensor.pieces:
            end = piece.offset + volume(piece.box) * DTYPES[tensor.dtype][1]
            spans.setdefault(piece.file, []).append((piece.offset, end, piece.key))
    for file, held in spans.items():
        held.sort()
        for (_, end, before), (start, _, after) in itertools.pairwise(held):
            if start < end:
                raise WeightsError(f"{where}: pieces {before!r} and {after!r} share bytes of {file}")


def natural(value: object) -> int:
    """``value``, if it is a size; ValueError otherwise."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a size")
    return value
