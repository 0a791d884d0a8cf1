"""The ranks of `predicted.py`: they build plans in turn, wait for a quiet moment, and step."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.profiler import ProfilerActivity, profile

from live import storage_bytes
from plait.comm.world import World
from plait.core.plan import Plan
from plait.models.batch import Batch
from plait.models.config import PRESETS
from plait.models.decoder import Decoder
from plait.models.init import InitSource
from plait.parallel.apply import Parallel, parallelize
from plait.train.launch import Worker

MODEL = replace(PRESETS["bench"], num_layers=4, vocab_size=4096)
SEQ, BATCH = 256, 8
CALM = 0.15
"""Cores that other programs may take while a step waits to begin."""


def run_rank(worker: Worker, plans: Sequence[str], steps: int, patience: float, with_memory: bool, path: str) -> None:
    """One rank: every plan in turn is built, warmed up, stepped, measured, and left.

    A step waits up to ``patience`` seconds for other programs to be quiet. ``with_memory``: one more step tells bytes.
    """
    store, rank, size = next(iter(rendezvous("env://"))) if worker.place.world_size > 1 else (None, 0, 1)
    rows = []
    for number, text in enumerate(plans):
        plan = Plan.parse(text).resolve(size)
        _settle()
        before = (_status("RssAnon"), storage_bytes())
        cpu, own = torch.device("cpu"), None
        if store is None:
            world = World.alone()
        else:
            own = PrefixStore(str(number), store)
            world = World.connect(plan.mesh(size), device=cpu, store=own, rank=rank)
        rows.append(_measure(world, own, plan, steps, patience, before if with_memory else None))
        world.close()
        gc.collect()
    if rank == 0:
        Path(path).write_text(json.dumps(rows), encoding="utf-8")


def _measure(
    world: World, store: Store | None, plan: Plan, steps: int, patience: float, before: tuple[int, int] | None
) -> dict[str, Any]:
    with torch.device("meta"):
        model = Decoder(MODEL)
    parallel = parallelize(model, plan, world, weights=InitSource(MODEL, 0))
    decay, rest = parallel.zero.optimizer_groups()
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-4, fused=True)
    everyone = world.group("pp", "dp", "cp", "tp")
    spans: list[tuple[str, float]] = []
    world.book.sink = lambda stream, kind, name, start, end, sent=0: spans.append((stream, end - start))
    _step(parallel, optimizer, 0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here (proc(5))
    taken = []
    for step in range(1, steps + 1):
        _begin_in_calm(f"step {step}", world.rank, store, patience)
        everyone.barrier()
        spans.clear()
        busy, own, begin = _busy(), _own(), time.perf_counter()
        _step(parallel, optimizer, step)
        everyone.barrier()
        seconds = time.perf_counter() - begin
        shares = {kind: sum(took for stream, took in spans if stream == kind) for kind in ("compute", "comm")}
        used = torch.tensor([_own() - own], dtype=torch.float64)
        mine = float(everyone.all_reduce(used).wait())
        taken.append((seconds, max(0.0, (_busy() - busy - mine) / seconds), shares))
    if before is None:
        return {"steps": taken}
    resident = _status("VmHWM") - (_status("VmRSS") - _status("RssAnon")) - before[0]
    allocated = _allocated(partial(_step, parallel, optimizer, steps + 1)) - before[1]
    most = everyone.all_reduce(torch.tensor([allocated, resident], dtype=torch.float64), "max").wait().tolist()
    return {"steps": taken, "memory": most[0], "resident": most[1]}


def _allocated(step: Callable[[], object]) -> int:
    """Peak bytes of tensors in a step: those that are there before it, and the most that torch allocates beyond."""
    held = storage_bytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as spans:
        step()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        spans.export_chrome_trace(str(file))
        events = json.loads(file.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    # The total counts what was allocated since the profiler began, and not yet freed.
    totals = [event["args"]["Total Allocated"] for event in events if event.get("name") == "[memory]"]
    return held + max(totals, default=0)


def _step(parallel: Parallel, optimizer: torch.optim.Optimizer, step: int) -> None:
    """What `plait.train.step` does, on tokens drawn here."""
    plan, world = parallel.plan, parallel.world
    assert plan.dp is not None
    generator = torch.Generator().manual_seed(step)
    tokens_BT = torch.randint(MODEL.vocab_size, (BATCH, SEQ + 1), generator=generator)
    share = BATCH // plan.dp
    first = world.at["dp"] * share
    batches = [
        Batch(
            tokens_BT=tokens_BT[at : at + plan.micro, :-1],
            targets_BT=tokens_BT[at : at + plan.micro, 1:],
            sample_B=torch.arange(at, at + plan.micro),
            step=step,
        )
        for at in range(first, first + share, plan.micro)
    ]
    parallel.forward_backward(batches, BATCH * SEQ)
    norm = parallel.share_loss(torch.zeros(()), parallel.zero.square_norm())[1].sqrt().item()
    if norm > 1.0:
        parallel.zero.scale_gradients(1.0 / norm)
    optimizer.step()
    parallel.zero.publish()


def _begin_in_calm(key: str, rank: int, store: Store | None, patience: float) -> None:
    """Rank 0 waits for a quiet machine, the others for its word: they must not spin meanwhile."""
    if rank == 0:
        _wait_for_calm(patience)
        if store is not None:
            store.set(key, "go")
    elif store is not None:
        store.wait([key])


def _wait_for_calm(patience: float) -> None:
    deadline = time.perf_counter() + patience
    while time.perf_counter() < deadline:
        busy, own, begin = _busy(), _own(), time.perf_counter()
        time.sleep(0.2)
        if (_busy() - busy - (_own() - own)) / (time.perf_counter() - begin) < CALM:
            return


def _settle() -> None:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def _status(what: str) -> int:
    """Bytes of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{what}:"))


def _busy() -> float:
    """Seconds that all cores of this machine have worked."""
    words = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    idle = int(words[3]) + int(words[4])
    return (sum(map(int, words[:8])) - idle) / os.sysconf("SC_CLK_TCK")


def _own() -> float:
    times = os.times()
    return times.user + times.system
