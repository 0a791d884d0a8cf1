"""One rank's real step without the others and without values: what ``plait dry-run`` shows.

The rank's stages are built, cut and run by the same code as in training, on fake tensors (shapes without memory) over
torch's ``fake`` process group, for which the world may have thousands of ranks. So bytes sent, FLOPs and bytes held are
those of the run itself, as on a CPU (where they differ, a GPU's kernels keep other scratch). What depends on values is
made up: tokens fall evenly on the vocabulary's shards, and every expert gets as many rows as any other.

The step is one behind the first: the optimizer has its state. Messages leave at once.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from plait.comm.world import World
from plait.core.compression import Compression
from plait.core.config import Config
from plait.core.errors import PlanError
from plait.core.legal import check
from plait.core.plan import Plan
from plait.models.batch import Batch
from plait.models.config import ModelConfig, parameter_shapes
from plait.models.decoder import Decoder
from plait.parallel.apply import parallelize
from plait.parallel.dispatch import Table as RouteTable
from plait.parallel.layout import build_windows, model_shape
from plait.planner.commands import read_plan
from plait.train.step import make_optimizer
from plait.train.watch import Watch


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What this rank sends in the step along one ``axis`` by one ``operation``, in one phase (F, B, W or step)."""

    axis: str
    operation: str
    phase: str
    calls: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What one rank does in a step, and what it holds. Bytes."""

    rank: int
    at: Mapping[str, int]
    """Index along every axis."""
    stages: tuple[int, ...]
    """Virtual stages of the rank."""
    microbatches: int
    parameters: int
    """Elements of the tensors that the rank holds a part of: of its parts (at level 3, of what it gathers)."""
    flops: int
    traffic: tuple[Traffic, ...]
    weights: int
    gradients: int
    optimizer: int
    """State that stays, padding of shards included."""
    batches: int
    """The rank's share of the step's tokens, targets and positions, loaded at its begin."""
    resting: int
    """Held between steps: the three above, and what small things there are."""
    peak: int
    """The most that was held at once."""
    moments: tuple[tuple[str, int], ...]
    """(what went on, the most held in it), in order."""

    def bytes_by_axis(self) -> dict[str, int]:
        """Bytes sent along each axis."""
        found: dict[str, int] = {}
        for row in self.traffic:
            found[row.axis] = found.get(row.axis, 0) + row.bytes
        return found

    @property
    def activations(self) -> int:
        """The most that forwards and backwards hold beyond what rests and the batches."""
        compute = [held for what, held in self.moments if what[:2] in ("F ", "B ", "W ")]
        return max(compute) - self.resting - self.batches

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps({**dataclasses.asdict(self), "activations": self.activations}, indent=1)


class _NoValues:
    """Weights of any name, without values."""

    def __init__(self, config: ModelConfig) -> None:
        self._shapes = dict(parameter_shapes(config))

    def read(self, name: str, box: tuple[tuple[int, int], ...] | None = None) -> Tensor:
        edges = box if box is not None else [(0, size) for size in self._shapes[name]]
        return torch.empty([stop - start for start, stop in edges])


def dry_run(model: ModelConfig, plan: Plan, *, world_size: int, seq: int, global_batch: int, rank: int) -> DryRun:
    """One step of ``rank`` of ``world_size`` under ``plan``, on ``global_batch`` samples of ``seq`` tokens.

    PlanError for a plan that cannot work, or a rank that there is not.
    """
    check(plan, model_shape(model), world_size=world_size, global_batch=global_batch, seq=seq)
    plan = plan.resolve(world_size)
    if not 0 <= rank < world_size:
        raise PlanError(f"rank {rank} is none of the world's; what works: 0 to {world_size - 1}")
    world = World.fake(plan.mesh(world_size), rank=rank)
    try:
        with torch.device("meta"):
            whole = Decoder(model)
        with FakeTensorMode(allow_non_fake_inputs=True):
            return _Dry(whole, plan, world, seq, global_batch).step()
    finally:
        world.close()


class _Dry:
    """The rank, and its step."""

    def __init__(self, model: Decoder, plan: Plan, world: World, seq: int, global_batch: int) -> None:
        self._config, self._plan, self._world, self._seq = model.config, plan, world, seq
        assert plan.dp is not None
        self._total = global_batch * seq
        self._microbatches = global_batch // (plan.dp * plan.micro)
        self._label = "build"
        self._watch = Watch(lambda: world.book.doing or self._label, share=1 / plan.tp)
        with self._watch:
            self._parallel = parallelize(model, plan, world, weights=_NoValues(model.config))
            for bucket in self._parallel.zero.buckets:
                if bucket.gathered:
                    # Filling took views of it, and a view gives a fake tensor without memory some.
                    bucket.weights.untyped_storage().resize_(0)
                    self._watch.follow(bucket.weights.untyped_storage())
        for mixture in self._parallel.mixtures.values():
            mixture.read = _even(model.config)

    def step(self) -> DryRun:
        parallel, zero, world, watch = self._parallel, self._parallel.zero, self._world, self._watch
        with watch:
            optimizer = make_optimizer(Config(), parallel)
            if optimizer is not None:
                optimizer.step()
            if self._plan.schedule == "2bw" or Compression.parse(self._plan.compress).kind in ("topk", "powersgd"):
                # Two versions of the weights, or what error feedback keeps: there from the first step on.
                self._forward_backward(0)
                self._close(optimizer)
            world.book.ledger.clear()
            self._label = "load"
            resting = watch.live
            watch.restart()
            parallel.prepare()
            batches = self._load(1)
            loaded = watch.live - resting
            self._forward_backward(1, batches)
            self._close(optimizer)
        state = zero.state_bytes()
        ledger = world.book.ledger
        return DryRun(
            rank=world.rank,
            at=world.at,
            stages=tuple(stage.index for stage in parallel.stages),
            microbatches=self._microbatches,
            parameters=sum(one.numel for one, _, _ in zero.parameters()),
            flops=watch.flops,
            traffic=tuple(
                Traffic(axis=key[0], operation=key[1], phase=key[2], calls=ledger.calls[key], bytes=ledger.bytes[key])
                for key in sorted(ledger.calls)
            ),
            weights=state["weights"],
            gradients=state["gradients"],
            optimizer=state["optimizer"],
            batches=loaded,
            resting=resting,
            peak=max(watch.peaks.values()),
            moments=tuple(watch.peaks.items()),
        )

    def _load(self, step: int) -> list[Batch]:
        return [self._batch(step) for _ in range(self._microbatches)]

    def _batch(self, step: int) -> Batch:
        shape = (self._plan.micro, self._seq)
        whole = Batch(
            tokens_BT=torch.empty(shape, dtype=torch.int64),
            targets_BT=torch.empty(shape, dtype=torch.int64),
            sample_B=torch.empty(shape[0], dtype=torch.int64),
            step=step,
        )
        return self._parallel.local(whole, total=self._total)

    def _forward_backward(self, step: int, batches: list[Batch] | None = None) -> None:
        parallel, sink = self._parallel, self._world.book.sink
        batches = self._load(step) if batches is None else batches
        if self._plan.schedule == "2bw":
            windows = build_windows(self._plan, self._microbatches)
            self._loss = parallel.executor.run_window(
                windows,
                step,
                step + 3,
                lambda number: batches[number % self._microbatches],
                count=lambda _: self._total,
                sink=sink,
            )
        else:
            schedule = parallel.schedule(self._microbatches)
            self._loss = parallel.executor.run(schedule, batches.__getitem__, count=self._total, sink=sink)

    def _close(self, optimizer: torch.optim.Optimizer | None) -> None:
        """What follows the last backward of a step: as `plait.train.step.Steps` does it, the norm being above 1."""
        parallel, zero = self._parallel, self._parallel.zero
        self._label = "reduce"
        zero.finish()
        if self._plan.precision == "fp16":
            zero.scale_gradients(1.0)
        parallel.share_loss(self._loss, zero.square_norm())
        self._label = "optimizer"
        zero.scale_gradients(1.0)
        if optimizer is not None:
            optimizer.step()
        zero.publish()
        self._label = "routers"
        parallel.close_routers(moved=False)


def _even(config: ModelConfig) -> Callable[[Tensor, int], RouteTable]:
    """The numbers of a `Route` when every slot gets as many assignments as any other, as near as can be."""
    moe = config.moe
    assert moe is not None
    kept = 1.0 if moe.capacity_factor is None else min(1.0, moe.capacity_factor)

    def read(told: Tensor, assignments: int) -> RouteTable:
        members, sources, targets, width = told.shape
        each, more = divmod(int(kept * assignments), targets * width)
        row = [[each + (target * width + slot < more) for slot in range(width)] for target in range(targets)]
        return [[row for _ in range(sources)] for _ in range(members)]

    return read


def run(
    path: Path, *, model: ModelConfig, seq: int, global_batch: int, rank: int, world_size: int | None, as_json: bool
) -> int:
    """Print the dry run of the plan in ``path``; ``world_size``: None is what the plan needs. Returns 0."""
    plan = read_plan(path)
    size = world_size if world_size is not None else plan.tp * plan.pp * plan.cp * (plan.dp or 1)
    found = dry_run(model, plan, world_size=size, seq=seq, global_batch=global_batch, rank=rank)
    if as_json:
        print(found.to_json())
    else:
        show(found, Console(highlight=False))
    return 0


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.4g} {unit}"
        count /= 1024
    return ""


def show(found: DryRun, console: Console) -> None:
    """Tables of what was sent, and of what was held when."""
    at = " ".join(f"{axis}={index}" for axis, index in found.at.items())
    stages = ", ".join(map(str, found.stages))
    console.print(
        f"rank {found.rank} ({at}): stages {stages}, {found.microbatches} microbatches, "
        f"{found.flops / 1e12:,.4g} TFLOP a step",
        soft_wrap=True,
    )
    sent = Table("axis", "operation", "phase", "calls", "sent", "exact bytes", box=box.SIMPLE)
    for row in found.traffic:
        sent.add_row(row.axis, row.operation, row.phase, f"{row.calls:,}", _size(row.bytes), f"{row.bytes:,}")
    console.print(sent)
    held = Table("held", "size", "exact bytes", box=box.SIMPLE)
    rows = [(name, getattr(found, name)) for name in ("weights", "gradients", "optimizer", "batches", "activations")]
    for name, count in [*rows, ("peak", found.peak)]:
        held.add_row(name, _size(count), f"{count:,}")
    console.print(held)
    fullest = max(found.moments, key=lambda moment: moment[1])
    console.print(f"fullest in: {fullest[0]} (tensors alone: no allocator, no libraries)", soft_wrap=True)
