"""`Checkpoint`: any boxes of any tensor of a stored folder, whoever wrote them, by byte range and in several threads.

Nothing is read or allocated by what a folder claims of itself before the claim was held against its files.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

import torch

from plait.checkpoint import disk, steps
from plait.checkpoint.manifest import DTYPES, Manifest, StoredPiece, StoredTensor
from plait.checkpoint.ranges import CHUNK, Read, chunks, header
from plait.checkpoint.reshard import cover, relative, volume
from plait.checkpoint.state import Agreement
from plait.core.errors import WeightsError
from plait.core.shard import Box, full

THREADS = max(2, min(8, os.cpu_count() or 1))


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to read: ``boxes`` of tensor ``name``, one after the other, row-major, into ``out``.

    ``out``: contiguous, of as many elements as the boxes, any shape; another dtype than the stored one is converted to.
    """

    name: str
    boxes: Sequence[Box]
    out: torch.Tensor


@final
class Checkpoint:
    """A committed folder; open it with `open`. No file stays open between reads.

    WeightsError naming the file for anything missing, truncated, outside the folder, or contradicting the manifest.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._by_file: dict[str, list[tuple[StoredTensor, StoredPiece]]] = {}
        for tensor in manifest.tensors.values():
            for piece in tensor.pieces:
                self._by_file.setdefault(piece.file, []).append((tensor, piece))
        self._known: set[str] = set()

    @classmethod
    def open(cls, path: Path, *, verify: bool = False, only: Collection[str] | None = None) -> Self:
        """The checkpoint in ``path``, its manifest and the sizes of its files checked; every byte where ``verify``.

        ``only``: the files that are there and will be read, None: all.
        """
        opened = cls(path, steps.check(path, only=only))
        damage = opened.damage() if verify else []
        if damage:
            raise WeightsError(damage[0])
        return opened

    @property
    def step(self) -> int | None:
        """Steps done when it was saved; None for weights alone."""
        return self.manifest.step

    @property
    def scalars(self) -> Mapping[str, Any]:
        """What was saved beside the tensors."""
        return self.manifest.scalars

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors' names."""
        return tuple(self.manifest.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor ``name``."""
        return self._find(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Dtype in which ``name`` is stored."""
        found: torch.dtype = getattr(torch, self._find(name).dtype)
        return found

    def read(self, name: str, boxes: Sequence[Box] | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        """``boxes`` of tensor ``name``, one after the other, as one dim; the whole tensor in its shape where None.

        With ``out`` they are read into it (see `Request`) and it is returned.
        """
        stored = self._find(name)
        wanted = [full(stored.shape)] if boxes is None else boxes
        if out is None:
            self._check_boxes(name, wanted)
            shape = stored.shape if boxes is None else (sum(volume(box) for box in wanted),)
            out = torch.empty(shape, dtype=self.dtype(name))
        self.load([Request(name=name, boxes=wanted, out=out)])
        return out

    def load(self, requests: Iterable[Request]) -> int:
        """Read all of ``requests``, in `THREADS` threads; returns the number of elements. Every element is read once.

        WeightsError for boxes outside a tensor, and targets of another size.
        """
        jobs: list[Read] = []
        later: list[tuple[torch.Tensor, torch.Tensor]] = []
        count = 0
        for request in requests:
            stored = self._find(request.name)
            self._check_boxes(request.name, request.boxes)
            size = sum(volume(box) for box in request.boxes)
            if request.out.numel() != size or not request.out.is_contiguous():
                raise WeightsError(
                    f"{request.name}: boxes of {size} elements do not go into {request.out.numel()}, or not in one run"
                )
            target = request.out.detach().view(-1)
            if target.dtype != self.dtype(request.name) or target.device.type != "cpu":
                later.append((target, torch.empty(size, dtype=self.dtype(request.name))))
                target = later[-1][1]
            jobs += self._jobs(stored, request.boxes, target)
            count += size
        self._run(jobs)
        for target, values in later:
            target.copy_(values)
        return count

    def damage(self, *, share: tuple[int, int] = (0, 1)) -> list[str]:
        """Read every byte of the files and say what is wrong, a line a file; no line where all is well.

        ``share``: (part, parts), for ranks that divide the files among them.
        """
        part, parts = share
        return list(self.damage_by_file(sorted(self.manifest.files)[part::parts]).values())

    def damage_by_file(self, names: Sequence[str]) -> dict[str, str]:
        """What is wrong with those of the files ``names`` that have a wrong byte, or cannot be read."""
        with ThreadPoolExecutor(THREADS) as pool:
            found = zip(names, pool.map(self._damage_of, names), strict=True)
            return {name: line for name, line in found if line is not None}

    def files_of(self, name: str, boxes: Sequence[Box]) -> set[str]:
        """The files that hold something of ``boxes`` of tensor ``name``."""
        pieces = self._find(name).pieces
        whole = [piece.box for piece in pieces]
        return {pieces[index].file for box in boxes if volume(box) for index, _ in cover(box, whole)}

    def check_headers(self) -> None:
        """Hold every file's own header against the manifest; reads do so with the files that they touch."""
        for file in self._by_file:
            self._check_header(file)

    def _damage_of(self, file: str) -> str | None:
        stored = self.manifest.files[file]
        found = disk.first_damage(self.path / file, stored.bytes, stored.sums)
        if found is None and file in self._by_file:
            try:
                self._check_header(file)
            except WeightsError as error:
                return str(error)
        return found

    def _find(self, name: str) -> StoredTensor:
        if name not in self.manifest.tensors:
            raise WeightsError(f"{self.path} holds no tensor {name!r}")
        return self.manifest.tensors[name]

    def _check_boxes(self, name: str, boxes: Sequence[Box]) -> None:
        shape = self._find(name).shape
        for box in boxes:
            if len(box) != len(shape) or any(
                not 0 <= start <= stop <= size for (start, stop), size in zip(box, shape, strict=True)
            ):
                raise WeightsError(f"box {box} is not inside {name}, which has shape {shape}")

    def _jobs(self, stored: StoredTensor, boxes: Sequence[Box], target: torch.Tensor) -> Iterator[Read]:
        pieces = [piece.box for piece in stored.pieces]
        at = 0
        for box in boxes:
            size = volume(box)
            values = target[at : at + size].view([stop - start for start, stop in box])
            at += size
            for index, part in cover(box, pieces) if size else ():
                piece = stored.pieces[index]
                out = values[tuple(slice(start, stop) for start, stop in relative(part, box))]
                sizes = [stop - start for start, stop in piece.box]
                strides = [volume(piece.box[dim + 1 :]) for dim in range(len(sizes))]
                inside = relative(part, piece.box)
                width = DTYPES[stored.dtype][1]
                start = piece.offset + width * sum(
                    first * stride for (first, _), stride in zip(inside, strides, strict=True)
                )
                yield from chunks(Read(file=piece.file, offset=start, strides=tuple(strides), out=out))

    def _run(self, jobs: Sequence[Read]) -> None:
        """Do ``jobs``, file by file; one thread where there is little to do."""
        for file in {job.file for job in jobs}:
            self._check_header(file)
        files: dict[str, int] = {}
        try:
            for job in jobs:
                if job.file not in files:
                    files[job.file] = self._descriptor(job.file)
            if sum(job.out.nbytes for job in jobs) <= CHUNK:
                for job in jobs:
                    self._do(job, files[job.file])
                return
            with ThreadPoolExecutor(THREADS, thread_name_prefix="plait-read") as pool:
                for done in [pool.submit(self._do, job, files[job.file]) for job in jobs]:
                    done.result()
        finally:
            for descriptor in files.values():
                os.close(descriptor)

    def _do(self, job: Read, descriptor: int) -> None:
        try:
            job.read(descriptor)
        except OSError as error:
            raise WeightsError(f"{self.path / job.file} cannot be read: {error}") from error

    def _descriptor(self, file: str) -> int:
        try:
            return disk.open_plain(self.path / file)
        except OSError as error:
            raise WeightsError(f"{self.path / file} is missing or damaged: {error.strerror}") from error

    def _check_header(self, file: str) -> None:
        """What the file says of its tensors is what the manifest says of them."""
        if file in self._known:
            return
        where = self.path / file
        descriptor = self._descriptor(file)
        try:
            length, entries = header(descriptor, self.manifest.files[file].bytes)
            for tensor, piece in self._by_file[file]:
                entry = entries[piece.key]
                shape, dtype = [stop - start for start, stop in piece.box], DTYPES[tensor.dtype][0]
                if entry["shape"] != shape or entry["dtype"] != dtype:
                    raise WeightsError(
                        f"{where} holds {piece.key} as {entry['dtype']} {entry['shape']}; "
                        f"the manifest says {dtype} {shape}"
                    )
                if entry["data_offsets"][0] + length != piece.offset:
                    raise WeightsError(f"{where} holds {piece.key} at another byte than {piece.offset}")
        except (OSError, KeyError, TypeError, ValueError, IndexError, RecursionError) as error:
            if isinstance(error, WeightsError):
                raise
            raise WeightsError(f"{where} is missing or damaged: its header: {error}") from error
        finally:
            os.close(descriptor)
        self._known.add(file)


def latest(folder: Path, *, verify: bool = True) -> Path | None:
    """The newest checkpoint in ``folder`` whose every byte holds (sizes alone where not ``verify``), or None."""
    for entry in reversed(steps.committed(folder)):
        try:
            Checkpoint.open(entry.path, verify=verify)
        except WeightsError:
            continue
        return entry.path
    return None


def agree_latest(folder: Path, *, rank: int, group: Agreement, verify: bool = True) -> tuple[Path | None, list[str]]:
    """`latest`, with all ranks of ``group``: each reads its share of the files; and why newer ones were passed over.

    The same on every rank: a checkpoint that one rank cannot read is none for all.
    """
    passed: list[str] = []
    names = group.gather([entry.path.name for entry in steps.committed(folder)])
    for name in reversed(names[0]):
        trouble: str | None = None
        try:
            opened = Checkpoint.open(folder / name)
            damage = opened.damage(share=(rank, len(names))) if verify else []
            trouble = damage[0] if damage else None
        except WeightsError as error:
            trouble = str(error)
        rows = group.gather(trouble)
        found = list(itertools.dropwhile(lambda row: row is None, rows))
        if not found:
            return folder / name, passed
        passed.append(str(found[0]))
    return None, passed
