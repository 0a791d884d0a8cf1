"""Runs engines from the same weights on the same batches beside one process, and compares losses and gradient norms."""

from __future__ import annotations

import argparse
import math
import os
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench_model import BenchConfig, draw_batch, draw_weights
from engine import Engine

SMALL = BenchConfig(hidden=128, layers=4, heads=4, kv_heads=2, ffn=352, vocab=512, seq=64)


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What the self-check measured for one engine, on rank 0."""

    name: str
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    tokens_per_s: float


def check_worker(
    rank: int,
    world_size: int,
    port: int,
    build: Callable[[BenchConfig], list[Engine]],
    config: BenchConfig,
    words: list[str],
    steps: int,
    results: Any,
) -> None:
    """One rank of a check: runs the engines of this world size one after the other; rank 0 puts a ``Checked`` for
    each.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    weights = draw_weights(config)
    todo = [e for e in build(config) if e.ranks == world_size or (e.ranks == 1 and world_size == 2)]
    while todo:
        engine = todo.pop(0)  # dropped before the next one is built: no two models at a time
        if words and engine.ranks > 1 and not any(word in engine.name for word in words):
            continue
        engine.setup(rank, world_size, weights)
        losses, norms, seconds = [], [], []
        for step in range(steps):
            batch = draw_batch(config, step)
            dist.barrier()
            start = time.perf_counter()
            losses.append(engine.step(*batch))
            seconds.append(time.perf_counter() - start)
            norms.append(engine.grad_norm)
        if rank == 0:
            speed = config.tokens / statistics.median(seconds[1:] or seconds)
            results.put(Checked(name=engine.name, losses=tuple(losses), norms=tuple(norms), tokens_per_s=speed))
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def apart(row: Checked, expected: Checked) -> float:
    """Largest difference of losses, and relative difference of gradient norms; nan, which fails, where a norm is
    missing.
    """
    losses = [abs(a - b) for a, b in zip(row.losses, expected.losses, strict=True)]
    norms = [abs(a - b) / b for a, b in zip(row.norms, expected.norms, strict=True)]
    return math.nan if any(map(math.isnan, norms)) else max(losses + norms)


def check(
    build: Callable[[BenchConfig], list[Engine]],
    config: BenchConfig,
    words: list[str],
    steps: int,
    tolerance: float = 1e-4,
) -> int:
    """Runs every engine from the same weights on the same batches beside one process and prints a line for each.

    Returns 1 if a loss or a gradient norm is off by more than ``tolerance``: AdamW hides a wrong gradient scale, the
    norm does not.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    context, good = mp.get_context("spawn"), True
    expected: Checked | None = None
    for world_size in (2, 4):
        results = context.SimpleQueue()
        arguments = (world_size, free_port(), build, config, words, steps, results)
        ranks = mp.spawn(check_worker, arguments, nprocs=world_size, join=False)
        done = False
        while not done or not results.empty():
            done = done or ranks.join(timeout=0.2)
            while not results.empty():
                row: Checked = results.get()
                expected = expected or row
                difference = apart(row, expected)
                good = good and difference <= tolerance
                shown = " ".join(f"{loss:.6f}/{norm:.5f}" for loss, norm in zip(row.losses, row.norms, strict=True))
                print(f"{row.name:46s} {shown}  apart {difference:.1e} {row.tokens_per_s:6.0f} tokens/s", flush=True)
    print(f"losses and gradient norms within {tolerance:.0e} of one process: {'yes' if good else 'NO'}")
    return int(not good)


def main(build: Callable[[BenchConfig], list[Engine]], about: str | None) -> int:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", required=True, help="run every engine beside one process and compare losses"
    )
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="WORD", help="engines whose name holds one of these words"
    )
    parser.add_argument("--small", action="store_true", help="a model of a few seconds: checks values, not speed")
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    return check(build, SMALL if arguments.small else BenchConfig(), arguments.only, arguments.steps)
