"""`parallelize`: cuts a model by a plan. The only file that, with `plait.parallel.cut`, knows every strand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from plait.comm.group import Group
from plait.comm.world import World
from plait.core.errors import ConfigError, PlanError
from plait.core.legal import check
from plait.core.plan import Plan
from plait.models.batch import IGNORE, Batch
from plait.models.config import ModelConfig
from plait.models.decoder import Decoder
from plait.models.init import WeightSource
from plait.models.moe import Sums, end_step, routers
from plait.models.router import Router
from plait.parallel.calibrate import Calibration, measure
from plait.parallel.compress import Layout, parse
from plait.parallel.context import take
from plait.parallel.cut import Cutter
from plait.parallel.dispatch import exchange_slots
from plait.parallel.fold import holders
from plait.parallel.grads import Deferred
from plait.parallel.layout import build_schedule, model_shape, placement, stage_bounds, stage_layers
from plait.parallel.pipeline import Executor, Stage
from plait.parallel.placement import Placement
from plait.parallel.precision import DTYPES
from plait.parallel.reducer import Exact, Hierarchical, Reducer, node_groups
from plait.parallel.rules import DATA_AXES, sizes_of
from plait.parallel.zero import Zero
from plait.schedule.ir import Schedule

ALL = ("pp", "dp", "cp", "tp")


@final
class Parallel:
    """A cut model: this rank's stages, its flat training state, and the executor over them."""

    def __init__(self, cutter: Cutter, stages: Sequence[Stage], zero: Zero) -> None:
        self.config = cutter.config
        self.plan = cutter.plan
        self.world = cutter.world
        self.mixtures = cutter.mixtures
        self.stages = tuple(stages)
        self.zero = zero
        self.executor = Executor(stages, zero, self.world)
        self.calibration: Calibration | None = None
        """What ``schedule=auto`` is searched for, the same on all ranks; None: a guess."""
        self._schedules: dict[tuple[int, bool], Schedule] = {}
        self.routers: dict[int, Router] = {}
        """By global layer, those of this rank."""
        for stage in self.stages:
            self.routers.update(routers(stage.module))

    def schedule(self, microbatches: int, *, evaluation: bool = False) -> Schedule:
        """The lowered schedule for a step of ``microbatches``."""
        key = (microbatches, evaluation)
        if key not in self._schedules:
            found = self.calibration
            self._schedules[key] = build_schedule(
                self.plan,
                microbatches,
                evaluation=evaluation,
                costs=None if found is None else found.costs,
                transfers=None if found is None else found.transfers,
            )
        return self._schedules[key]

    def forward_backward(self, batches: Sequence[Batch], count: int) -> Tensor:
        """Forward and backward of this rank's microbatches, and the reduction of their gradients.

        ``batches`` hold whole samples, the same on all ranks of ``cp`` and ``tp``; ``count``: unmasked targets of the
        global batch. Returns the fp32 mean loss of the global batch, on every rank.
        """
        self._check(batches)
        real = torch.tensor(sum(_real(batch) for batch in batches), dtype=torch.float64, device=self.world.device)
        total = int(self.world.group("dp").all_reduce(real.view(1)).wait()) if self.routers else None
        mine = [self.local(batch, total=total) for batch in batches]
        self.prepare()
        loss = self.executor.run(self.schedule(len(mine)), mine.__getitem__, count=count, sink=self.world.book.sink)
        self.zero.finish()
        return self.share_loss(loss)[0] / max(count, 1)

    def local(self, batch: Batch, *, total: int | None = None, scale: float = 1.0) -> Batch:
        """This rank's part of a microbatch of whole samples.

        ``total``: real tokens of the global batch, which losses on routers are means over; ``scale``: the loss scale
        of the step.
        """
        if self.plan.cp > 1:
            multiple = self.plan.tp if self.plan.sp or self.config.moe is not None else 1
            batch = take(batch, self.plan.cp, self.world.at["cp"], self.plan.context, multiple=multiple)
        return dataclasses.replace(batch, total=total, scale=scale)

    def prepare(self) -> None:
        """Before a step's forwards, or those of an evaluation: weights are new."""
        for mixture in self.mixtures.values():
            mixture.prepare()

    def calibrate(self, batches: Sequence[Batch]) -> None:
        """Measure what ``schedule=auto`` is searched for on some of this rank's microbatches; collective."""
        self.prepare()
        homes = placement(self.plan)
        self.use(measure(self.stages, self.executor, self.zero, self.world, homes, batches))

    def use(self, calibration: Calibration) -> None:
        """Search ``schedule=auto`` for ``calibration`` from now on."""
        self.calibration = calibration
        self._schedules.clear()

    def place_experts(self, layer: int, wanted: Placement, optimizer: torch.optim.Optimizer | None) -> None:
        """Move ``layer``'s experts, weights and both moments, to where ``wanted`` says; `Zero.publish` has to follow.

        Collective over the ranks that hold the layer.
        """
        mixture, zero = self.mixtures[layer], self.zero
        for part in ("gate_up", "down"):
            name = f"layers.{layer}.mlp.experts.{part}"
            before = mixture.placement
            flat = zero.flat(name)
            moments = [] if optimizer is None else [x for x in optimizer.state[flat].values() if x.shape == flat.shape]
            for shard in (flat.detach(), *moments):
                moved = exchange_slots(mixture.ep, zero.local(name, shard), before, wanted)
                zero.set_local(name, shard, moved)
        self.lay_experts(layer, wanted)

    def lay_experts(self, layer: int, wanted: Placement) -> None:
        """``layer``'s experts are where ``wanted`` says: moved there, or about to be read."""
        for part in ("gate_up", "down"):
            name = f"layers.{layer}.mlp.experts.{part}"
            spec = self.zero.spec(name)
            cuts = tuple(dataclasses.replace(cut, order=wanted.order) if cut.axis == "ep" else cut for cut in spec.cuts)
            spec = dataclasses.replace(spec, cuts=cuts)
            self.zero.replace(name, spec, spec.pieces(sizes_of(spec, self.world.mesh), self.world.at))
        self.mixtures[layer].place(wanted)

    def close_routers(self, *, moved: bool = True) -> dict[int, Tensor]:
        """After a step: by global layer, what its router saw in the global batch (see `Sums`), on every rank.

        Routers then have the new loads and biases; not after a step that was skipped (``moved`` false). Collective over
        all ranks; nothing without experts.
        """
        moe = self.config.moe
        layers = [layer for layer in range(self.config.num_layers) if self.config.moe_of(layer) is not None]
        if moe is None or not layers:
            return {}
        sums = torch.zeros(len(layers), 3 * moe.num_experts + 3, dtype=torch.float64, device=self.world.device)
        for row, layer in enumerate(layers):
            if layer in self.routers:
                sums[row] = self.routers[layer].stats.to(sums)
        found = dict(zip(layers, self.world.group(*ALL).all_reduce(sums).wait(), strict=True))
        for layer, router in self.routers.items():
            if moved:
                end_step(router, found[layer])
            else:
                router.stats.zero_()
        return found

    def loads(self, found: Mapping[int, Tensor]) -> dict[int, list[float]]:
        """Assignments of each expert, by layer, of what `close_routers` found."""
        return {layer: Sums.of(stats).load_E.tolist() for layer, stats in found.items()}

    def _check(self, batches: Sequence[Batch]) -> None:
        """What a run file's data cannot hold, but a caller's own batches can."""
        divides = self.plan.sp or (self.plan.tp > 1 and self.config.moe is not None)
        for batch in batches:
            if divides and self.plan.cp == 1 and batch.rows % self.plan.tp:
                raise PlanError(
                    f"tp={self.plan.tp}, whose ranks share rows, does not divide a microbatch of {batch.rows} tokens; "
                    "what works: another batch shape, or sequence_parallel=false for a model without experts"
                )
            targets, vocab = batch.targets_BT, self.config.vocab_size
            if bool(((targets != IGNORE) & ((targets < 0) | (targets >= vocab))).any()):
                raise ConfigError(f"a target is neither one of {vocab} tokens nor {IGNORE} (masked)")
            if bool(((batch.tokens_BT < 0) | (batch.tokens_BT >= vocab)).any()):
                raise ConfigError(f"a token is not one of the vocabulary's {vocab}")

    def share_loss(self, loss: Tensor, *others: Tensor) -> Tensor:
        """Sum over all ranks of (``loss`` counted once a tp line, ``others``): one collective for all of them."""
        mine = loss if self.world.at["tp"] == 0 else torch.zeros_like(loss)
        return self.world.group(*ALL).all_reduce(torch.stack([mine, *others]).double()).wait()


def parallelize(
    model: Decoder,
    plan: Plan,
    world: World,
    *,
    weights: WeightSource | None = None,
    movable_experts: bool = False,
) -> Parallel:
    """Cut ``model`` by ``plan``; this rank keeps its part alone. The model is taken apart: do not use it afterwards.

    ``weights`` fills the parts (read by slice); None takes the values that ``model`` holds, which must then be real.
    Parameters whose ``requires_grad`` is off stay frozen. ``movable_experts``: `Parallel.place_experts` will be used;
    the reduction of experts' gradients then begins after the last backward. Raises `PlanError` when the plan cannot
    work for the model.
    """
    config = model.config
    plan = plan.resolve(world.mesh.world_size)
    assert plan.dp is not None
    # The batch is not known here: what depends on it is checked by whoever knows it.
    batch = plan.dp * plan.micro * plan.pp
    check(plan, model_shape(config), world_size=world.mesh.world_size, global_batch=batch, seq=plan.tp)
    source = weights if weights is not None else _ModelSource(model)
    layers = stage_layers(config, plan)
    homes = placement(plan)
    bounds = stage_bounds(layers)
    ties = _meet_groups(config, plan, homes, world)
    local = [index for index, home in enumerate(homes) if home == world.at["pp"]]
    deferred = {index: Deferred() for index in local}
    cutter = Cutter(config=config, plan=plan, world=world, homes=homes, movable=movable_experts and plan.ep > 1)
    modules = {index: cutter.cut(model, index, bounds[index], deferred[index]) for index in local}
    zero = Zero(
        list(cutter.held.values()),
        level=plan.zero,
        bucket_bytes=int(plan.bucket_mb * 2**20),
        dtype=DTYPES[plan.precision],
        world=world,
        ties=ties,
        zero_group=plan.zero_group,
        gather=plan.gather,
        versions=2 if plan.schedule == "2bw" else 1,
        reducer=lambda group: _reducer(group, plan, world, lambda key: zero.layout(key)),
    )
    _fill(zero, source)
    for index, part in modules.items():
        zero.watch(index, part)
    stages = [_stage(modules[index], index, len(layers), plan, deferred[index], cutter) for index in local]
    return Parallel(cutter, stages, zero)


def _reducer(group: Group, plan: Plan, world: World, layout: Layout) -> Reducer:
    """How gradients are summed over a group of data ranks; collective over all ranks."""
    if plan.node is not None:
        # Experts have fewer copies: as many of them in a node as fit.
        node = math.gcd(plan.node, group.size)
        inner, across = node_groups(world, group.axis.split("+"), node)
        return Hierarchical(inner, Exact(across))
    return parse(plan.compress)(group, layout)


def _real(batch: Batch) -> int:
    return batch.rows if batch.real_BT is None else int(batch.real_BT.sum())


def _meet_groups(config: ModelConfig, plan: Plan, homes: tuple[int, ...], world: World) -> Group | None:
    """Make, on all ranks and in one order, every group that strands meet in; returns the one of tied weights."""
    mesh = world.mesh
    for axes in (DATA_AXES, ("dp",), ("cp",), ("tp",), ALL):
        world.group(*axes)
    if config.moe is not None:
        for axis in ("edp", "ep", "etp"):
            world.group(axis)
    if plan.tp > model_shape(config).num_kv_heads:
        holders(world, "tp", plan.tp // config.num_kv_heads)
    if not config.tied or homes[0] == homes[-1]:
        return None
    lines = [tuple(sorted((line[homes[0]], line[homes[-1]]))) for line in mesh.groups(["pp"])]
    group = world.shared("tie", lines)
    return group if group.size > 1 else None


def _fill(zero: Zero, source: WeightSource) -> None:
    for one, view, fill in zero.parameters():
        local = torch.empty(one.shape, dtype=torch.float32, device=view.device)
        for piece in one.pieces:
            local[tuple(slice(*edge) for edge in piece.local)] = source.read(one.name, piece.box).to(local)
        with torch.no_grad():
            fill(local)


def _stage(part: Decoder, index: int, count: int, plan: Plan, deferred: Deferred, cutter: Cutter) -> Stage:
    moving = cutter.mixtures if cutter.movable else {}
    hidden, cut = part.config.hidden_size, plan.tp if plan.sp else 1
    return Stage(
        index=index,
        count=count,
        module=part,
        loss=part.loss,
        hidden=lambda batch: (batch.rows // cut, hidden),
        dtype=DTYPES[plan.precision],
        deferred=deferred,
        before_reduce=tuple(cutter.mixtures[int(name)].settle for name in part.layers if int(name) in moving),
    )


@final
class _ModelSource:
    """The weights of a model that is about to be taken apart."""

    def __init__(self, model: Decoder) -> None:
        self._values = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def read(self, name: str, box: tuple[tuple[int, int], ...] | None = None) -> Tensor:
        whole = self._values[name]
        if whole.is_meta:
            raise ValueError(f"parameter {name} is on the meta device: give parallelize() the weights to fill it with")
        return whole if box is None else whole[tuple(slice(*edge) for edge in box)]
