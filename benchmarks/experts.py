"""Mixtures of experts: kernels, a step beside a dense step, and placement by load on a skewed stream.

    python benchmarks/experts.py [--parts products,step,placement] [--repeats 9] [--layers 8] [--json FILE]

``products``   one process: three ways to multiply sorted rows with their experts, even and skewed loads.
``step``       two ranks: a training step of ``bench-moe`` under ep=2, its routers balanced by their biases, beside one
               of ``bench`` under dp=2: as many operations a token (but for the router's), the same tokens a rank.
``placement``  two ranks, router biases that send most rows to experts 0 and 1, both of rank 0 at first: experts where
               they are, moved by the measured load, and moved with the hottest shadowed.

fp32, one thread a rank; ways alternate within a round, and ratios are medians of ratios within a round.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional as F

from plait.comm.world import World
from plait.core.mesh import Mesh
from plait.core.plan import Plan
from plait.models.batch import Batch
from plait.models.config import PRESETS, ModelConfig
from plait.models.decoder import Decoder
from plait.models.init import InitSource
from plait.models.parts import MoEConfig
from plait.models.router import Router
from plait.parallel.apply import Parallel, parallelize
from plait.parallel.placement import loads, place, spread

BATCH, SEQ, WARM, BALANCING = 8, 256, 2, 16
HOT = (0.15, 0.1, 0.03, 0.02, 0.0, 0.0, 0.0, 0.0)
"""Router biases of the skewed stream; the scores they are added to are about 1/8."""
Row = dict[str, Any]
Run = Callable[[], object]
Times = tuple[float, float]


def rounds(
    ways: dict[str, Callable[[], object]], repeats: int, seconds: Callable[[Callable[[], object]], float]
) -> Row:
    """Seconds of each way by round; ways run in turns, back and forth."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(repeats + WARM):
        for name in ways if number % 2 else reversed(ways):
            found[name].append(seconds(ways[name]))
    return {name: each[WARM:] for name, each in found.items()}


def summary(found: dict[str, list[Times]], base: str) -> list[Row]:
    """One row a way: median seconds, by the clock and of the processor, and how many times as fast as ``base``."""
    rows = []
    for name, each in found.items():
        row: Row = {"way": name}
        for kind, index in (("clock", 0), ("cpu", 1)):
            ratios = [a[index] / b[index] for a, b in zip(found[base], each, strict=True)]
            quarter = statistics.quantiles(ratios, n=4)
            row[kind] = {
                "seconds": statistics.median(times[index] for times in each),
                "speed": statistics.median(ratios),
                "q1": quarter[0],
                "q3": quarter[2],
            }
        rows.append(row)
    return rows


def timed(run: Run) -> Times:
    """By the clock, and of this process's threads: other processes on the machine hardly touch the second."""
    begin, processor = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - begin, time.process_time() - processor


# products


def kernel(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)


def slices(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    parts = zip(torch.split(x, counts), weight, strict=True)
    return torch.cat([torch.ops.mkldnn._linear_pointwise(a, w, None, "none", [], "") for a, w in parts if a.shape[0]])


def padded(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    rows = nn.utils.rnn.pad_sequence(list(torch.split(x, counts)), batch_first=True)
    out = torch.bmm(rows, weight.transpose(1, 2))
    return torch.cat([part[:count] for part, count in zip(out, counts, strict=True)])


def _drawn(share: list[float]) -> list[int]:
    """Rows of each expert when 2048 are drawn with these shares."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(torch.tensor(share), 2048, replacement=True, generator=generator)
    return torch.bincount(drawn, minlength=len(share)).tolist()


def products(repeats: int) -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2048, 512, generator=generator), torch.randn(8, 1408, 512, generator=generator)
    rows = []
    for name, share in {"even": [1.0] * 8, "skewed": [8.0, 4, 2, 1, 1, 1, 1, 1]}.items():
        counts = _drawn(share)
        ways: dict[str, Run] = {way.__name__: partial(way, x, weight, counts) for way in (kernel, slices, padded)}
        for way in ways.values():
            torch.testing.assert_close(way(), kernel(x, weight, counts), rtol=1e-3, atol=1e-3)
        rows += [{"part": f"products, {name}", **row} for row in summary(rounds(ways, repeats, timed), "slices")]
    return rows


# steps


class Trainer:
    """A cut model with its optimizer, and one batch of its own."""

    def __init__(self, config: ModelConfig, plan: str, world: World, *, movable: bool = False) -> None:
        with torch.device("meta"):
            model = Decoder(config)
        self.plan = Plan.parse(plan).resolve(world.mesh.world_size)
        self.parallel = parallelize(model, self.plan, world, weights=InitSource(config, 0), movable_experts=movable)
        decay, rest = self.parallel.zero.optimizer_groups()
        self.optimizer = torch.optim.AdamW([{"params": decay}, {"params": rest}], lr=1e-4, fused=True)
        generator = torch.Generator().manual_seed(world.at["dp"])
        share = BATCH // world.mesh.dp
        tokens = torch.randint(config.vocab_size, (share, SEQ + 1), generator=generator)
        self.batch = Batch(
            tokens_BT=tokens[:, :-1].contiguous(),
            targets_BT=tokens[:, 1:].contiguous(),
            sample_B=torch.arange(share) + share * world.at["dp"],
            step=0,
        )
        self.routers: dict[int, Tensor] = {}

    def step(self) -> None:
        self.parallel.forward_backward([self.batch], BATCH * SEQ)
        self.parallel.zero.square_norm()
        self.optimizer.step()
        self.parallel.zero.publish()
        self.routers = self.parallel.close_routers()

    def load(self) -> dict[int, list[float]]:
        """Assignments of each expert in the last step, by layer."""
        return self.parallel.loads(self.routers)

    def spread(self) -> float:
        """Std over mean of the ranks' loads in the last step, mean over layers."""
        mixtures = self.parallel.mixtures
        return statistics.mean(spread(loads(mixtures[layer].placement, load)) for layer, load in self.load().items())


def _clock(world: World) -> Callable[[Run], Times]:
    """From a barrier to the end of the last rank, and the most that a rank's processor worked."""
    group = world.group("dp")

    def seconds(run: Run) -> Times:
        group.barrier()
        wall, processor = group.all_reduce(torch.tensor(timed(run), dtype=torch.float64), "max").wait().tolist()
        return wall, processor

    return seconds


def biased(layers: int, rate: float) -> ModelConfig:
    """``bench-moe`` with a bias on the routers' scores, which moves by ``rate`` a step."""
    moe = MoEConfig(num_experts=8, top_k=2, ffn_size=704, bias=True, bias_balance=rate > 0, bias_rate=rate)
    return dataclasses.replace(PRESETS["bench-moe"], num_layers=layers, moe=moe)


def steps(world: World, layers: int, repeats: int) -> list[Row]:
    dense = dataclasses.replace(PRESETS["bench"], num_layers=layers)
    share = BATCH // world.mesh.dp
    experts = Trainer(biased(layers, 4e-3), f"ep=2 micro={share}", world)
    for _ in range(BALANCING):
        experts.step()
    ways: dict[str, Run] = {"dense dp=2": Trainer(dense, f"micro={share}", world).step, "experts ep=2": experts.step}
    rows = summary(rounds(ways, repeats, _clock(world)), "dense dp=2")
    rows[-1]["spread"] = experts.spread()
    return [{"part": "step", **row} for row in rows]


def _skew(parallel: Parallel) -> None:
    for stage in parallel.stages:
        for module in stage.module.modules():
            if isinstance(module, Router) and module.bias is not None:
                with torch.no_grad():
                    module.bias.copy_(torch.tensor(HOT))


def placements(world: World, layers: int, repeats: int) -> list[Row]:
    plan = f"ep=2 micro={BATCH // world.mesh.dp}"
    trainers = {
        name: Trainer(biased(layers, 0.0), plan, world, movable=name != "static")
        for name in ("static", "moved", "moved, 1 shadow")
    }
    for name, trainer in trainers.items():
        _skew(trainer.parallel)
        trainer.step()
        for layer, load in trainer.load().items():
            if name != "static":
                shadows = 1 if name.endswith("shadow") else 0
                trainer.parallel.place_experts(layer, place(load, world.mesh.ep, shadows), trainer.optimizer)
        trainer.parallel.zero.publish()
    ways = {name: trainer.step for name, trainer in trainers.items()}
    rows = summary(rounds(ways, repeats, _clock(world)), "static")
    for row in rows:
        row |= {"part": "placement", "spread": trainers[row["way"]].spread()}
    return rows


def _rank(rank: int, port: int, options: argparse.Namespace, path: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo"
    )
    world = World.connect(Mesh(dp=2, ep=2), device=torch.device("cpu"), timeout=300.0)
    rows: list[Row] = []
    if "step" in options.parts:
        rows += steps(world, options.layers, options.repeats)
    if "placement" in options.parts:
        rows += placements(world, options.layers, options.repeats)
    if rank == 0:
        Path(path).write_text(json.dumps(rows))
    world.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parts", default="products,step,placement")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = products(options.repeats) if "products" in options.parts else []
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
        probe.close()
        path = str(Path(folder) / "rows.json")
        mp.spawn(_rank, args=(port, options, path), nprocs=2)
        rows += json.loads(Path(path).read_text())
    columns = ("seconds", "speed", "q1", "q3", "cpu s", "speed", "spread")
    print(f"{'part':18} {'way':16} " + " ".join(f"{name:>8}" for name in columns))
    for row in rows:
        clock, cpu = row["clock"], row["cpu"]
        even = f"{row['spread']:8.3f}" if "spread" in row else ""
        print(
            f"{row['part']:18} {row['way']:16} {clock['seconds']:8.4f} {clock['speed']:8.2f} {clock['q1']:8.2f} "
            f"{clock['q3']:8.2f} {cpu['seconds']:8.4f} {cpu['speed']:8.2f} {even}"
        )
    if options.json:
        options.json.write_text(json.dumps({"layers": options.layers, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
