"""``plait convert``: run folders, plait weights, Hugging Face folders and text, each recognised by what it holds.

Results are made under a temporary name beside their place and renamed into it when whole; nothing is overwritten.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

import torch

from plait.checkpoint.hf import HFFolder, export
from plait.checkpoint.manifest import MANIFEST
from plait.checkpoint.reshard import volume
from plait.checkpoint.store import WeightFolder, write_manifest, write_shard
from plait.checkpoint.writer import ShardRecord
from plait.core.errors import ConfigError, WeightsError
from plait.core.shard import Box
from plait.models.config import ModelConfig, parameter_count, parameter_shapes
from plait.train.data import TokenFile, encode_text

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FILE_BYTES = 1 << 30
"""Bytes of weights that are held at a time, and go to one file of a plait weight folder."""


class Kind(Enum):
    """What can be converted; the value says how it is recognised, and what it becomes."""

    RUN = "a run folder (it holds weights/), to a Hugging Face folder"
    WEIGHTS = f"plait weights (a folder with {MANIFEST}), to a Hugging Face folder"
    HF = "a Hugging Face folder (config.json beside safetensors), to plait weights"
    TEXT = "text files, to a token file NAME.bin with NAME.json"


def kind_of(sources: Sequence[Path]) -> Kind:
    """What ``sources`` are. ConfigError says what was found there and which kinds are known."""
    known = "; what can be converted: " + "; ".join(kind.value for kind in Kind)
    if not sources:
        raise ConfigError("nothing to convert" + known)
    for source in sources:
        if not source.exists():
            raise ConfigError(f"{source}: there is no such file or folder{known}")
    folders = [source for source in sources if source.is_dir()]
    if not folders:
        for source in sources:
            _require_text(source, known)
        return Kind.TEXT
    if len(sources) > 1:
        raise ConfigError(f"{folders[0]} is a folder and stands among {len(sources)} sources: give it alone{known}")
    folder = folders[0]
    if (folder / "weights").is_dir():
        return Kind.RUN
    if (folder / MANIFEST).is_file():
        return Kind.WEIGHTS
    if (folder / "config.json").is_file():
        return Kind.HF
    names = sorted(path.name for path in folder.iterdir())
    held = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") if names else "nothing"
    raise ConfigError(f"{folder} is a folder that holds {held}{known}")


def run(src: list[Path], dst: Path, *, tokenizer: str = "bytes", dtype: str | None = None) -> int:
    """Convert ``src`` to ``dst`` by what it is, print what was made, and return 0.

    ``tokenizer``: ``bytes`` or the path of a tokenizer.json, for text. ``dtype``: fp32, bf16 or fp16 for weights; None
    keeps the stored one. ConfigError for sources of no known kind, a place that is taken or cannot be written, and
    options of another kind; WeightsError for damaged weights.
    """
    kind = kind_of(src)
    dst = Path(os.path.abspath(dst))  # so that it has a name: of "." there is none
    if kind is Kind.TEXT:
        if dtype is not None:
            raise ConfigError(f"dtype={dtype} is for weights; {src[0]} is text")
        _tokens(src, dst, tokenizer)
        return 0
    if tokenizer != "bytes":
        raise ConfigError(f"tokenizer={tokenizer} is for text; {src[0]} holds weights")
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype} is unknown; it is one of {', '.join(DTYPES)}")
    wanted = None if dtype is None else DTYPES[dtype]
    if kind is Kind.HF:
        _to_plait(src[0], dst, wanted)
    else:
        _to_hf(src[0] / "weights" if kind is Kind.RUN else src[0], dst, wanted)
    return 0


def _require_text(source: Path, known: str) -> None:
    try:
        with source.open("rb") as file:
            start = file.read(1 << 16)
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error.strerror}") from error
    if b"\0" in start:
        raise ConfigError(f"{source} is a file with NUL bytes, so no text{known}")


def _tokens(sources: Sequence[Path], dst: Path, tokenizer: str) -> None:
    if dst.is_dir():
        raise ConfigError(f"{dst} is a folder; text becomes a token file: write {dst / sources[0].stem}.bin")
    path = dst if dst.suffix == ".bin" else dst.with_name(dst.name + ".bin")
    for taken in (path, path.with_suffix(".json")):
        if taken.exists():
            raise ConfigError(f"{taken} is there already: choose another name, or delete it")
    encode_text(sources, path, tokenizer)
    file = TokenFile.open(path)
    print(f"{path} and {path.with_suffix('.json').name}: {len(file.tokens):,} tokens, vocabulary {file.vocab_size:,}")
    print(f"train on it: plait train --set data.tokens={path} --set model.vocab_size={file.vocab_size}")


def _to_hf(folder: Path, dst: Path, dtype: torch.dtype | None) -> None:
    source = WeightFolder(folder)
    try:
        config = ModelConfig.from_mapping(source.model)
    except (TypeError, ValueError) as error:
        raise WeightsError(f"{folder / MANIFEST}: its model cannot be read: {error}") from error
    shapes = parameter_shapes(config)
    stored = {name: source.shape(name) for name in source.names}
    if stored != shapes:
        name = next(name for name in [*shapes, *stored] if stored.get(name) != shapes.get(name))
        raise WeightsError(
            f"{folder}: {name} is stored as {stored.get(name)}, its model {config.family} has it as {shapes.get(name)}"
        )
    with _folder(dst) as draft:
        export(config, source, draft, dtype=dtype)
    print(f"{dst}: a Hugging Face folder, {_what(config, dst)}")
    print(f'read it: transformers.AutoModelForCausalLM.from_pretrained("{dst}")')


def _to_plait(folder: Path, dst: Path, dtype: torch.dtype | None) -> None:
    source = HFFolder(folder)
    records: list[ShardRecord] = []
    with _folder(dst) as draft:
        for number, group in enumerate(_groups(source, dtype)):
            records += write_shard(draft, number, group)
        write_manifest(draft, source.config.to_mapping(), parameter_shapes(source.config), records)
    print(f"{dst}: plait weights, {_what(source.config, dst)}")
    print(f"back again: plait convert {dst} FOLDER")


def _groups(source: HFFolder, dtype: torch.dtype | None) -> Iterator[dict[str, list[tuple[Box, torch.Tensor]]]]:
    """The tensors in groups of at most `FILE_BYTES`; larger ones in blocks of rows."""
    group: dict[str, list[tuple[Box, torch.Tensor]]] = {}
    held = 0
    for name, shape in parameter_shapes(source.config).items():
        for box in _blocks(shape):
            values = source.read(name, box)
            values = values if dtype is None else values.to(dtype)
            if group and held + values.nbytes > FILE_BYTES:
                yield group
                group, held = {}, 0
            group.setdefault(name, []).append((box, values))
            held += values.nbytes
    yield group


def _blocks(shape: tuple[int, ...]) -> Iterator[Box]:
    rest = tuple((0, size) for size in shape[1:])
    # Eight bytes an element is the widest dtype.
    rows = max(1, FILE_BYTES // (8 * max(1, volume(rest))))
    for start in range(0, shape[0], rows):
        yield ((start, min(start + rows, shape[0])), *rest)


@contextmanager
def _folder(dst: Path) -> Iterator[Path]:
    """A new folder that takes the name ``dst`` when the block ends well, and is removed when it does not."""
    if dst.is_symlink() or (dst.exists() and (not dst.is_dir() or any(dst.iterdir()))):
        raise ConfigError(f"{dst} is there already: choose another name, or delete it")
    if dst.exists() and dst.samefile(Path.cwd()):  # renaming over it would leave the caller in a folder without a name
        raise ConfigError(f"{dst} is the current folder: name a new one in it")
    draft = dst.with_name(f".{dst.name}-{secrets.token_hex(4)}.tmp")
    try:
        dst.parent.mkdir(parents=True, exist_ok=True)
        draft.mkdir()
        yield draft
        os.replace(draft, dst)
    except OSError as error:
        raise ConfigError(f"cannot write {dst}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _what(config: ModelConfig, folder: Path) -> str:
    size = sum(path.stat().st_size for path in folder.iterdir())
    files = len(list(folder.glob("*.safetensors")))
    layers = f"{config.num_layers} layers, {parameter_count(config):,} parameters"
    return f"{config.family} of {layers}, {size / 1e6:,.1f} MB in {files} safetensors file{'s' * (files > 1)}"
