"""What a process holds: resident bytes as the kernel counts them, and bytes of the tensors that are alive."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import torch


def settle() -> None:
    """Frees what can be freed, and gives it back to the kernel (glibc keeps freed blocks otherwise)."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def resident(what: str = "VmRSS") -> int:
    """Bytes of ``VmRSS`` (now), ``VmHWM`` (peak) or ``RssAnon`` (now, without files and shared memory); proc(5)."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(f"{what}:"))


def storage_bytes() -> int:
    """Bytes of the storages of all plain tensors that Python holds, and of their gradients, each storage once.

    Memory that is shared with other processes (the rings of a transport) is not counted.
    """
    gc.collect()
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        # By type, not isinstance: a proxy or a DTensor has no storage of its own.
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.device.type == "cpu":
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if type(tensor) in (torch.Tensor, torch.nn.Parameter):
                    storage = tensor.untyped_storage()
                    found[storage.data_ptr()] = storage.nbytes()
    shared = _shared_mappings()
    return sum(size for at, size in found.items() if not any(begin <= at < end for begin, end in shared))


def _shared_mappings() -> list[tuple[int, int]]:
    """(begin, end) of this process' shared mappings (proc(5), maps)."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [words[0].split("-") for words in lines if words[1].endswith("s")]
    return [(int(begin, 16), int(end, 16)) for begin, end in spans]
