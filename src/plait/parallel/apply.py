"""`parallelize`: cuts a model by a plan. The only file that knows every strand."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import final

import torch
from torch import Tensor, nn

from plait.comm.group import Group
from plait.comm.world import World
from plait.core.errors import ConfigError, PlanError
from plait.core.legal import check
from plait.core.plan import Plan
from plait.core.shard import Piece, ShardSpec, split
from plait.models.batch import IGNORE, Batch
from plait.models.config import ModelConfig, canonical_name
from plait.models.decoder import Block, Decoder
from plait.models.init import WeightSource
from plait.models.layers import Dropout, SectionedLinear
from plait.parallel.flat import Held
from plait.parallel.grads import Deferred
from plait.parallel.layout import build_schedule, model_shape, placement, stage_bounds, stage_layers
from plait.parallel.linear import ColumnLinear, RowLinear
from plait.parallel.pipeline import Executor, Stage
from plait.parallel.recompute import RecomputedAttend, RecomputedBlock
from plait.parallel.rules import DATA_AXES, Form, rule_of, spec_of
from plait.parallel.sequence import SequenceDropout, SequencePositions
from plait.parallel.vocab import VocabCrossEntropy, VocabEmbedding
from plait.parallel.zero import Zero, holders
from plait.schedule.ir import Schedule

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@final
class Parallel:
    """A cut model: this rank's stages, its flat training state, and the executor over them."""

    def __init__(self, config: ModelConfig, plan: Plan, stages: Sequence[Stage], zero: Zero, world: World) -> None:
        self.config = config
        self.plan = plan
        self.stages = tuple(stages)
        self.zero = zero
        self.world = world
        self.executor = Executor(stages, zero, world)
        self._schedules: dict[tuple[int, bool], Schedule] = {}

    def schedule(self, microbatches: int, *, evaluation: bool = False) -> Schedule:
        """The lowered schedule for a step of ``microbatches``."""
        key = (microbatches, evaluation)
        if key not in self._schedules:
            self._schedules[key] = build_schedule(self.plan, microbatches, evaluation=evaluation)
        return self._schedules[key]

    def forward_backward(self, batches: Sequence[Batch], count: int) -> Tensor:
        """Forward and backward of this rank's microbatches, and the reduction of their gradients.

        ``count``: unmasked targets of the global batch. Returns the fp32 mean loss of the global batch, on every rank.
        """
        self._check(batches)
        book = self.world.book
        loss = self.executor.run(self.schedule(len(batches)), batches.__getitem__, count=count, sink=book.sink)
        self.zero.finish()
        return self.share_loss(loss)[0] / max(count, 1)

    def _check(self, batches: Sequence[Batch]) -> None:
        """What a run file's data cannot hold, but a caller's own batches can."""
        for batch in batches:
            if self.plan.sp and batch.rows % self.plan.tp:
                raise PlanError(
                    f"tp={self.plan.tp} with sequence parallel does not divide a microbatch of {batch.rows} tokens; "
                    "what works: another batch shape, or sequence_parallel=false"
                )
            targets, vocab = batch.targets_BT, self.config.vocab_size
            if bool(((targets != IGNORE) & ((targets < 0) | (targets >= vocab))).any()):
                raise ConfigError(f"a target is neither one of {vocab} tokens nor {IGNORE} (masked)")
            if bool(((batch.tokens_BT < 0) | (batch.tokens_BT >= vocab)).any()):
                raise ConfigError(f"a token is not one of the vocabulary's {vocab}")

    def share_loss(self, loss: Tensor, *others: Tensor) -> Tensor:
        """Sum over all ranks of (``loss`` counted once a tp line, ``others``): one collective for all of them."""
        mine = loss if self.world.at["tp"] == 0 else torch.zeros_like(loss)
        return self.world.group("pp", "dp", "cp", "tp").all_reduce(torch.stack([mine, *others]).double()).wait()


def parallelize(model: Decoder, plan: Plan, world: World, *, weights: WeightSource | None = None) -> Parallel:
    """Cut ``model`` by ``plan``; this rank keeps its part alone. The model is taken apart: do not use it afterwards.

    ``weights`` fills the parts (read by slice); None takes the values that ``model`` holds, which must then be real.
    Parameters whose ``requires_grad`` is off stay frozen. Raises `PlanError` when the plan cannot work for the model.
    """
    config = model.config
    plan = plan.resolve(world.mesh.world_size)
    assert plan.dp is not None
    # The batch is not known here: what depends on it is checked by whoever knows it.
    check(plan, model_shape(config), world_size=world.mesh.world_size, global_batch=plan.dp * plan.micro, seq=plan.tp)
    source = weights if weights is not None else _ModelSource(model)
    layers = stage_layers(config, plan)
    homes = placement(plan)
    bounds = stage_bounds(layers)
    local = [index for index, home in enumerate(homes) if home == world.at["pp"]]
    deferred = {index: Deferred() for index in local}
    held: dict[str, Held] = {}
    modules = {}
    for index in local:
        part = take_part(model, bounds[index], first=index == 0, last=index == len(layers) - 1)
        _cut(part, index, homes, plan, world, deferred[index], held)
        modules[index] = part
    zero = Zero(
        list(held.values()),
        level=plan.zero,
        bucket_bytes=int(plan.bucket_mb * 2**20),
        dtype=DTYPES[plan.precision],
        world=world,
        ties=_meet_groups(config, plan, homes, world),
    )
    _fill(zero, source)
    stages = [_stage(modules[index], index, len(layers), plan, world, deferred[index]) for index in local]
    return Parallel(config, plan, stages, zero, world)


def take_part(model: Decoder, layers: tuple[int, int], *, first: bool, last: bool) -> Decoder:
    """The stage of ``model`` with layers start..stop; it shares the model's modules."""
    with torch.device("meta"):
        part = Decoder(dataclasses.replace(model.config, num_layers=1, tied=False))
    part.config = model.config
    part.layers = nn.ModuleDict({str(i): model.layers[str(i)] for i in range(*layers)})
    part.embed = model.embed if first else None
    part.norm = model.norm if last else None
    part.head = model.head if last else None
    return part


def _cut(
    part: Decoder,
    stage: int,
    homes: tuple[int, ...],
    plan: Plan,
    world: World,
    deferred: Deferred,
    held: dict[str, Held],
) -> None:
    """Replace the modules of one stage by their parallel forms and note every parameter in ``held``."""
    config, group = part.config, world.group("tp")
    for path, module in list(part.named_modules()):
        names = [(attribute, value) for attribute, value in module.named_parameters(recurse=False)]
        if isinstance(module, Dropout) and plan.sp:
            _put(part, path, SequenceDropout(module, group))
        if not names:
            continue
        found: dict[str, ShardSpec] = {}
        for attribute, value in names:
            name = canonical_name(f"{path}.{attribute}", config)
            found[attribute] = spec_of(name, tuple(value.shape), config, plan)
        replacement = _replacement(rule_of(f"{path}.{names[0][0]}").form, module, found["weight"], plan, world, group)
        if replacement is not module:
            _put(part, path, replacement)
        for attribute, value in names:
            name = canonical_name(f"{path}.{attribute}", config)
            _hold(held, name, found[attribute], (replacement, attribute), value, stage, homes, world, deferred, config)
    part.loss = VocabCrossEntropy(group=group, start=_first_token(part.config, world))  # type: ignore[assignment]
    _recompute(part, plan)


def _replacement(form: Form, module: nn.Module, spec: ShardSpec, plan: Plan, world: World, group: Group) -> nn.Module:
    if form is Form.COLUMN:
        sections = None
        if isinstance(module, SectionedLinear):
            pieces = _pieces(spec, world)
            sections = tuple(piece.box[0][1] - piece.box[0][0] for piece in pieces) if spec.cuts else module.sections
        column = ColumnLinear(group=group, sequence=plan.sp, sections=sections)
        column.register_parameter("bias", None)
        return column
    if form is Form.ROW:
        row = RowLinear(group=group, sequence=plan.sp)
        row.register_parameter("bias", None)
        return row
    if form is Form.VOCABULARY:
        pieces = _pieces(spec, world)
        return VocabEmbedding(group=group, sequence=plan.sp, start=pieces[0].box[0][0])
    if form is Form.POSITIONS and plan.sp:
        return SequencePositions(group=group)
    return module


def _hold(
    held: dict[str, Held],
    name: str,
    spec: ShardSpec,
    owner: tuple[nn.Module, str],
    value: nn.Parameter,
    stage: int,
    homes: tuple[int, ...],
    world: World,
    deferred: Deferred,
    config: ModelConfig,
) -> None:
    if name in held:
        known = held[name]
        known.owners.append(owner)
        known.uses += 1
        known.stage = stage if known.stage == stage else None
        return
    shared = config.tied and name == "embed.tokens.weight" and homes[0] != homes[-1]
    held[name] = Held(
        name=name,
        spec=spec,
        shape=spec.local_shape(world.mesh.sizes, world.at),
        pieces=_pieces(spec, world),
        stage=stage,
        tied=shared,
        counted=not shared or stage == 0,
        uses=1,
        owners=[owner],
        trained=value.requires_grad,
        deferred=deferred,
    )


def _pieces(spec: ShardSpec, world: World) -> tuple[Piece, ...]:
    """The blocks of a tensor on this rank. Stages hold different tensors: ``pp`` is no axis that copies lie on."""
    sizes = {axis: size for axis, size in world.mesh.sizes.items() if axis != "pp"}
    return spec.pieces(sizes, world.at)


def _put(root: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(root.get_submodule(parent), name, module)


def _first_token(config: ModelConfig, world: World) -> int:
    return split(config.vocab_size, world.mesh.tp, world.at["tp"])[0]


def _recompute(part: Decoder, plan: Plan) -> None:
    for name, block in list(part.layers.items()):
        assert isinstance(block, Block)
        mode = plan.recompute_of(int(name))
        if mode == "selective":
            block.attn.attend = RecomputedAttend(block.attn.attend.window)
        elif mode == "full":
            part.layers[name] = RecomputedBlock(block)


def _meet_groups(config: ModelConfig, plan: Plan, homes: tuple[int, ...], world: World) -> Group | None:
    """Make, on all ranks and in one order, every group that gradients meet in; returns the one of tied weights."""
    mesh = world.mesh
    world.group(*DATA_AXES)
    world.group("tp")
    world.group("pp", "dp", "cp", "tp")
    if plan.tp > config.num_kv_heads:
        holders(world, "tp", plan.tp // config.num_kv_heads)
    if not config.tied or homes[0] == homes[-1]:
        return None
    lines = [tuple(sorted((line[homes[0]], line[homes[-1]]))) for line in mesh.groups(["pp"])]
    group = world.shared("tie", lines)
    return group if group.size > 1 else None


def _fill(zero: Zero, source: WeightSource) -> None:
    for one, view, fill in zero.parameters():
        local = torch.empty(view.shape, dtype=torch.float32, device=view.device)
        for piece in one.pieces:
            local[tuple(slice(*edge) for edge in piece.local)] = source.read(one.name, piece.box).to(local)
        with torch.no_grad():
            fill(local)


def _stage(part: Decoder, index: int, count: int, plan: Plan, world: World, deferred: Deferred) -> Stage:
    hidden, cut = part.config.hidden_size, plan.tp if plan.sp else 1
    return Stage(
        index=index,
        count=count,
        module=part,
        loss=part.loss,
        hidden=lambda batch: (batch.rows // cut, hidden),
        dtype=DTYPES[plan.precision],
        deferred=deferred,
    )


@final
class _ModelSource:
    """The weights of a model that is about to be taken apart."""

    def __init__(self, model: Decoder) -> None:
        self._values = {name: parameter.detach() for name, parameter in _named(model)}

    def read(self, name: str, box: tuple[tuple[int, int], ...] | None = None) -> Tensor:
        whole = self._values[name]
        if whole.is_meta:
            raise ValueError(f"parameter {name} is on the meta device: give parallelize() the weights to fill it with")
        return whole if box is None else whole[tuple(slice(*edge) for edge in box)]


def _named(model: Decoder) -> Iterable[tuple[str, nn.Parameter]]:
    return model.named_parameters()
