"""Takes one virtual stage out of a model and replaces its modules by the parallel forms that the table names."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import torch
from torch import nn

from plait.comm.world import World
from plait.core.plan import Plan
from plait.core.shard import Piece, ShardSpec, split
from plait.models.config import ModelConfig, canonical_name
from plait.models.decoder import Block, Decoder
from plait.models.latent import LatentAttention
from plait.models.layers import Dropout, SectionedLinear
from plait.models.moe import MoE
from plait.parallel.context import context_attend, order
from plait.parallel.expert import ParallelMoE
from plait.parallel.flat import Held
from plait.parallel.grads import Deferred
from plait.parallel.linear import ColumnLinear, RowLinear
from plait.parallel.precision import fp8_fits
from plait.parallel.recompute import RecomputedAttend, RecomputedBlock
from plait.parallel.rules import Form, rule_of, sizes_of, spec_of
from plait.parallel.sequence import SequenceDropout, SequencePositions, SharedByHeads, WholeSamples
from plait.parallel.vocab import VocabCrossEntropy, VocabEmbedding


@dataclass(kw_only=True)
class Cutter:
    """What is the same for every stage of a rank, and every parameter that has been met."""

    config: ModelConfig
    plan: Plan
    world: World
    homes: tuple[int, ...]
    movable: bool
    """Whether experts may have copies, whose gradients come to their owners once a step."""
    held: dict[str, Held] = field(default_factory=dict)
    """By name, in the order met."""
    mixtures: dict[int, ParallelMoE] = field(default_factory=dict)
    """Global layer index -> its experts."""

    def cut(self, model: Decoder, stage: int, layers: tuple[int, int], deferred: Deferred) -> Decoder:
        """Stage ``stage`` with layers start..stop of ``model``, whose modules it takes, cut for this rank."""
        part = _take(model, layers, first=stage == 0, last=stage == len(self.homes) - 1)
        for name, block in part.layers.items():
            assert isinstance(block, Block)
            self._replace_seams(block, int(name))
        for path, module in list(part.named_modules()):
            if isinstance(module, Dropout) and self.plan.sp:
                _put(part, path, SequenceDropout(module, self.world.group("tp")))
            names = list(module.named_parameters(recurse=False))
            if names:
                self._replace(part, path, module, names, stage, deferred)
        start = _first_token(self.config, self.world)
        part.loss = VocabCrossEntropy(group=self.world.group("tp"), start=start)  # type: ignore[assignment]
        self._recompute(part)
        return part

    def _replace_seams(self, block: Block, layer: int) -> None:
        """What is replaced as a whole, whatever parameters it has."""
        world, plan = self.world, self.plan
        block.attn.attend = context_attend(plan.context, block.attn.attend, world.group("cp"), world.wire)
        if isinstance(block.attn, LatentAttention):
            block.attn.share = SharedByHeads(group=world.group("tp"), sequence=plan.sp)  # type: ignore[assignment]
        if isinstance(block.mlp, MoE):
            tp, cp = world.group("tp"), world.group("cp")
            rows = WholeSamples(tp, cp, lambda seq: order(seq, cp.size, plan.context))
            block.mlp.router.gather, block.mlp.router.mine = rows.gather, rows.mine
            self.mixtures[layer] = ParallelMoE(
                block.mlp, tp=tp, ep=world.group("ep"), etp=world.group("etp"), sequence=plan.sp
            )
            block.mlp = self.mixtures[layer]  # type: ignore[assignment]

    def _replace(
        self,
        part: Decoder,
        path: str,
        module: nn.Module,
        names: list[tuple[str, nn.Parameter]],
        stage: int,
        deferred: Deferred,
    ) -> None:
        config, plan = self.config, self.plan
        canonical = {attribute: canonical_name(f"{path}.{attribute}", config) for attribute, _ in names}
        found = {
            attribute: spec_of(canonical[attribute], tuple(value.shape), config, plan) for attribute, value in names
        }
        replacement = self._form(rule_of(f"{path}.{names[0][0]}").form, module, next(iter(found.values())), path)
        if replacement is not module:
            _put(part, path, replacement)
        for attribute, value in names:
            self._hold(canonical[attribute], found[attribute], (replacement, attribute), value, stage, deferred)

    def _form(self, form: Form, module: nn.Module, spec: ShardSpec, path: str) -> nn.Module:
        plan, group = self.plan, self.world.group("tp")
        if form is Form.COLUMN:
            sections = None
            if isinstance(module, SectionedLinear):
                pieces = self._pieces(spec)
                cut = tuple(piece.box[0][1] - piece.box[0][0] for piece in pieces)
                sections = cut if spec.cuts else module.sections
            column = ColumnLinear(group=group, sequence=plan.sp, sections=sections, fp8=self._fp8(spec, path))
            column.register_parameter("bias", None)
            return column
        if form is Form.ROW:
            row = RowLinear(group=group, sequence=plan.sp, fp8=self._fp8(spec, path))
            row.register_parameter("bias", None)
            return row
        if form is Form.VOCABULARY:
            return VocabEmbedding(group=group, sequence=plan.sp, start=self._pieces(spec)[0].box[0][0])
        if form is Form.POSITIONS and plan.sp:
            return SequencePositions(group=group)
        return module

    def _fp8(self, spec: ShardSpec, path: str) -> bool:
        # Not the head: its products decide the loss's last digits (torchao and Transformer Engine leave it as well).
        if self.plan.precision != "fp8" or not path.startswith("layers."):
            return False
        outputs, inputs = spec.local_shape(self._sizes(spec), self.world.at)
        return fp8_fits(inputs, outputs)

    def _hold(
        self,
        name: str,
        spec: ShardSpec,
        owner: tuple[nn.Module, str],
        value: nn.Parameter,
        stage: int,
        deferred: Deferred,
    ) -> None:
        if name in self.held:
            known = self.held[name]
            known.owners.append(owner)
            known.uses += 1
            known.stage = stage if known.stage == stage else None
            return
        shared = self.config.tied and name == "embed.tokens.weight" and self.homes[0] != self.homes[-1]
        self.held[name] = Held(
            name=name,
            spec=spec,
            shape=spec.local_shape(self._sizes(spec), self.world.at),
            pieces=self._pieces(spec),
            stage=stage,
            tied=shared,
            counted=not shared or stage == 0,
            uses=2 if self.movable and spec.expert else 1,
            owners=[owner],
            trained=value.requires_grad,
            deferred=deferred,
            dtype=torch.float32 if ".router." in name else None,
        )

    def _sizes(self, spec: ShardSpec) -> dict[str, int]:
        return sizes_of(spec, self.world.mesh)

    def _pieces(self, spec: ShardSpec) -> tuple[Piece, ...]:
        """The blocks of a tensor on this rank."""
        return spec.pieces(self._sizes(spec), self.world.at)

    def _recompute(self, part: Decoder) -> None:
        for name, block in list(part.layers.items()):
            assert isinstance(block, Block)
            mode = self.plan.recompute_of(int(name))
            if mode == "selective":
                block.attn.attend = RecomputedAttend(block.attn.attend.window, block.attn.attend)
            elif mode == "full":
                part.layers[name] = RecomputedBlock(block)


def _take(model: Decoder, layers: tuple[int, int], *, first: bool, last: bool) -> Decoder:
    """The stage of ``model`` with layers start..stop; it shares the model's modules."""
    with torch.device("meta"):
        part = Decoder(dataclasses.replace(model.config, num_layers=1, tied=False, moe=None))
    part.config = model.config
    part.layers = nn.ModuleDict({str(i): model.layers[str(i)] for i in range(*layers)})
    part.embed = model.embed if first else None
    part.norm = model.norm if last else None
    part.head = model.head if last else None
    return part


def _first_token(config: ModelConfig, world: World) -> int:
    return split(config.vocab_size, world.mesh.tp, world.at["tp"])[0]


def _put(root: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(root.get_submodule(parent), name, module)
