"""Blocks of tensors by byte range: where a strided block lies in a safetensors file, and how it is read in parts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from plait.checkpoint import disk

CHUNK = 8 << 20
"""Bytes that one thread reads at a time; also what a strided read holds beside its target."""
SPARSE = 16
"""A strided read takes the bytes between its runs with them, unless they are this many times what it needs..."""
FAR = 1 << 16
"""... and the runs lie further apart than this many bytes, which the disk would read ahead anyway."""


def header(descriptor: int, size: int) -> tuple[int, Mapping[str, Any]]:
    """Where the data begins, and the header of a safetensors file of ``size`` bytes."""
    prefix = bytearray(8)
    disk.read_into(descriptor, memoryview(prefix), 0)
    length = int.from_bytes(prefix, "little")
    if length > size - 8:
        raise ValueError(f"a header of {length} bytes does not fit into a file of {size}")
    text = bytearray(length)
    disk.read_into(descriptor, memoryview(text), 8)
    header = json.loads(text)
    if not isinstance(header, dict):
        raise ValueError("it is no object")
    return length + 8, header


@dataclass(frozen=True, kw_only=True)
class Read:
    """One block: ``out`` is a view of the target; its element (i, j) is element ``i * strides[0] + j * strides[1]``
    from byte ``offset`` on."""

    file: str
    offset: int
    strides: tuple[int, ...]
    out: torch.Tensor

    @property
    def span(self) -> int:
        """Bytes from the first element to behind the last."""
        last = sum((size - 1) * stride for size, stride in zip(self.out.shape, self.strides, strict=True))
        return (last + 1) * self.out.element_size()

    def read(self, descriptor: int) -> None:
        """Fill ``out``; OSError where the file cannot give it."""
        if self.span == self.out.nbytes and self.out.is_contiguous():
            disk.read_into(descriptor, _bytes_of(self.out), self.offset)
            return
        scratch = torch.empty(self.span, dtype=torch.uint8)
        disk.read_into(descriptor, _bytes_of(scratch), self.offset)
        values = scratch.view(self.out.dtype)
        self.out.copy_(values.as_strided(self.out.shape, self.strides))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def chunks(read: Read) -> Iterator[Read]:
    """``read`` in parts of at most `CHUNK` bytes of the file, and none that reads mostly what is not wanted."""
    dim = next((dim for dim, size in enumerate(read.out.shape) if size > 1), None)
    if dim is None:
        yield read
        return
    row = read.strides[dim] * read.out.element_size()
    sparse = read.span > SPARSE * read.out.nbytes and row > FAR
    if read.span <= CHUNK and not sparse:
        yield read
        return
    rows = 1 if sparse else max(1, CHUNK // row)
    for start in range(0, read.out.shape[dim], rows):
        out = read.out.narrow(dim, start, min(rows, read.out.shape[dim] - start))
        part = Read(file=read.file, offset=read.offset + start * row, strides=read.strides, out=out)
        yield from chunks(part)
