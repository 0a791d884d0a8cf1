"""Checkpoints of plait beside torch.distributed.checkpoint and the raw disk, alternating in the same processes.

    python benchmarks/checkpoint.py [--ranks 2] [--megabytes 400] [--repeats 9] [--folder DIR] [--json FILE]

The state is a transformer's weights and two moments, in fp32, each tensor cut by rows over the ranks. Every line is the
median of pairwise ratios (the other's seconds / plait's), with quartiles, and both medians:

* save: until the checkpoint is on the disk. ``raw``: the same bytes with write and fsync, a file a rank, nothing else.
* stall: what the caller waits for when the save goes on in the background. ``copy``: the state copied tensor by tensor
  into memory that is there already; the first save, which has to get its memory, is a line of its own.
* load: into tensors that are there, from the page cache (warm) and from the disk (cold). ``raw``: the same bytes read.
* other: the same under another layout, each tensor cut by columns (two ranks and more).
* sums: the seconds of the sums alone, on one core, as a share of the save's.

DCP runs with its files synced, once with its defaults and once (dcp+) with as many threads as there are cores to a
rank. Every save goes to new files; what is there of the save before is deleted outside the measure. Processor time is
rank 0's, its threads and what a stall leaves to them included.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from plait.checkpoint.disk import block_sums, sync_folder
from plait.checkpoint.reader import Checkpoint, Request, latest
from plait.checkpoint.saver import Saver
from plait.checkpoint.state import Piece, Snapshot
from plait.checkpoint.steps import committed
from plait.core.shard import Box, full, split

WIDTH = 768
KINDS = ("weights", "exp_avg", "exp_avg_sq")
MODES = ("save", "stall", "warm", "cold", "other")


class Ranks:
    """JSON over gloo, in a group of its own."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")

    def gather(self, value: Any) -> list[Any]:
        content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(sizes, torch.tensor([content.numel()]), group=self._group)
        widest = max(int(size) for size in sizes)
        rows = [torch.zeros(widest, dtype=torch.uint8) for _ in sizes]
        dist.all_gather(rows, torch.cat([content, content.new_zeros(widest - content.numel())]), group=self._group)
        return [json.loads(bytes(row[: int(size)].tolist())) for row, size in zip(rows, sizes, strict=True)]


def _shapes(megabytes: int) -> dict[str, tuple[int, ...]]:
    """A decoder's tensors, as many layers as the size asks for."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (8192, WIDTH)}
    layer = {"norm": (WIDTH,), "qkv": (3 * WIDTH, WIDTH), "out": (WIDTH, WIDTH), "up": (4 * WIDTH, WIDTH)}
    layer["down"] = (WIDTH, 4 * WIDTH)
    number = 0
    while 12 * sum(torch.Size(shape).numel() for shape in shapes.values()) < megabytes * 1_000_000:
        shapes |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
        number += 1
    return {f"{kind}/{name}": shape for kind in KINDS for name, shape in shapes.items()}


def _box(shape: tuple[int, ...], dim: int, ranks: int, rank: int) -> Box:
    box = list(full(shape))
    dim = min(dim, len(shape) - 1)
    box[dim] = split(shape[dim], ranks, rank)
    return tuple(box)


class Sides:
    """The three sides on one rank: each can save, stall, and load what it has saved."""

    def __init__(self, folder: Path, rank: int, ranks: int, megabytes: int) -> None:
        self.folder, self.rank, self.ranks = folder, rank, ranks
        self.shapes = _shapes(megabytes)
        self.boxes = {name: _box(shape, 0, ranks, rank) for name, shape in self.shapes.items()}
        self.state = {
            name: torch.rand([stop - start for start, stop in box], generator=torch.Generator().manual_seed(rank))
            for name, box in self.boxes.items()
        }
        self.nbytes = sum(tensor.nbytes for tensor in self.state.values())
        self.space = {name: torch.ones_like(tensor) for name, tensor in self.state.items()}
        self.flat = bytearray(self.nbytes)
        self.other = {name: _box(shape, 1, ranks, rank) for name, shape in self.shapes.items()}
        self.columns = {name: torch.zeros([stop - start for start, stop in box]) for name, box in self.other.items()}
        self.mesh = init_device_mesh("cpu", (ranks,))
        self.group = Ranks()
        self.savers = {
            kind: Saver(folder / kind, rank=rank, group=self.group, keep=100, asynchronous=kind == "stall")
            for kind in ("save", "stall")
        }
        self.step = 0
        self.dcp_group = dist.new_group(backend="gloo")

    def snapshot(self) -> Snapshot:
        self.step += 1
        pieces = [
            Piece(name=name, shape=self.shapes[name], values=tensor, boxes=(self.boxes[name],))
            for name, tensor in self.state.items()
        ]
        return Snapshot(step=self.step, pieces=pieces, scalars={"step": self.step})

    def dtensors(self, tensors: dict[str, torch.Tensor], dim: int) -> dict[str, Any]:
        return {
            name: DTensor.from_local(
                tensor,
                self.mesh,
                [Shard(min(dim, tensor.ndim - 1))],
                run_check=False,
                shape=torch.Size(self.shapes[name]),
                stride=torch.empty(self.shapes[name], device="meta").stride(),
            )
            for name, tensor in tensors.items()
        }

    def plait(self, mode: str) -> Callable[[], object]:
        if mode == "save":
            snapshot = self.snapshot()
            return lambda: (self.savers["save"].save(snapshot), _well(self.savers["save"]))
        if mode == "stall":
            snapshot = self.snapshot()
            return lambda: self.savers["stall"].save(snapshot)
        boxes, into = (self.other, self.columns) if mode == "other" else (self.boxes, self.space)

        def load() -> None:
            path = latest(self.folder / "save", verify=False)
            assert path is not None
            Checkpoint.open(path).load([Request(name=name, boxes=[boxes[name]], out=out) for name, out in into.items()])

        return load

    def dcp_folder(self, side: str, threads: int) -> Path:
        return self.folder / f"dcp-{threads if side == 'dcp+' else 1}"

    def dcp(self, mode: str, threads: int) -> Callable[[], object]:
        where = self.folder / f"dcp-{threads}"
        if mode in ("save", "stall"):
            state = self.dtensors(self.state, 0)
            writer = dcp.FileSystemWriter(where / mode, thread_count=threads)
            if mode == "save":
                return lambda: dcp.save(state, storage_writer=writer)
            return lambda: setattr(
                self, "future", dcp.async_save(state, storage_writer=writer, process_group=self.dcp_group)
            )
        state = self.dtensors(self.columns, 1) if mode == "other" else self.dtensors(self.space, 0)
        return lambda: dcp.load(state, storage_reader=dcp.FileSystemReader(where / "save"))

    def work(self, side: str, mode: str, threads: int) -> Callable[[], object]:
        """What is measured: ``mode`` of ``side``."""
        if side == "plait":
            return self.plait(mode)
        return self.raw(mode) if side == "raw" else self.dcp(mode, threads if side == "dcp+" else 1)

    def raw(self, mode: str) -> Callable[[], object]:
        path = self.folder / f"raw-{self.rank}"
        if mode == "stall":
            return lambda: [self.space[name].copy_(tensor) for name, tensor in self.state.items()]
        if mode == "save":
            return lambda: _write(path, self.flat)
        return lambda: _read(path, self.flat)

    def clear(self, side: str, mode: str, threads: int) -> None:
        """Delete what ``side`` wrote before in this mode."""
        if side == "plait":
            for entry in committed(self.folder / mode):
                shutil.rmtree(entry.path)
        elif side.startswith("dcp"):
            shutil.rmtree(self.dcp_folder(side, threads) / mode, ignore_errors=True)
        elif mode == "save":
            for path in self.folder.glob("raw-*"):
                path.unlink()

    def settle(self, side: str) -> None:
        """End what a stall has left under way."""
        if side == "plait":
            _well(self.savers["stall"])
        elif side.startswith("dcp"):
            self.future.result()


def _well(saver: Saver) -> None:
    for saved in saver.drain():
        if saved.error is not None:
            raise SystemExit(f"plait did not save: {saved.error}")


def _write(path: Path, content: bytearray) -> None:
    with path.open("wb", buffering=0) as file:
        view = memoryview(content)
        while view:
            view = view[file.write(view[: 16 << 20]) :]
        os.fsync(file.fileno())


def _read(path: Path, content: bytearray) -> None:
    with path.open("rb", buffering=0) as file:
        view = memoryview(content)
        while view:
            view = view[file.readinto(view[: 16 << 20]) :]


def _evict(folder: Path) -> None:
    """Take the files out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _same(sides: Sides, mode: str) -> None:
    """What was loaded by the rows is what was saved; nothing is left over from another side."""
    if mode in ("warm", "cold"):
        for name, tensor in sides.state.items():
            if not torch.equal(tensor, sides.space[name]):
                raise SystemExit(f"{name} came back otherwise")
            sides.space[name].zero_()


def _rank(rank: int, ranks: int, port: int, options: argparse.Namespace, folder: str) -> None:
    warnings.simplefilter("ignore")
    cores = max(1, (os.cpu_count() or 1) // ranks)
    torch.set_num_threads(cores)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    sides = Sides(Path(folder), rank, ranks, options.megabytes)
    names = ["plait", "dcp", "raw"] + (["dcp+"] if cores > 1 else [])
    modes = [mode for mode in options.modes or MODES if mode != "other" or ranks > 1]
    seconds: dict[str, dict[str, list[float]]] = {mode: {name: [] for name in names} for mode in modes}
    processor: dict[str, dict[str, list[float]]] = {mode: {name: [] for name in names} for mode in modes}
    first: dict[str, float] = {}
    for repeat in range(options.repeats + 1):
        for mode in modes:
            for name in names if repeat % 2 else names[::-1]:
                if rank == 0 and mode in ("save", "stall"):
                    sides.clear(name, mode, cores)
                    sync_folder(Path(folder))
                if mode in ("warm", "other"):
                    sides.work(name, mode, cores)()  # what wrote past the page cache is brought into it
                if rank == 0 and mode == "cold":
                    _evict(Path(folder))
                dist.barrier()
                work = sides.work(name, mode, cores)
                dist.barrier()
                begin, used = time.perf_counter(), time.process_time()
                work()
                if mode != "stall":
                    dist.barrier()
                spent = time.perf_counter() - begin
                if mode == "stall" and name != "raw":
                    sides.settle(name)
                used = time.process_time() - used
                dist.barrier()
                if repeat:
                    seconds[mode][name].append(spent)
                    processor[mode][name].append(used)
                elif mode == "stall":
                    first[name] = spent
                if name != "raw":
                    _same(sides, mode)
    begin = time.perf_counter()
    block_sums(memoryview(sides.flat))
    sums = time.perf_counter() - begin
    if rank == 0:
        row = {"seconds": seconds, "processor": processor, "first": first, "sums": sums, "bytes": sides.nbytes * ranks}
        (Path(folder) / "rows.json").write_text(json.dumps(row))
    dist.barrier()
    dist.destroy_process_group()


def _lines(found: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for mode, sides in found["seconds"].items():
        for name, theirs in sides.items():
            # The disk's own speed says nothing about column cuts, nor the memory's about a first save.
            if name == "plait" or (mode, name) == ("other", "raw"):
                continue
            ratios = [b / a for a, b in zip(sides["plait"], theirs, strict=True)]
            low, _, high = statistics.quantiles(ratios, n=4)
            rows.append(
                {
                    "what": mode,
                    "beside": "copy" if (mode, name) == ("stall", "raw") else name,
                    "ratio": statistics.median(ratios),
                    "q1": low,
                    "q3": high,
                    "plait_s": statistics.median(sides["plait"]),
                    "other_s": statistics.median(theirs),
                    "plait_cpu_s": statistics.median(found["processor"][mode]["plait"]),
                    "other_cpu_s": statistics.median(found["processor"][mode][name]),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--modes", nargs="+", choices=MODES, help="what to measure; a load needs save (default: all)")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary one in it is used")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    folder = tempfile.mkdtemp(prefix="plait-bench-", dir=options.folder)
    try:
        mp.spawn(_rank, args=(options.ranks, port, options, folder), nprocs=options.ranks)
        found = json.loads((Path(folder) / "rows.json").read_text())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows = _lines(found)
    gigabytes = found["bytes"] / 1e9
    print(f"{options.ranks} ranks, {gigabytes:.3f} GB, {options.repeats} repeats")
    heads = ("ratio", "q1", "q3", "plait", "other", "plait", "other", "plait", "other")
    widths = (6, 6, 6, 9, 9, 6, 6, 7, 7)
    print(" " * 34 + "      seconds           GB/s      processor")
    print("what   beside " + " ".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True)))
    for row in rows:
        rates = f"{gigabytes / row['plait_s']:6.2f} {gigabytes / row['other_s']:6.2f}"
        print(
            f"{row['what']:6} {row['beside']:6} {row['ratio']:6.2f} {row['q1']:6.2f} {row['q3']:6.2f} "
            f"{row['plait_s'] * 1e3:7.1f}ms {row['other_s'] * 1e3:7.1f}ms {rates} "
            f"{row['plait_cpu_s'] * 1e3:5.0f}ms {row['other_cpu_s'] * 1e3:5.0f}ms"
        )
    if "stall" in found["seconds"]:
        firsts = ", ".join(f"{name} {spent * 1e3:.1f} ms" for name, spent in found["first"].items())
        print(f"stall of the first save: {firsts}")
    if "save" in found["seconds"]:
        share = found["sums"] / statistics.median(found["seconds"]["save"]["plait"])
        print(f"sums of a rank's bytes alone: {found['sums'] * 1e3:.1f} ms, {share:.0%} of the save, beside it")
    if options.json:
        options.json.write_text(json.dumps({"ranks": options.ranks, "rows": rows, **found}, indent=1))


if __name__ == "__main__":
    main()
