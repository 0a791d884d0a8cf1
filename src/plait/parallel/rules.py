"""The table that cuts a decoder: parameter-name pattern -> how the tensor lies on ``tp``, and which layer holds it.

A new model family that keeps these names needs nothing here; other names need rows. No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from typing import Final

from plait.core.errors import PlanError
from plait.core.mesh import Mesh
from plait.core.plan import Plan
from plait.core.shard import Cut, Section, ShardSpec
from plait.models.config import ModelConfig, parameter_shapes

DATA_AXES: Final = ("dp", "cp")
"""Axes whose ranks see different data: every dense parameter's gradient is partial on them."""
EXPERT_DATA_AXES: Final = ("edp",)
"""The same for an expert's: its copies see different tokens."""


class Form(Enum):
    """What replaces the module that holds the parameter."""

    COLUMN = "column"
    ROW = "row"
    VOCABULARY = "vocabulary"
    POSITIONS = "positions"
    PLAIN = "plain"
    MIXTURE = "mixture"
    """Part of a mixture of experts, which is replaced as a whole."""


class PartialOn(Enum):
    """When the gradient of a dense tensor that every tp rank holds is a sum over them."""

    NEVER = "never"
    SEQUENCE = "when sequence parallel: each rank sees other rows"
    ALWAYS = "always: each rank sees other heads, or other rows"


Sections = Callable[[ModelConfig, int], tuple[Section, ...]]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One row. ``dim`` is the dim cut on tp (None: replicated), made of ``sections`` of (config, tp).

    ``expert``: a stack of experts, its first dim cut on ep and ``dim`` on etp, of (config, etp).
    """

    pattern: str
    form: Form
    dim: int | None = None
    sections: Sections | None = None
    partial: PartialOn = PartialOn.NEVER
    expert: bool = False


def _qkv(config: ModelConfig, tp: int) -> tuple[Section, ...]:
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    # Fewer key/value heads than ranks: neighbouring ranks share one, and its gradient is partial between them.
    parts = min(tp, config.num_kv_heads)
    return Section(size=query), Section(size=key, parts=parts), Section(size=key, parts=parts)


def _gate_up(config: ModelConfig, tp: int) -> tuple[Section, ...]:
    return Section(size=config.ffn_size), Section(size=config.ffn_size)


def _shared_gate_up(config: ModelConfig, tp: int) -> tuple[Section, ...]:
    assert config.moe is not None
    return Section(size=config.moe.shared_ffn), Section(size=config.moe.shared_ffn)


def _expert_gate_up(config: ModelConfig, etp: int) -> tuple[Section, ...]:
    assert config.moe is not None
    return Section(size=config.moe.ffn_size), Section(size=config.moe.ffn_size)


_SP = PartialOn.SEQUENCE
TABLE: Final = (
    Rule(pattern="embed.tokens.weight", form=Form.VOCABULARY, dim=0),
    Rule(pattern="embed.positions.weight", form=Form.POSITIONS, partial=_SP),
    Rule(pattern="layers.*.norm[12].*", form=Form.PLAIN, partial=_SP),
    Rule(pattern="layers.*.attn.qkv.*", form=Form.COLUMN, dim=0, sections=_qkv),
    Rule(pattern="layers.*.attn.[qk]_norm.weight", form=Form.PLAIN, partial=PartialOn.ALWAYS),
    Rule(pattern="layers.*.attn.q.weight", form=Form.COLUMN, dim=0),
    Rule(pattern="layers.*.attn.*_a.weight", form=Form.PLAIN, partial=_SP),
    Rule(pattern="layers.*.attn.*_a_norm.weight", form=Form.PLAIN, partial=_SP),
    Rule(pattern="layers.*.attn.*_b.weight", form=Form.COLUMN, dim=0),
    Rule(pattern="layers.*.attn.out.weight", form=Form.ROW, dim=1),
    Rule(pattern="layers.*.attn.out.bias", form=Form.ROW, partial=_SP),
    Rule(pattern="layers.*.mlp.router.*", form=Form.MIXTURE, partial=PartialOn.ALWAYS),
    Rule(pattern="layers.*.mlp.experts.gate_up", form=Form.MIXTURE, dim=1, sections=_expert_gate_up, expert=True),
    Rule(pattern="layers.*.mlp.experts.down", form=Form.MIXTURE, dim=2, expert=True),
    Rule(pattern="layers.*.mlp.shared.gate_up.weight", form=Form.COLUMN, dim=0, sections=_shared_gate_up),
    Rule(pattern="layers.*.mlp.shared.down.weight", form=Form.ROW, dim=1),
    Rule(pattern="layers.*.mlp.gate_up.*", form=Form.COLUMN, dim=0, sections=_gate_up),
    Rule(pattern="layers.*.mlp.up.*", form=Form.COLUMN, dim=0),
    Rule(pattern="layers.*.mlp.down.weight", form=Form.ROW, dim=1),
    Rule(pattern="layers.*.mlp.down.bias", form=Form.ROW, partial=_SP),
    Rule(pattern="norm.*", form=Form.PLAIN, partial=_SP),
    Rule(pattern="head.weight", form=Form.COLUMN, dim=0),
)


def rule_of(name: str) -> Rule:
    """The row for a parameter name; `PlanError` when the table has none."""
    for rule in TABLE:
        if fnmatchcase(name, rule.pattern):
            return rule
    raise PlanError(f"no rule says how to cut parameter {name!r}; add a row to plait/parallel/rules.py")


def spec_of(name: str, shape: tuple[int, ...], config: ModelConfig, plan: Plan) -> ShardSpec:
    """How the parameter lies on the mesh under ``plan``."""
    rule = rule_of(name)
    axis, ranks = ("etp", plan.etp) if rule.expert else ("tp", plan.tp)
    partial = set(EXPERT_DATA_AXES if rule.expert else DATA_AXES)
    if rule.partial is PartialOn.ALWAYS or (rule.partial is PartialOn.SEQUENCE and plan.sp):
        partial.add("tp")
    cuts: list[Cut] = []
    if rule.expert and plan.ep > 1:
        cuts.append(Cut(axis="ep", dim=0, sections=(Section(size=shape[0]),)))
    if rule.dim is not None and ranks > 1:
        sections = rule.sections(config, ranks) if rule.sections else (Section(size=shape[rule.dim]),)
        cuts.append(Cut(axis=axis, dim=rule.dim, sections=sections))
    return ShardSpec(shape=shape, cuts=tuple(cuts), partial=frozenset(partial), expert=rule.expert)


def sizes_of(spec: ShardSpec, mesh: Mesh) -> dict[str, int]:
    """The axes that a tensor's copies and shards lie on. Stages hold different tensors: ``pp`` is none of them."""
    sizes = mesh.expert_sizes if spec.expert else mesh.sizes
    return {axis: size for axis, size in sizes.items() if axis != "pp"}


def specs(config: ModelConfig, plan: Plan) -> dict[str, ShardSpec]:
    """Every parameter's layout, in forward order."""
    return {name: spec_of(name, shape, config, plan) for name, shape in parameter_shapes(config).items()}
