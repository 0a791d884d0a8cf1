"""Collectives of plait's shared-memory groups beside gloo's, alternating in the same processes.

    python benchmarks/comm.py [--ranks 2] [--repeats 15] [--json FILE]

Each line is the median of the pairwise ratios (gloo seconds / shared-memory seconds), with quartiles, and both medians.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from plait.comm.group import Group
from plait.comm.torch_group import TorchGroup
from plait.comm.world import World
from plait.core.mesh import Mesh

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather")


def _seconds(group: Group, operation: str, x: torch.Tensor, out: torch.Tensor) -> float:
    dist.barrier()
    begin = time.perf_counter()
    if operation == "all_reduce":
        group.all_reduce(x).wait()
    elif operation == "reduce_scatter":
        group.reduce_scatter(x, out=out[: x.numel() // group.size]).wait()
    else:
        group.all_gather(x[: x.numel() // group.size], out=out).wait()
    return time.perf_counter() - begin


def _rank(rank: int, ranks: int, port: int, repeats: int, path: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo"
    )
    cpu = torch.device("cpu")
    world = World.connect(Mesh(tp=ranks), device=cpu)
    shared = world.group("tp")
    gloo = TorchGroup("tp", tuple(range(ranks)), world.book, dist.new_group(), cpu)
    rows: list[dict[str, Any]] = []
    for nbytes in SIZES:
        x, out = torch.randn(nbytes // 4), torch.empty(nbytes // 4)
        for operation in OPERATIONS:
            pairs = []
            for repeat in range(repeats + 2):
                order = (shared, gloo) if repeat % 2 else (gloo, shared)
                pairs.append({id(group): _seconds(group, operation, x, out) for group in order})
            ours, theirs = ([pair[id(group)] for pair in pairs[2:]] for group in (shared, gloo))
            ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
            quarter = statistics.quantiles(ratios, n=4)
            rows.append(
                {
                    "operation": operation,
                    "bytes": nbytes,
                    "ratio": statistics.median(ratios),
                    "q1": quarter[0],
                    "q3": quarter[2],
                    "shared_s": statistics.median(ours),
                    "gloo_s": statistics.median(theirs),
                }
            )
    if rank == 0:
        Path(path).write_text(json.dumps(rows))
    world.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
        probe.close()
        path = str(Path(folder) / "rows.json")
        mp.spawn(_rank, args=(options.ranks, port, options.repeats, path), nprocs=options.ranks)
        rows = json.loads(Path(path).read_text())
    print(f"{'operation':16} {'bytes':>10} {'ratio':>6} {'q1':>6} {'q3':>6} {'shared':>10} {'gloo':>10}")
    for row in rows:
        print(
            f"{row['operation']:16} {row['bytes']:10d} {row['ratio']:6.2f} {row['q1']:6.2f} {row['q3']:6.2f} "
            f"{row['shared_s'] * 1e6:8.0f}us {row['gloo_s'] * 1e6:8.0f}us"
        )
    if options.json:
        options.json.write_text(json.dumps({"ranks": options.ranks, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
