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
from plait.core.plan import Plan
from plait.core.shard import Cut, Section, ShardSpec
from plait.models.config import ModelConfig, parameter_shapes

DATA_AXES: Final = ("dp", "cp")
"""Axes whose ranks see different data: every parameter's gradient is partial on them."""


class Form(Enum):
    """What replaces the module that holds the parameter."""

    COLUMN = "column"
    ROW = "row"
    VOCABULARY = "vocabulary"
    POSITIONS = "positions"
    PLAIN = "plain"


class PartialOn(Enum):
    """When the gradient of a tensor that every tp rank holds is a sum over them."""

    NEVER = "never"
    SEQUENCE = "when sequence parallel: each rank sees other rows"
    ALWAYS = "always: each rank sees other heads"


Sections = Callable[[ModelConfig, int], tuple[Section, ...]]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One row. ``dim`` is the dim cut on tp (None: replicated), made of ``sections`` of (config, tp)."""

    pattern: str
    form: Form
    dim: int | None = None
    sections: Sections | None = None
    partial: PartialOn = PartialOn.NEVER


def _qkv(config: ModelConfig, tp: int) -> tuple[Section, ...]:
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    # Fewer key/value heads than ranks: neighbouring ranks share one, and its gradient is partial between them.
    parts = min(tp, config.num_kv_heads)
    return Section(size=query), Section(size=key, parts=parts), Section(size=key, parts=parts)


def _gate_up(config: ModelConfig, tp: int) -> tuple[Section, ...]:
    return Section(size=config.ffn_size), Section(size=config.ffn_size)


_SP = PartialOn.SEQUENCE
TABLE: Final = (
    Rule(pattern="embed.tokens.weight", form=Form.VOCABULARY, dim=0),
    Rule(pattern="embed.positions.weight", form=Form.POSITIONS, partial=_SP),
    Rule(pattern="layers.*.norm[12].*", form=Form.PLAIN, partial=_SP),
    Rule(pattern="layers.*.attn.qkv.*", form=Form.COLUMN, dim=0, sections=_qkv),
    Rule(pattern="layers.*.attn.[qk]_norm.weight", form=Form.PLAIN, partial=PartialOn.ALWAYS),
    Rule(pattern="layers.*.attn.out.weight", form=Form.ROW, dim=1),
    Rule(pattern="layers.*.attn.out.bias", form=Form.ROW, partial=_SP),
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
    partial = set(DATA_AXES)
    if rule.partial is PartialOn.ALWAYS or (rule.partial is PartialOn.SEQUENCE and plan.sp):
        partial.add("tp")
    cuts: tuple[Cut, ...] = ()
    if rule.dim is not None and plan.tp > 1:
        sections = rule.sections(config, plan.tp) if rule.sections else (Section(size=shape[rule.dim]),)
        cuts = (Cut(axis="tp", dim=rule.dim, sections=sections),)
    return ShardSpec(shape=shape, cuts=cuts, partial=frozenset(partial))


def specs(config: ModelConfig, plan: Plan) -> dict[str, ShardSpec]:
    """Every parameter's layout, in forward order."""
    return {name: spec_of(name, shape, config, plan) for name, shape in parameter_shapes(config).items()}
