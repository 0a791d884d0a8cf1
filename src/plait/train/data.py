"""Token files, and which of their samples a step sees: a function of (seed, epoch, global sample index) alone.

A token file is ``NAME.bin``, little-endian ids without a header, beside ``NAME.json``,
``{"dtype": "uint16" | "uint32", "vocab_size": N, "tokenizer": "bytes" | path | null}``.

Legend: B rows of a batch, T tokens of a row (``seq``).
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from plait.core.errors import ConfigError
from plait.models.batch import IGNORE, Batch
from plait.train.order import permute

DTYPES = {"uint16": 1 << 16, "uint32": 1 << 32}
"""Name in the JSON file -> number of ids that it can hold."""
CHUNK = 1 << 20
"""Bytes, or characters, of text that are encoded at a time."""
LIBRARY_BYTES = 8_000_000


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """An open token file; ``tokens`` is mapped, not read."""

    path: Path
    vocab_size: int
    tokenizer: str | None
    tokens: NDArray[np.unsignedinteger]

    @classmethod
    def open(cls, path: Path) -> TokenFile:
        """Map ``NAME.bin``; ConfigError naming the file and the fix where it or ``NAME.json`` is unusable."""
        header = path.with_suffix(".json")
        if path.suffix != ".bin" or not path.is_file():
            raise ConfigError(f"{path} is not a token file NAME.bin; `plait convert TEXT {path.stem}.bin` makes one")
        try:
            meta = json.loads(header.read_text(encoding="utf-8"))
        except FileNotFoundError:
            example = '{"dtype": "uint16", "vocab_size": 50257, "tokenizer": null}'
            raise ConfigError(f"{header} is missing: it has to stand beside {path.name} and hold {example}") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{header} cannot be read: {error}") from error
        if not isinstance(meta, dict) or meta.get("dtype") not in tuple(DTYPES):
            raise ConfigError(f'{header}: "dtype" has to be one of {", ".join(DTYPES)}')
        dtype, limit = np.dtype(meta["dtype"]).newbyteorder("<"), DTYPES[meta["dtype"]]
        vocab_size, tokenizer = meta.get("vocab_size"), meta.get("tokenizer")
        if type(vocab_size) is not int or not 1 <= vocab_size <= limit:
            raise ConfigError(f'{header}: "vocab_size" has to be a number of 1 .. {limit}, it is {vocab_size!r}')
        if tokenizer is not None and not isinstance(tokenizer, str):
            raise ConfigError(f'{header}: "tokenizer" has to be "bytes", a path or null, it is {tokenizer!r}')
        size = path.stat().st_size
        if size == 0 or size % dtype.itemsize:
            raise ConfigError(
                f"{path} has {size} bytes, which is no positive multiple of the {dtype.itemsize} of {meta['dtype']}: "
                f'it was cut short, or "dtype" in {header.name} is wrong'
            )
        return cls(path=path, vocab_size=vocab_size, tokenizer=tokenizer, tokens=np.memmap(path, dtype, mode="r"))


def write_tokens(
    path: Path, chunks: Iterable[ArrayLike], *, dtype: str, vocab_size: int, tokenizer: str | None
) -> None:
    """Write ``NAME.bin`` from chunks of ids, and ``NAME.json``, which appears first; each whole or not at all.

    ConfigError where an id is not below ``vocab_size``, or ``vocab_size`` not within ``dtype``.
    """
    if path.suffix != ".bin":
        raise ConfigError(f"a token file is called NAME.bin, not {path.name}")
    if dtype not in DTYPES or not 1 <= vocab_size <= DTYPES[dtype]:
        raise ConfigError(f"{path}: a vocabulary of {vocab_size} does not fit {dtype}; dtypes: {', '.join(DTYPES)}")
    token = secrets.token_hex(4)
    pairs = [(suffix, path.with_name(f"{path.stem}-{token}{suffix}.tmp")) for suffix in (".json", ".bin")]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with pairs[1][1].open("wb") as file:
            for chunk in chunks:
                ids = np.asarray(chunk).reshape(-1)  # of an empty list: floats
                if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
                    raise ConfigError(f"{path}: ids {ids.min()} .. {ids.max()} are not all below {vocab_size}")
                file.write(ids.astype(np.dtype(dtype).newbyteorder("<")).tobytes())
        meta = {"dtype": dtype, "vocab_size": vocab_size, "tokenizer": tokenizer}
        pairs[0][1].write_text(json.dumps(meta) + "\n", encoding="utf-8")
        for suffix, temporary in pairs:
            os.replace(temporary, path.with_suffix(suffix))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error
    finally:
        for _, temporary in pairs:
            with suppress(OSError):
                temporary.unlink()


def encode_text(paths: Sequence[Path], dst: Path, tokenizer: str) -> Path:
    """Encode text files, one after the other, to ``NAME.bin`` + ``NAME.json``; returns the path of the former.

    ``tokenizer``: ``bytes`` (the files' bytes; vocabulary 256), or a Hugging Face ``tokenizer.json``, which sees chunks
    of about a million characters that end where a line does, without its special tokens.
    """
    if tokenizer == "bytes":
        pieces = (np.frombuffer(chunk, np.uint8) for path in paths for chunk in _read_bytes(path))
        write_tokens(dst, pieces, dtype="uint16", vocab_size=256, tokenizer="bytes")
        return dst
    from tokenizers import Tokenizer  # byte-level runs do without it

    try:
        encoder = Tokenizer.from_file(tokenizer)
    except Exception as error:  # the library raises bare Exceptions
        raise ConfigError(f'tokenizer {tokenizer!r} is neither "bytes" nor a tokenizer.json: {error}') from error
    vocab_size = max(encoder.get_vocab(with_added_tokens=True).values()) + 1
    dtype = "uint16" if vocab_size <= DTYPES["uint16"] else "uint32"
    encoded = (encoder.encode(t, add_special_tokens=False).ids for path in paths for t in _read_text(path))
    write_tokens(dst, encoded, dtype=dtype, vocab_size=vocab_size, tokenizer=tokenizer)
    return dst


def _read_bytes(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk
    except OSError as error:
        raise ConfigError(f"text file {path} cannot be read: {error}") from error


def _read_text(path: Path) -> Iterator[str]:
    """Chunks that end after a line where there is one: no word is cut, whatever the tokenizer joins within a line."""
    rest = ""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            while chunk := file.read(CHUNK):
                rest += chunk
                end = rest.rfind("\n") + 1 or len(rest)
                yield rest[:end]
                rest = rest[end:]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"text file {path} cannot be read as UTF-8: {error}") from error
    if rest:
        yield rest


def standard_library_text() -> list[Path]:
    """Sources of the running Python's standard library, at most `LIBRARY_BYTES`, top-level modules first.

    The order is that of (depth, path): the same on every start of one Python. Tests, installed packages and files
    written by the build are left out. ConfigError where the installation carries no sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    found: list[tuple[int, str]] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped]
        here = Path(folder).relative_to(root)
        names = [name for name in files if name.endswith(".py") and not name.startswith("_sysconfigdata")]
        found += [(len(here.parts), (here / name).as_posix()) for name in names]
    chosen: list[Path] = []
    total = 0
    for _, name in sorted(found):
        path = root / name
        total += path.stat().st_size
        if total > LIBRARY_BYTES:
            break
        chosen.append(path)
    if not chosen:
        raise ConfigError(f"this Python carries no library sources in {root}: set data.tokens or data.text")
    return chosen


def default_tokens(folder: Path) -> Path:
    """The byte tokens of `standard_library_text`, built in ``folder`` by the first who asks.

    Callers at the same time may both build: each renames a whole file of the same content into place.
    """
    path = folder / f"python-{platform.python_version()}.bin"
    if not path.exists():
        encode_text(standard_library_text(), path, "bytes")
    return path


class Samples:
    """The samples of a token file, and the global batch of every step: the same on every rank and under every plan.

    Sample i is tokens ``[i * seq, i * seq + seq]``: the first ``seq`` are inputs, the last ``seq`` their targets. The
    last ``held_out`` share of the samples (at least one, unless it is 0) is kept for evaluation. Row j of step s has
    the global sample counter ``s * global_batch + j``; divided by the number of training samples it gives epoch and
    place, and ``shuffle`` permutes the places by (seed, epoch).

    ``separator`` is the id that ends a document: after it positions start again, the document number grows, and what
    follows it (another document's first token) is no target. ``vocab_size`` is the model's.
    """

    def __init__(
        self,
        file: TokenFile,
        *,
        seq: int,
        global_batch: int,
        seed: int,
        shuffle: bool,
        held_out: float,
        separator: int | None,
        vocab_size: int,
    ) -> None:
        total = (len(file.tokens) - 1) // seq
        self.held_out = max(1, round(total * held_out)) if held_out > 0 else 0
        """Number of samples kept for evaluation."""
        self.train = total - self.held_out
        """Number of samples of an epoch."""
        if self.train < 1:
            raise ConfigError(
                f"{file.path} has {len(file.tokens)} tokens, {max(total, 0)} samples of data.seq={seq}, of which "
                f"{self.held_out} are held out: none is left to train on; take a longer text or a smaller data.seq"
            )
        self._file = file
        self._seq = seq
        self._global_batch = global_batch
        self._seed = seed
        self._shuffle = shuffle
        self._separator = separator
        self._vocab_size = vocab_size

    def indices(self, step: int) -> list[int]:
        """Index in the file of each sample of the step's global batch."""
        return [int(index) for index in self._indices(self._counters(step, range(self._global_batch)))]

    def batch(self, step: int, rows: Sequence[int]) -> Batch:
        """Those ``rows`` of the step's global batch; ``sample_B`` is the global sample counter.

        ConfigError where a token is not in the model's vocabulary.
        """
        counters = self._counters(step, rows)
        return self._batch(self._indices(counters), counters, step)

    def target_count(self, step: int) -> int:
        """Number of unmasked targets in the step's global batch: the denominator of its loss on every rank."""
        if self._separator is None:
            return self._global_batch * self._seq
        return self._unmasked(self._indices(self._counters(step, range(self._global_batch))))

    @property
    def eval_steps(self) -> int:
        """Number of global batches that hold the whole held-out split."""
        return -(-self.held_out // self._global_batch)

    def eval_batches(self, count: int | None, rows: Sequence[int]) -> Iterator[Batch]:
        """``rows`` of the first ``count`` global batches of the held-out samples, in order (None: of all).

        The last one is filled up with rows without a target. ``step`` is the batch's number in this evaluation,
        ``sample_B`` the index in the file (behind the end for the filling).
        """
        for number in range(self.eval_steps if count is None else min(count, self.eval_steps)):
            places = self._counters(number, rows)
            real = places < self.held_out
            batch = self._batch(self.train + np.minimum(places, self.held_out - 1), self.train + places, number)
            batch.targets_BT[torch.from_numpy(~real)] = IGNORE
            yield batch

    def eval_target_count(self, number: int) -> int:
        """Number of unmasked targets in global batch ``number`` of the held-out samples."""
        first = number * self._global_batch
        return self._unmasked(self.train + np.arange(first, min(first + self._global_batch, self.held_out)))

    def _counters(self, step: int, rows: Sequence[int]) -> NDArray[np.int64]:
        chosen = np.asarray(rows, np.int64).reshape(-1)
        if chosen.size and not 0 <= chosen.min() <= chosen.max() < self._global_batch:
            raise IndexError(f"rows {list(rows)} are not all in a global batch of {self._global_batch}")
        return chosen + step * self._global_batch

    def _indices(self, counters: NDArray[np.int64]) -> NDArray[np.int64]:
        epochs, places = np.divmod(counters, self.train)
        if self._shuffle:
            for epoch in np.unique(epochs):
                these = epochs == epoch
                places[these] = permute(places[these], self.train, self._seed, int(epoch))
        return places

    def _read(self, indices: NDArray[np.int64], length: int) -> NDArray[np.unsignedinteger]:
        return np.asarray(self._file.tokens[indices[:, None] * self._seq + np.arange(length)])

    def _unmasked(self, indices: NDArray[np.int64]) -> int:
        return int(np.count_nonzero(self._read(indices, self._seq) != self._separator))

    def _batch(self, indices: NDArray[np.int64], counters: NDArray[np.int64], step: int) -> Batch:
        ids = self._read(indices, self._seq + 1).astype(np.int64)
        if ids.size and ids.max() >= self._vocab_size:
            where = int(indices[int((ids >= self._vocab_size).any(axis=1).argmax())])
            raise ConfigError(
                f"{self._file.path}: sample {where} holds token {ids.max()}, the model has vocab_size="
                f"{self._vocab_size}; the file's own vocabulary is {self._file.vocab_size}"
            )
        tokens, targets = ids[:, :-1].copy(), ids[:, 1:].copy()
        positions = documents = None
        if self._separator is not None:
            ends = tokens == self._separator
            targets[ends] = IGNORE
            starts = np.zeros_like(ends)
            starts[:, 1:] = ends[:, :-1]
            place = np.arange(self._seq)
            positions = torch.from_numpy(place - np.maximum.accumulate(np.where(starts, place, 0), axis=1))
            documents = torch.from_numpy(np.cumsum(starts, axis=1, dtype=np.int64))
        return Batch(
            tokens_BT=torch.from_numpy(tokens),
            targets_BT=torch.from_numpy(targets),
            sample_B=torch.from_numpy(counters),
            step=step,
            positions_BT=positions,
            documents_BT=documents,
        )
