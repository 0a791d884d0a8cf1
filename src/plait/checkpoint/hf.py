"""Hugging Face folders of safetensors: read by slice, written tensor by tensor. No pickle is ever read.

Four differences to plait's names: q|k|v and gate|up are separate tensors there and sections of one here; each expert is
a tensor there and a part of a stack here; GPT-2 stores its projections as [in, out] ("Conv1D"); a tied head has no
tensor of its own.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from plait.checkpoint.hf_layout import DTYPE_NAMES, DTYPES, Piece, layout
from plait.checkpoint.reshard import intersect, relative
from plait.core.errors import ConfigError, WeightsError
from plait.models.config import ModelConfig, parameter_shapes
from plait.models.families import from_hf, to_hf
from plait.models.init import Box, WeightSource, check_box

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_CHUNK = 64 << 20
"""Bytes of a tensor held at a time while it is written."""
_BUFFERS = re.compile(r"\.attn\.(masked_)?bias$|rotary_emb\.inv_freq$")
"""Masks and frequencies that old versions of transformers stored beside the weights."""
_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.")


@dataclass(frozen=True, kw_only=True)
class _Stored:
    """Where a stored tensor is and what its file says of it."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


def _load_json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read: {error}") from error
    if not isinstance(loaded, dict):
        raise WeightsError(f"{path} is not a JSON object")
    return loaded


def _file_names(folder: Path) -> tuple[Path, dict[str, str] | None]:
    """(file that lists the tensors, key -> file name by the index or None for a single file)."""
    if (folder / _SINGLE).is_file():
        return folder / _SINGLE, None
    index = folder / _INDEX
    if not index.is_file():
        raise WeightsError(f"{folder} has neither {_SINGLE} nor {_INDEX} (plait reads no pickled weights)")
    names = _load_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise WeightsError(f"{index} has no weight_map of tensor names to file names")
    for name in sorted(set(names.values())):
        # By name alone: the hub's cache links its files to a folder beside, so links are left to whoever made them.
        if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise WeightsError(f"{index} names {name!r}, which is not a file of this folder")
    return index, names


def _stored_tensors(folder: Path) -> tuple[Path, dict[str, _Stored]]:
    """Every tensor of the folder, from the headers of its files."""
    listing, names = _file_names(folder)
    files = [listing] if names is None else [folder / name for name in sorted(set(names.values()))]
    found: dict[str, _Stored] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                for key in handle.keys():  # noqa: SIM118 (not a mapping)
                    if names is not None and names.get(key) != file.name:
                        continue
                    view = handle.get_slice(key)
                    dtype = DTYPES.get(view.get_dtype())
                    if dtype is None:
                        raise WeightsError(
                            f"{file}: {key} is stored as {view.get_dtype()}: {', '.join(DTYPES)} can be read"
                        )
                    found[key] = _Stored(file=file, shape=tuple(view.get_shape()), dtype=dtype)
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{file} cannot be read: {error}") from error
    if names is not None and (missing := sorted(set(names) - set(found))):
        raise WeightsError(
            f"{folder / names[missing[0]]} does not hold {missing[0]}, which {listing.name} places there"
        )
    return listing, found


def _layer_of(key: str) -> int:
    """Number of the layer that a stored tensor belongs to, -1 for none."""
    found = _LAYER.match(key)
    return int(found[1]) if found else -1


class HFFolder:
    """A Hugging Face folder as a `WeightSource`. Opening it reads headers alone and checks every name and shape.

    `ConfigError` for a ``config.json`` that is missing or not supported; `WeightsError` naming file, tensor, expected
    and found for weights that do not fit it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        config_file = self.path / "config.json"
        if not config_file.is_file():
            raise ConfigError(f"{self.path} is not a Hugging Face folder: it has no config.json")
        try:
            self.config = from_hf(_load_json(config_file))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{config_file}: {error}") from error
        self._shapes = parameter_shapes(self.config)
        self._layout = layout(self.config)
        listing, stored = _stored_tensors(self.path)
        self._stored: dict[str, tuple[str, _Stored]] = {}
        """Key of the layout -> (key in the file, where it is)."""
        for name, pieces in self._layout.items():
            for piece in pieces:
                self._stored[piece.key] = self._locate(name, piece, listing, stored)
        self._dtypes = {name: self._dtype(pieces) for name, pieces in self._layout.items()}
        used = {key for key, _ in self._stored.values()}
        spare = [key for key in stored if key not in used and not _BUFFERS.search(key)]
        if self.config.tied:
            spare = [key for key in spare if key != "lm_head.weight"]
        if self.config.family == "deepseek_v3":
            # Its layers for predicting further tokens stand behind the last one.
            spare = [key for key in spare if _layer_of(key) < self.config.num_layers]
        if spare:
            raise WeightsError(
                f"{listing} holds {len(spare)} tensors that a {self.config.family} model of this config.json has not, "
                f"the first being {spare[0]}"
            )

    @staticmethod
    def _locate(name: str, piece: Piece, listing: Path, stored: Mapping[str, _Stored]) -> tuple[str, _Stored]:
        # Folders saved from a model without its head (GPT-2's own among them) leave the first part of the key out.
        for key in (piece.key, piece.key.partition(".")[2]):
            found = stored.get(key)
            if found is None:
                continue
            if found.shape != piece.shape:
                raise WeightsError(f"{found.file}: {key} should be {piece.shape}, but is {found.shape}")
            return key, found
        raise WeightsError(f"{listing} has no tensor {piece.key} of shape {piece.shape}, which is needed for {name}")

    def _dtype(self, pieces: tuple[Piece, ...]) -> torch.dtype:
        return functools.reduce(torch.promote_types, (self._stored[piece.key][1].dtype for piece in pieces))

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Values of ``name`` inside ``box`` in their stored dtype; reads the pages of those bytes alone."""
        if name not in self._shapes:
            raise WeightsError(f"{self.path}: a {self.config.family} model of this config.json has no parameter {name}")
        box = check_box(name, self._shapes[name], box)
        # What safetensors gives is a view of the mapped file: this is memory of our own.
        out = torch.empty([stop - start for start, stop in box], dtype=self._dtypes[name])
        for piece in self._layout[name]:
            part = intersect(box, piece.box)
            if part is None:
                continue
            stored = tuple(slice(*span) for span in relative(part, piece.box)[piece.lead :])
            values = self._slice(piece.key, stored[::-1] if piece.transposed else stored)
            target = out[tuple(slice(*span) for span in relative(part, box))]
            target.copy_((values.T if piece.transposed else values).reshape(target.shape))
        return out

    def _slice(self, piece_key: str, index: tuple[slice, ...]) -> Tensor:
        key, stored = self._stored[piece_key]
        try:
            with safe_open(stored.file, framework="pt") as handle:
                values: Tensor = handle.get_slice(key)[index]
                return values
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{stored.file}: {key} cannot be read: {error}") from error


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """One tensor to write."""

    name: str
    piece: Piece
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return torch.Size(self.piece.shape).numel() * self.dtype.itemsize


def _entries(config: ModelConfig, source: WeightSource, dtype: torch.dtype | None) -> Iterator[_Entry]:
    for name, pieces in layout(config).items():
        corner = tuple((0, 1) for _ in parameter_shapes(config)[name])
        # A router's bias moves by steps that half precision would lose; transformers keeps it in fp32 too.
        wanted = torch.float32 if name.endswith("router.bias") and dtype is not None else dtype
        kept = wanted if wanted is not None else source.read(name, corner).dtype
        if kept not in DTYPE_NAMES:
            raise WeightsError(f"{name} is {kept}, which a Hugging Face folder is not written in: give a dtype")
        for piece in pieces:
            yield _Entry(name=name, piece=piece, dtype=kept)


def _chunks(entry: _Entry, source: WeightSource) -> Iterator[Tensor]:
    """The tensor as stored, some rows at a time."""
    piece = entry.piece
    rows = piece.shape[0]
    step = max(1, _CHUNK * rows // max(1, entry.bytes))
    dim = piece.lead + 1 if piece.transposed else piece.lead
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        box = list(piece.box)
        box[dim] = (box[dim][0] + start, box[dim][0] + stop)
        part = source.read(entry.name, tuple(box))
        yield part.T if piece.transposed else part


def _write_file(path: Path, entries: list[_Entry], source: WeightSource) -> None:
    """One safetensors file: 8 bytes of header length, the header as JSON, the tensors one after the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        header[entry.piece.key] = {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": list(entry.piece.shape),
            "data_offsets": [offset, offset + entry.bytes],
        }
        offset += entry.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            for chunk in _chunks(entry, source):
                file.write(chunk.to(entry.dtype).contiguous().view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _grouped(entries: Iterator[_Entry], limit: int) -> list[list[_Entry]]:
    """The entries in order, in groups of at most ``limit`` bytes or of one entry."""
    groups: list[list[_Entry]] = [[]]
    held = 0
    for entry in entries:
        if groups[-1] and held + entry.bytes > limit:
            groups.append([])
            held = 0
        groups[-1].append(entry)
        held += entry.bytes
    return groups


def _replace_json(path: Path, value: Mapping[str, Any]) -> None:
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(draft, path)


def export(
    config: ModelConfig,
    source: WeightSource,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 5 << 30,
) -> None:
    """Writes ``folder`` so that ``AutoModelForCausalLM.from_pretrained`` reads it: weights first, ``config.json`` last.

    ``dtype`` None keeps what ``source`` has; files hold at most ``shard_bytes`` unless one tensor is larger. Memory
    stays within some 64 MiB whatever the model. `ConfigError` when the family has no Hugging Face form for ``config``,
    or when the folder holds weights already: a reader could take the old ones.
    """
    folder = Path(folder)
    try:
        described = to_hf(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    folder.mkdir(parents=True, exist_ok=True)
    if old := sorted(folder.glob("*.safetensors")) + sorted(folder.glob("*.safetensors.index.json")):
        raise ConfigError(f"{folder} holds weights already ({old[0].name}): export to another folder")
    groups = _grouped(_entries(config, source, dtype), shard_bytes)
    placed: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        name = _SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        draft = folder / f"{name}.tmp"
        _write_file(draft, group, source)
        os.replace(draft, folder / name)
        placed.update({entry.piece.key: name for entry in group})
    if len(groups) > 1:
        total = sum(entry.bytes for group in groups for entry in group)
        _replace_json(folder / _INDEX, {"metadata": {"total_size": total}, "weight_map": placed})
    kinds = {entry.dtype for group in groups for entry in group if not entry.name.endswith("router.bias")}
    if len(kinds) == 1:
        described["torch_dtype"] = str(kinds.pop()).removeprefix("torch.")
    _replace_json(folder / "config.json", described)
