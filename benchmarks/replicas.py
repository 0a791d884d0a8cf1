"""What a peer costs: replicas in memory on two hosts, each file on both, beside replicas on one host.

    python benchmarks/replicas.py [--megabytes 200] [--repeats 9]

Two ranks, ``--megabytes`` of fp32 state on each, a folder of memory files (``/dev/shm``) for both or one for each,
which makes them two hosts that send over gloo on the loopback; savers alternate in the same processes. ``cut``: each
rank has what the other has not (ZeRO, stages), so all of it is sent; ``copies``: both have the same (data parallel), so
nothing is. Per state and number of hosts, medians and quartiles: seconds that a step waits for (the copy into host
memory), seconds until the replica is committed, bytes that a rank writes and sends. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from plait.checkpoint.saver import Saver
from plait.checkpoint.spread import Hosts, Spread
from plait.checkpoint.state import Piece, Snapshot
from plait.comm.parcels import Parcels
from plait.core.mesh import Mesh
from plait.core.shard import full
from plait.train.exchange import Peers
from plait.train.launch import Worker, launch
from plait.train.replicas import memory_folder

RANKS, WIDTH = 2, 1024
HOSTS = {"one host": Hosts(of=(0, 0)), "two hosts": Hosts(of=(0, 1))}
STATES = ("cut", "copies")


class Counted:
    """`Parcels` that counts what it sends."""

    def __init__(self, parcels: Parcels) -> None:
        self._parcels = parcels
        self.bytes = 0

    def send(self, data: memoryview, to: int) -> Callable[[], None]:
        self.bytes += len(data)
        return self._parcels.send(data, to)

    def receive(self, out: memoryview, source: int) -> Callable[[], None]:
        return self._parcels.receive(out, source)


def state(kind: str, rank: int, rows: int) -> list[Piece]:
    """A weight and two moments of ``rows`` rows on each rank."""
    own = kind == "cut"
    found: list[Piece] = []
    for name in ("weights/w", "exp_avg/w", "exp_avg_sq/w"):
        values = torch.rand(rows, WIDTH, generator=torch.Generator().manual_seed(rank if own else 0))
        shape = (RANKS * rows if own else rows, WIDTH)
        box = ((rank * rows, (rank + 1) * rows), (0, WIDTH)) if own else full(shape)
        found.append(
            Piece(name=name, shape=shape, values=values, boxes=(box,), replicas=() if own else tuple(range(RANKS)))
        )
    return found


def measure(worker: Worker, memory: str, megabytes: int, repeats: int) -> None:
    """One rank; rank 0 prints."""
    world = worker.connect(Mesh(dp=RANKS))
    rank, rows = world.rank, megabytes * 1_000_000 // (3 * 4 * WIDTH)
    savers: dict[tuple[str, str], Saver] = {}
    links: dict[tuple[str, str], Counted] = {}
    pieces = {kind: state(kind, rank, rows) for kind in STATES}
    for kind in STATES:
        for name, hosts in HOSTS.items():
            key, folder = (kind, name), Path(memory) / f"{kind}-{hosts.count}-{hosts.of[rank]}"
            if hosts.count == 1:
                savers[key] = Saver(folder, rank=rank, group=Peers(world), keep=1)
                continue
            parcels = Parcels(world, 600.0)
            links[key] = Counted(parcels)
            spread = Spread(hosts=hosts, link=links[key])
            savers[key] = Saver(folder, rank=rank, group=Peers(world, parcels.everyone), keep=1, spread=spread)
    found: dict[tuple[str, str], list[dict[str, float]]] = {key: [] for key in savers}
    for turn in range(repeats + 1):  # the first gets its memory, and is not counted
        for key, saver in savers.items():
            world.group("dp").barrier()
            before = links[key].bytes if key in links else 0
            saver.save(Snapshot(step=turn, pieces=pieces[key[0]], scalars={}))
            (saved,) = saver.drain()
            if saved.error is not None:
                raise SystemExit(saved.error)
            row = {"stall": saved.copy, "replica": saved.write, "written": float(saved.bytes)}
            row["sent"] = float(links[key].bytes - before) if key in links else 0.0
            if turn:
                found[key].append(row)
    if rank == 0:
        report(found, megabytes)
    world.close()


def report(found: dict[tuple[str, str], list[dict[str, float]]], megabytes: int) -> None:
    """A line a state and number of hosts, then JSON."""
    lines: list[dict[str, Any]] = []
    for (kind, name), rows in found.items():
        line: dict[str, Any] = {"state": kind, "hosts": name, "megabytes": megabytes}
        for what in rows[0]:
            values = [row[what] for row in rows]
            line[what] = statistics.median(values)
            if what in ("stall", "replica"):
                low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
                line[f"{what}_quartiles"] = [low, high]
        lines.append(line)
        print(
            f"{kind:7s} {name:10s} stall {1e3 * line['stall']:6.0f} ms, committed after {1e3 * line['replica']:6.0f} ms"
            f" ({1e3 * line['replica_quartiles'][0]:.0f} to {1e3 * line['replica_quartiles'][1]:.0f}), "
            f"written {line['written'] / 1e6:6.1f} MB, sent {line['sent'] / 1e6:6.1f} MB a rank"
        )
    print(json.dumps({"rows": lines, "load_average": os.getloadavg()[0]}))


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    with memory_folder(True) as memory:
        assert memory is not None
        need = 24 * RANKS * arguments.megabytes * 1_000_000  # four savers, copies of each, two while one is written
        if shutil.disk_usage(memory).free < need:
            raise SystemExit(f"{memory.parent} has no room for {need / 1e9:.1f} GB: take fewer --megabytes")
        with tempfile.TemporaryDirectory() as private:
            os.chdir(private)
            args = [str(memory), arguments.megabytes, arguments.repeats]
            launch(measure, processes=RANKS, args=args, device="cpu", timeout=600.0)


if __name__ == "__main__":
    main()
