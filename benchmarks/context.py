"""Attention over sequences that two ranks share, beside one process: forward and backward, alternating.

    python benchmarks/context.py [--ranks 2] [--repeats 9] [--seqs 1024,2048,4096,8192] [--json FILE]

One sample, 8 query heads and 4 key heads of 64, fp32, one thread a rank. A line gives each way's median seconds and how
many times faster it is than one process with one thread (the median of ratios within a round). ``two threads`` is that
process with two: what the same cores do without any communication. ``cpu`` is the processor time of the busiest rank,
the least of all rounds: what is left of a machine's noise where others use it too.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from plait.comm.group import Group
from plait.comm.world import World
from plait.core.mesh import Mesh
from plait.models.attention import Attend
from plait.models.batch import Batch
from plait.parallel.context import CONTEXTS, context_attend, take

HEADS, KV_HEADS, WIDTH = 8, 4, 64
ALONE, TWO = "one process", "two threads"
WAYS = (ALONE, TWO, *CONTEXTS)
WARM = 2


def whole(seq: int) -> tuple[list[torch.Tensor], Batch]:
    """q, k, v and the gradient of the output of one sample."""
    generator = torch.Generator().manual_seed(seq)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    tensors = [torch.randn(1, seq, h, WIDTH, generator=generator).transpose(1, 2) for h in heads]
    tokens = torch.zeros(1, seq, dtype=torch.int64)
    return tensors, Batch(tokens_BT=tokens, targets_BT=tokens, sample_B=torch.zeros(1, dtype=torch.int64), step=0)


def _step(attend: Attend, tensors: list[torch.Tensor], batch: Batch) -> None:
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    torch.autograd.grad(attend(q, k, v, batch), (q, k, v), tensors[3])


def _runs(seq: int, world: World, group: Group) -> dict[str, Callable[[], None]]:
    tensors, batch = whole(seq)
    runs: dict[str, Callable[[], None]] = {}
    for context in CONTEXTS:
        part = take(batch, group.size, group.index, context)
        # In memory of their own, as a rank has them: [B, T, H, E] seen as [B, H, T, E].
        mine = [x.transpose(1, 2)[:, part.indices_T()].transpose(1, 2) for x in tensors]
        attend = context_attend(context, Attend(None), group, world.wire)
        runs[context] = lambda attend=attend, mine=mine, part=part: _step(attend, mine, part)  # type: ignore[misc]
    runs[ALONE] = runs[TWO] = lambda: _step(Attend(None), tensors, batch)
    return runs


def _seconds(way: str, run: Callable[[], None], group: Group) -> tuple[float, float]:
    """Wall and processor seconds, from the barrier to the end: of the slowest rank, and of the busiest."""
    wall = busy = 0.0
    group.barrier()
    if way not in (ALONE, TWO) or group.index == 0:
        torch.set_num_threads(2 if way == TWO else 1)
        begin, cpu = time.perf_counter(), time.process_time()
        run()
        wall, busy = time.perf_counter() - begin, time.process_time() - cpu
        torch.set_num_threads(1)
    most = group.all_reduce(torch.tensor([wall, busy], dtype=torch.float64), "max").wait()
    return float(most[0]), float(most[1])


def _rank(rank: int, ranks: int, port: int, repeats: int, seqs: list[int], path: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo"
    )
    world = World.connect(Mesh(cp=ranks), device=torch.device("cpu"), timeout=300.0)
    group = world.group("cp")
    rows: list[dict[str, Any]] = []
    for seq in seqs:
        runs = _runs(seq, world, group)
        rounds = []
        for repeat in range(repeats + WARM):
            order = WAYS if repeat % 2 else tuple(reversed(WAYS))
            rounds.append({way: _seconds(way, runs[way], group) for way in order})
        for way in WAYS:
            ratios = [one[ALONE][0] / one[way][0] for one in rounds[WARM:]]
            quarter = statistics.quantiles(ratios, n=4)
            seconds = statistics.median(one[way][0] for one in rounds[WARM:])
            rows.append(
                {
                    "seq": seq,
                    "way": way,
                    "seconds": seconds,
                    "ratio": statistics.median(ratios),
                    "q1": quarter[0],
                    "q3": quarter[2],
                    "cpu": min(one[way][1] for one in rounds[WARM:]),
                }
            )
    if rank == 0:
        Path(path).write_text(json.dumps(rows))
    world.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seqs", default="1024,2048,4096,8192")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seqs = [int(word) for word in options.seqs.split(",")]
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
        probe.close()
        path = str(Path(folder) / "rows.json")
        mp.spawn(_rank, args=(options.ranks, port, options.repeats, seqs, path), nprocs=options.ranks)
        rows = json.loads(Path(path).read_text())
    print(f"{'tokens':>7} {'way':12} {'seconds':>9} {'speed':>6} {'q1':>6} {'q3':>6} {'cpu':>8}")
    for row in rows:
        print(
            f"{row['seq']:7d} {row['way']:12} {row['seconds']:9.4f} {row['ratio']:6.2f} {row['q1']:6.2f} "
            f"{row['q3']:6.2f} {row['cpu']:8.4f}"
        )
    if options.json:
        options.json.write_text(json.dumps({"ranks": options.ranks, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
