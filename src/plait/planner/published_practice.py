"""How the framework behind a published row behaves: one function a family of frameworks, from its stated flags."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from plait.planner import published_megatron as megatron
from plait.planner.job import Practice
from plait.planner.published_rows import Row


def practice_of(row: Row) -> Practice:
    """The practice of the row's source, else of the framework that it names, else of Megatron-Core."""
    named = str(row.flags.get("framework", "")).lower()
    by_name = (make for word, make in _NAMED.items() if word in named)
    return (_OF.get(row.source) or next(by_name, megatron.megatron_core))(row)


def _foundry(row: Row) -> Practice:
    """Composer's FSDP: fp32 shards; PURE also reduces in bf16."""
    return Practice(
        framework="fsdp",
        weight_bytes=4,
        grad_bytes=2 if row.flags.get("fsdp_mixed_precision") == "PURE" else 4,
        optimizer_bytes=8,
        fp8="delayed" if row.precision == "fp8" else None,
        memory_kind=megatron.memory_kind(row),
    )


def _internevo(row: Row) -> Practice:
    fsdp = bool(row.flags.get("fsdp", False))
    return Practice(
        framework="internevo",
        overlap_grads=bool(row.flags.get("overlap_sync_grad", fsdp)),
        weight_bytes=2,
        grad_bytes=2,
        optimizer_bytes=12,
        memory_kind=megatron.memory_kind(row),
    )


def _nanotron(row: Row) -> Practice:
    return Practice(
        framework="nanotron",
        overlap_grads=True,
        overlap_weights=False,
        overlap_tp=bool(row.flags.get("tp_linear_async_communication", False)),
        overlap_pp=False,
        # Its norm, rotary embedding and attention are kernels of their own.
        fused=True,
        weight_bytes=2,
        grad_bytes=4,
        optimizer_bytes=12,
        # Not stated; as allocated, predictions would be 6% low throughout.
        memory_kind="reserved",
    )


def _torchtitan(row: Row) -> Practice:
    return Practice(
        framework="torchtitan",
        overlap_tp=bool(row.flags.get("async_tp", False)),
        weight_bytes=4,
        grad_bytes=4,
        optimizer_bytes=8,
        fused=bool(row.flags.get("torch_compile", False)),
        fp8="tensorwise" if row.precision == "fp8" else None,
        memory_kind=megatron.memory_kind(row),
    )


def _maxtext(row: Row) -> Practice:
    policy = str(row.flags.get("remat_policy", ""))
    return Practice(
        framework="maxtext",
        # XLA splits products to run under their collectives (Wang et al. 2023, collective matmul).
        overlap_tp=True,
        weight_bytes=4,
        grad_bytes=4,
        optimizer_bytes=8,
        fused=True,
        graph=True,
        memory_kind=megatron.memory_kind(row),
        recompute_parts=("core_attn", "layernorm", "mlp_act") if policy.startswith(("minimal", "save_dot")) else (),
        offload="offload" in policy,
        offload_share=_named_share(row.model),
    )


def _named_share(model: Mapping[str, Any]) -> float:
    """Of the widths of a layer's activations, those of what MaxText's policies name: input, q, k, v, output."""
    hidden, query = model["hidden"], model["heads"] * model["head_dim"]
    named = 2 * hidden + query + 2 * model["kv_heads"] * model["head_dim"]
    return float(named / (named + hidden + query + 2 * model["ffn"]))


_OF: Final[Mapping[str, Callable[[Row], Practice]]] = {
    "sc21_megatron": megatron.sc21,
    "vtrain_a100": megatron.vtrain,
    "simumax_b200": megatron.simumax,
    "zero_bubble": megatron.zero_bubble,
    "sailor_gh200": megatron.sailor,
    "llm_foundry_mpt": _foundry,
    "internevo": _internevo,
    "nanotron_ultrascale": _nanotron,
    "torchtitan": _torchtitan,
    "maxtext_tpu": _maxtext,
}
_NAMED: Final[Mapping[str, Callable[[Row], Practice]]] = {
    "torchtitan": _torchtitan,
    "nanotron": _nanotron,
    "internevo": _internevo,
    "maxtext": _maxtext,
    "composer": _foundry,
    "fsdp": _foundry,
    "zero-bubble": megatron.zero_bubble,
    "megatron-deepspeed": megatron.megatron_deepspeed,
    "deepspeed": megatron.deepspeed,
}
"""Word in a row's ``flags.framework`` -> practice."""
