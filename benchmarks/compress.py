"""Gradient compression on the default task: bytes on the wire, loss after 200 steps, and time, beside none.

    python benchmarks/compress.py [--steps 200] [--seeds 3] [--ranks 2] [--json FILE]

Runs ``plait train`` for each row and seed, on dp=2 and one thread a rank, and reads its ``metrics.jsonl``: bytes are
those a rank sends over the data axes in a step (the ledger's), ``loss`` the mean of the last 20 training losses,
``held out`` the loss on the held-out samples after the last step; means over seeds, and how far seeds lie apart. Step
times are medians; seeds alternate between rows.

Then a synchronous parameter server (rank 0 sums all gradients, updates, sends the weights to all) beside an all-reduce
with the same update on every rank, in the same processes, alternating: time of the exchange and of the whole step, and
the bytes that the busiest rank sends and receives. ``apart``: the largest difference of the weights afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

from plait import PRESETS, Batch, Decoder, InitSource
from plait.comm.world import World
from plait.core.mesh import Mesh
from plait.models.init import initialise

ROWS = (
    {"compress": "none"},
    {"compress": "half"},
    {"compress": "half", "zero": 1},
    {"compress": "topk:0.1"},
    {"compress": "topk:0.01"},
    {"compress": "powersgd:4"},
    {"compress": "powersgd:1"},
)
"""Keys of the plan, on two data ranks."""
LAST = 20
TRANSPORTS = ("auto", "gloo")


def train(row: dict[str, Any], steps: int, seed: int) -> dict[str, float]:
    """One run of ``plait train``: loss, held_out, bytes, seconds."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        settings = {f"plan.{key}": json.dumps(value) for key, value in row.items()} | {
            "plan.tp": 1,
            "plan.pp": 1,
            "plan.dp": 2,
            "train.steps": steps,
            "train.eval_every": steps,
            "train.seed": seed,
            "run.threads": 1,
            "run.dir": json.dumps(str(run)),
        }
        sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        subprocess.run([sys.executable, "-m", "plait", "train", *sets], check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "loss": statistics.mean(line["loss"] for line in lines[-LAST:]),
        "held_out": lines[-1]["eval_loss"],
        "bytes": statistics.median(line["comm_bytes"]["dp"] for line in lines) / 2,
        "seconds": statistics.median(line["step_time_s"] for line in lines[3:]),
    }


def compression(steps: int, seeds: int) -> list[dict[str, Any]]:
    """The table of compressions, printed as it is made."""
    runs = [[train(row, steps, seed) for row in ROWS] for seed in range(seeds)]
    none = [seed_runs[0]["bytes"] for seed_runs in runs]
    print(
        f"{'plan':22} {'bytes/step':>11} {'of none':>8} {'loss':>7} {'held out':>9} {'seeds apart':>12} {'ms/step':>8}"
    )
    table = []
    for index, row in enumerate(ROWS):
        mine = [seed_runs[index] for seed_runs in runs]
        held_out = [run["held_out"] for run in mine]
        line = {
            "plan": " ".join(f"{key}={value}" for key, value in row.items()),
            "bytes": mine[0]["bytes"],
            "share": mine[0]["bytes"] / none[0],
            "loss": statistics.mean(run["loss"] for run in mine),
            "held_out": statistics.mean(held_out),
            "apart": max(held_out) - min(held_out),
            "seconds": statistics.median(run["seconds"] for run in mine),
        }
        table.append(line)
        print(
            f"{line['plan']:22} {line['bytes']:11.0f} {line['share']:8.3f} {line['loss']:7.3f} {line['held_out']:9.3f} "
            f"{line['apart']:7.3f} {line['seconds'] * 1e3:8.1f}",
            flush=True,
        )
    return table


class Replica:
    """A plain model whose weights and gradients are flat, and AdamW over them."""

    def __init__(self) -> None:
        config = PRESETS["tiny"]
        self.config = config
        self.model = Decoder(config)
        initialise(self.model, InitSource(config, 0))
        parameters = list(self.model.parameters())
        self.weights = torch.cat([one.detach().flatten() for one in parameters])
        self.grads = torch.zeros_like(self.weights)
        begin = 0
        for one in parameters:
            end = begin + one.numel()
            one.data, one.grad = self.weights[begin:end].view_as(one), self.grads[begin:end].view_as(one)
            begin = end
        flat = torch.nn.Parameter(self.weights)
        flat.grad = self.grads
        # eps and rate as small steps need them: with 1e-8 and 1e-3 training itself amplifies the rounding of sums.
        self.optimizer = torch.optim.AdamW([flat], lr=1e-4, eps=1e-4, fused=True)

    def backward(self, step: int, rank: int, samples: int, seq: int = 128) -> None:
        """The gradients of this rank's samples."""
        generator = torch.Generator().manual_seed(step * 1000 + rank)
        tokens = torch.randint(self.config.vocab_size, (samples, seq + 1), generator=generator)
        batch = Batch(
            tokens_BT=tokens[:, :-1].contiguous(),
            targets_BT=tokens[:, 1:].contiguous(),
            sample_B=torch.arange(samples),
            step=step,
        )
        self.grads.zero_()
        (self.model.loss(self.model(None, batch), batch.targets_BT.flatten()) / (samples * seq)).backward()


def by_all_reduce(world: World, replica: Replica) -> int:
    """Sum the gradients on all ranks, update on all ranks; returns the bytes this rank sends and receives."""
    world.group("dp").all_reduce(replica.grads).wait()
    replica.optimizer.step()
    size = world.mesh.world_size
    return 2 * 2 * (size - 1) * replica.grads.nbytes // size


def by_server(world: World, replica: Replica) -> int:
    """Rank 0 sums and updates, and sends the weights; returns the bytes this rank sends and receives."""
    others = range(1, world.mesh.world_size)
    if world.rank == 0:
        arrived = [torch.empty_like(replica.grads) for _ in others]
        for pending in [world.wire.recv(out, source) for out, source in zip(arrived, others, strict=True)]:
            replica.grads.add_(pending.wait())
        replica.optimizer.step()
        for other in others:
            world.wire.send(replica.weights, other)
        world.wire.flush()
        return 2 * len(others) * replica.grads.nbytes
    world.wire.send(replica.grads, 0)
    world.wire.recv(replica.weights, 0).wait()
    world.wire.flush()
    return 2 * replica.grads.nbytes


MODES = {"all-reduce": by_all_reduce, "server": by_server}


def _rank(rank: int, ranks: int, port: int, repeats: int, transport: str, path: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo"
    )
    world = World.connect(Mesh(dp=ranks), device=torch.device("cpu"), transport=transport)
    world.book.doing = "the parameter server"
    replicas = {mode: Replica() for mode in MODES}
    group, rows = world.group("dp"), []
    for repeat in range(repeats + 2):
        row: dict[str, Any] = {}
        for mode in (*MODES,) if repeat % 2 else (*reversed(MODES),):
            group.barrier()
            begin = time.perf_counter()
            replicas[mode].backward(repeat, rank, samples=16 // ranks)
            middle = time.perf_counter()
            moved = MODES[mode](world, replicas[mode])
            end = time.perf_counter()
            longest = group.all_reduce(torch.tensor([end - middle, end - begin, float(moved)]), "max").wait()
            row[mode] = longest.tolist()
        rows.append(row)
    weights: list[Tensor] = [replica.weights for replica in replicas.values()]
    if rank == 0:
        Path(path).write_text(json.dumps({"rows": rows[2:], "apart": float((weights[0] - weights[1]).abs().max())}))
    world.close()


def server(ranks: int, repeats: int) -> list[dict[str, Any]]:
    """The table of the parameter server, printed as it is made."""
    print(f"{'transport':10} {'mode':11} {'exchange ms':>12} {'step ms':>8} {'busiest MB':>11} {'apart':>8}")
    table = []
    for transport in TRANSPORTS:
        with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
            probe.close()
            path = Path(folder) / "rows.json"
            mp.spawn(_rank, args=(ranks, port, repeats, transport, str(path)), nprocs=ranks)
            found = json.loads(path.read_text())
        for mode in MODES:
            exchange, step, moved = (statistics.median(row[mode][part] for row in found["rows"]) for part in range(3))
            line = {"transport": transport, "mode": mode, "exchange_s": exchange, "step_s": step, "bytes": moved}
            table.append(line | {"ranks": ranks, "apart": found["apart"]})
            print(
                f"{transport:10} {mode:11} {exchange * 1e3:12.2f} {step * 1e3:8.2f} {moved / 1e6:11.2f} "
                f"{found['apart']:8.1e}",
                flush=True,
            )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the parameter server's comparison")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    servers = server(options.ranks, options.repeats)
    table = compression(options.steps, options.seeds) if options.seeds else []
    if options.json:
        options.json.write_text(json.dumps({"compression": table, "server": servers}, indent=1))


if __name__ == "__main__":
    main()
