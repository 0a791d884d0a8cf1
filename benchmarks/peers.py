"""plait beside PyTorch's own parallel parts (and DeepSpeed, Megatron-core where installed): same model, weights and
batches.

    python benchmarks/peers.py [--pairs 15] [--rows ddp,tp ...] [--json FILE] [--no-memory]

Machines are noisy: the same step varies by a factor of two within minutes. So both engines of a row live in the same
worker processes and take turns, step by step; a row's ratio is the median of the pairwise ratios (peer seconds /
plait seconds; above 1 plait is faster), printed with its quartiles. Peak memory is each engine's own, from runs that
hold that engine alone. Where a peer has several settings, the fastest in a short trial is the one compared with;
``least`` is the peak of the leanest of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_model import draw_batch, draw_weights
from engine import Engine
from live import resident, settle, storage_bytes
from peers_rows import CONFIG, ROWS, Row
from plait.comm.world import World
from plait.core.plan import Plan
from plait_engine import Plait

TRIAL_STEPS = 3
WARM_STEPS = 2


def _join(rank: int, ranks: int, port: int, plan: str) -> World:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo"
    )
    mesh = Plan.parse(plan).mesh(ranks)
    world = World.connect(mesh, device=torch.device("cpu"), timeout=300.0)
    if ranks == 1:
        dist.init_process_group("gloo")
    return world


def _timed(engine: Engine, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, float]:
    """(seconds of the slowest rank from a common start, loss)."""
    dist.barrier()
    begin = time.perf_counter()
    loss = engine.step(*batch)
    dist.barrier()
    return time.perf_counter() - begin, loss


def _agree(plait: float, peer: float, what: str) -> None:
    if not math.isclose(plait, peer, rel_tol=2e-4):
        raise RuntimeError(f"{what}: plait's loss {plait} and the peer's {peer} differ")


def _compare(rank: int, row_index: int, ranks: int, port: int, pairs: int, path: str) -> None:
    row = ROWS[row_index]
    world = _join(rank, ranks, port, row.plan)
    weights = draw_weights(CONFIG)
    plait: Engine = Plait(CONFIG, row.plan, world)
    plait.setup(rank, ranks, weights)
    peer = _fastest(row, rank, ranks, weights)
    ratios, ours, theirs = [], [], []
    for step in range(WARM_STEPS + pairs):
        batch = draw_batch(CONFIG, step)
        order = (plait, peer) if step % 2 else (peer, plait)
        seconds = {}
        losses = {}
        for engine in order:
            seconds[engine.name], losses[engine.name] = _timed(engine, batch)
        _agree(losses[plait.name], losses[peer.name], f"{row.name}, step {step}")
        if step >= WARM_STEPS:
            ours.append(seconds[plait.name])
            theirs.append(seconds[peer.name])
            ratios.append(theirs[-1] / ours[-1])
    if rank == 0:
        tokens = CONFIG.batch * CONFIG.seq
        quarter = statistics.quantiles(ratios, n=4)
        result = {
            "name": row.name,
            "plan": row.plan,
            "peer": peer.name,
            "ratio": statistics.median(ratios),
            "q1": quarter[0],
            "q3": quarter[2],
            "pairs": pairs,
            "plait_tokens_per_s": tokens / statistics.median(ours),
            "peer_tokens_per_s": tokens / statistics.median(theirs),
            "loss": losses[plait.name],
        }
        if isinstance(plait, Plait):
            result["where"] = _where(plait, draw_batch(CONFIG, 0), world)
        Path(path).write_text(json.dumps(result))
    elif isinstance(plait, Plait):
        _where(plait, draw_batch(CONFIG, 0), world)
    world.close()


def _fastest(row: Row, rank: int, ranks: int, weights: dict[str, torch.Tensor]) -> Engine:
    """The peer's fastest setting in a short trial (all ranks agree: the slowest rank's time counts)."""
    best: tuple[float, int] = (math.inf, 0)
    if len(row.peers) > 1:
        for index, make in enumerate(row.peers):
            engine = make()
            engine.setup(rank, ranks, weights)
            times = [_timed(engine, draw_batch(CONFIG, step))[0] for step in range(TRIAL_STEPS)]
            slowest = torch.tensor([min(times[1:])])
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            best = min(best, (slowest.item(), index))
            del engine
            gc.collect()
    engine = row.peers[best[1]]()
    engine.setup(rank, ranks, weights)
    return engine


def _where(engine: Plait, batch: tuple[torch.Tensor, torch.Tensor], world: World) -> dict[str, float]:
    """Seconds of one step of plait on rank 0: in compute spans, standing still for others, in the optimizer; bytes
    sent."""
    spans: list[tuple[str, float]] = []
    world.book.sink = lambda stream, kind, name, start, end, sent=0: spans.append((stream, end - start))
    world.book.ledger.clear()
    dist.barrier()
    begin = time.perf_counter()
    engine.step(*batch)
    total = time.perf_counter() - begin
    compute = sum(seconds for stream, seconds in spans if stream == "compute")
    comm = sum(seconds for stream, seconds in spans if stream == "comm")
    return {
        "step_s": total,
        "compute_with_its_communication_s": compute,
        "communication_s": comm,
        "outside_compute_s": total - compute,
        "bytes_sent": float(sum(world.book.ledger.by_axis().values())),
    }


def _memory(rank: int, row_index: int, which: int, ranks: int, port: int, path: str) -> None:
    """Bytes of an engine alone, plait (which -1) or a peer's setting: the peak resident ones, and at rest between
    steps those of tensors (training state), on the fullest rank."""
    row = ROWS[row_index]
    world = _join(rank, ranks, port, row.plan)
    engine = Plait(CONFIG, row.plan, world) if which < 0 else row.peers[which]()
    weights = draw_weights(CONFIG)
    engine.setup(rank, ranks, weights)
    del weights
    settle()
    # Setting up held the whole model's weights for a moment: the peak counts from here (proc(5), clear_refs 5).
    Path("/proc/self/clear_refs").write_text("5")
    for step in range(3):
        engine.step(*draw_batch(CONFIG, step))
    numbers = torch.tensor([resident("VmHWM"), storage_bytes()], dtype=torch.float64)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    if rank == 0:
        Path(path).write_text(json.dumps(dict(zip(("peak", "state"), numbers.tolist(), strict=True))))
    world.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _spawn(function: Callable[..., None], ranks: int, *args: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "result.json")
        mp.spawn(function, args=(*args[:2], ranks, _free_port(), *args[2:], path), nprocs=ranks)
        return json.loads(Path(path).read_text())


def _leave() -> None:
    """Ends a rank that has written its result: gloo's threads of a peer may abort an ordinary exit of the process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _memory_entry(rank: int, row_index: int, which: int, ranks: int, port: int, path: str) -> None:
    _memory(rank, row_index, which, ranks, port, path)
    _leave()


def _compare_entry(rank: int, row_index: int, pairs: int, ranks: int, port: int, path: str) -> None:
    _compare(rank, row_index, ranks, port, pairs, path)
    _leave()


def measure(index: int, pairs: int, memory: bool) -> dict[str, Any]:
    """One row of the table."""
    row = ROWS[index]
    result: dict[str, Any] = _spawn(_compare_entry, row.ranks, index, pairs)
    if row.ideal is not None:
        result["efficiency"] = result["ratio"]
        result["ideal"] = row.ideal
        result["of_ideal"] = result["ratio"] / row.ideal
    if memory:
        ours = _spawn(_memory_entry, row.ranks, index, -1)
        theirs = [_spawn(_memory_entry, row.ranks, index, which) for which in range(len(row.peers))]
        chosen = theirs[[make().name for make in row.peers].index(result["peer"])]
        result |= {"plait_peak_bytes": ours["peak"], "plait_state_bytes": ours["state"]}
        result |= {"peer_peak_bytes": chosen["peak"], "peer_state_bytes": chosen["state"]}
        result["peer_least_peak_bytes"] = min(one["peak"] for one in theirs)
    return result


def _machine() -> dict[str, Any]:
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "?",
    )
    return {"cores": os.cpu_count(), "cpu": model, "python": platform.python_version(), "torch": torch.__version__}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for people."""
    lines = [
        f"{'row':20} {'plan':38} {'ratio':>6} {'q1':>6} {'q3':>6} {'plait tok/s':>12} {'peer tok/s':>11} "
        f"{'MB plait':>9} {'peer':>6} {'least':>6}  peer's setting"
    ]
    for row in rows:
        keys = ("plait_peak_bytes", "peer_peak_bytes", "peer_least_peak_bytes")
        memory = [f"{row[key] / 2**20:.0f}" if key in row else "-" for key in keys]
        lines.append(
            f"{row['name']:20} {row['plan']:38} {row['ratio']:6.3f} {row['q1']:6.3f} {row['q3']:6.3f} "
            f"{row['plait_tokens_per_s']:12.0f} {row['peer_tokens_per_s']:11.0f} {memory[0]:>9} {memory[1]:>6} "
            f"{memory[2]:>6}  {row['peer']}"
        )
    peers = [row["ratio"] for row in rows if "ideal" not in row and row["name"] != "one-thread"]
    if peers:
        lines.append(f"geometric mean over the peers: {statistics.geometric_mean(peers):.3f}")
    for row in rows:
        if "ideal" in row:
            lines.append(
                f"{row['name']}: {row['ratio']:.3f} of one process with 2 threads, {row['of_ideal']:.3f} of the ideal"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--rows", default=",".join(row.name for row in ROWS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no-memory", action="store_true")
    options = parser.parse_args()
    names = [row.name for row in ROWS]
    rows = []
    for name in options.rows.split(","):
        if name not in names:
            parser.error(f"no row {name!r}; there are {', '.join(names)}")
        rows.append(measure(names.index(name), options.pairs, not options.no_memory))
        print(table(rows[-1:]).splitlines()[1], flush=True)
    print(table(rows))
    if options.json:
        peers = [row["ratio"] for row in rows if "ideal" not in row and row["name"] != "one-thread"]
        whole = {
            "machine": _machine(),
            "rows": rows,
            "geometric_mean": statistics.geometric_mean(peers) if peers else None,
        }
        options.json.write_text(json.dumps(whole, indent=1))


if __name__ == "__main__":
    main()
