"""How Megatron-LM, Megatron-Core, DeepSpeed and what is made of them behave behind a published row."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from plait.planner.job import Practice
from plait.planner.published_rows import Row

_OVERLAPS_TP: Final = ("megatron_bridge_perf", "megatron_bridge_memory_ablation", "nemo_h100")
"""Sources whose recipes run tensor parallelism through user buffers."""


def memory_kind(row: Row) -> str:
    said = str(row.flags.get("memory_kind", ""))
    if "reserved per" in said:
        return "reserved"
    return "device" if "total used device" in said or "tool not stated" in said else "allocated"


def _attention(row: Row, usual: str) -> str:
    """``flash`` or ``unfused``, as the row says."""
    said = str(row.flags.get("attn_impl", "")).lower()
    return "unfused" if "unfused" in said else "flash" if "flash" in said else usual


def _megatron_2021(row: Row) -> Practice:
    """Megatron-LM of 2021 and Megatron-DeepSpeed: unfused attention over all keys, nothing overlapped, fp16.

    18 bytes a parameter: fp16 weight and gradient, and at the step fp32 gradient, master weight and two moments, less
    the 2 that are freed.
    """
    return Practice(
        framework="megatron-plain",
        attention=_attention(row, "unfused"),
        causal=row.model["attention"] != "full",
        overlap_grads=False,
        overlap_pp=False,
        weight_bytes=4 if row.precision == "fp32" else 2,
        grad_bytes=4,
        optimizer_bytes=8 if row.precision == "fp32" else 12,
        fused=True,
        memory_kind=memory_kind(row),
    )


def vtrain(row: Row) -> Practice:
    """Megatron-DeepSpeed reduces fp16 gradients: the step time's growth from dp=1 to dp=2 is that of 2 bytes each."""
    # One node's rows are put together from profiled layers: every launch was traced.
    framework = "megatron-deepspeed-profiled" if row.flags.get("set") == "single" else "megatron-deepspeed"
    return replace(_megatron_2021(row), framework=framework, grad_bytes=2)


def megatron_deepspeed(row: Row) -> Practice:
    """Megatron-DeepSpeed keeps fp16 gradients, and fp32 ones beside bf16 weights."""
    grads = 2 if row.precision == "fp16" else 4
    return replace(_megatron_2021(row), framework="megatron-deepspeed", grad_bytes=grads)


def deepspeed(row: Row) -> Practice:
    """DeepSpeed's engine; it overlaps by default where it shards weights (overlap_comm)."""
    overlap = bool(row.flags.get("overlap_comm", row.layout["zero"] == 3))
    return Practice(
        framework="deepspeed",
        attention=_attention(row, "flash"),
        causal=row.model["attention"] != "full",
        overlap_grads=overlap,
        overlap_weights=overlap,
        overlap_pp=False,
        weight_bytes=2,
        grad_bytes=2 if row.precision == "fp16" else 4,
        optimizer_bytes=12,
        memory_kind=memory_kind(row),
    )


def sc21(row: Row) -> Practice:
    if row.layout["zero"] != 3:
        # fp16 gradients: Megatron-LM of 2021 keeps and reduces fp32 ones for bf16 alone (arguments.py).
        return replace(_megatron_2021(row), grad_bytes=2)
    # The paper's ZeRO-3 rows ran on DeepSpeed of 2021: gradients of two bytes; overlap_comm is off by default, and a
    # layer's weights are larger than what it gathers ahead (stage3_prefetch_bucket_size, 5e7 elements).
    return Practice(
        framework="deepspeed-2021",
        attention="unfused",
        causal=False,
        overlap_grads=False,
        overlap_weights=False,
        weight_bytes=2,
        grad_bytes=2,
        optimizer_bytes=12,
        fused=True,
    )


def megatron_core(row: Row) -> Practice:
    """Megatron-Core with Transformer Engine, all overlap that its recipes turn on."""
    flags = row.flags
    graph = str(flags.get("cuda_graph_impl") or flags.get("cuda_graph") or "none")
    scope = flags.get("cuda_graph_scope")
    return Practice(
        framework=_megatron_name(row),
        attention=_attention(row, "flash"),
        overlap_grads=bool(flags.get("overlap_grad_reduce", True)),
        overlap_weights=bool(flags.get("overlap_param_gather", True)),
        # User buffers: on in the recipes of dense models.
        overlap_tp=row.layout["tp"] > 1 and not row.experts and row.source in _OVERLAPS_TP,
        # Recipes captured as a whole overlap the exchange; some releases leave it unsaid.
        overlap_ep=bool(flags.get("ep_overlap", row.experts and graph == "full_iteration")),
        weight_bytes=2,
        grad_bytes=2 if _half_reduce(row) else 4,
        optimizer_bytes=8 if flags.get("exp_avg_dtype") == "bf16" else 12,
        fused=True,
        graph="full" in graph or scope == "full_iteration" or (graph not in ("none", "partial") and scope is None),
        fp8=_scales(row),
        fp8_attention=bool(flags.get("fp8_dot_product_attention", False)),
        mtp_layers=row.model["mtp_layers"] or 0,
        balanced=row.experts and bool(flags.get("force_balanced_routing", True)),
        memory_kind=memory_kind(row),
        recompute_parts=_parts(row),
        offload=bool(flags.get("cpu_offloading_num_layers") or flags.get("activation_offload")),
        offload_share=min(1.0, (flags.get("cpu_offloading_num_layers") or row.model["layers"]) / row.model["layers"]),
    )


def _megatron_name(row: Row) -> str:
    if row.model["name"].startswith("gpt-oss"):
        return "megatron-clamped"  # inside its gated activation, which no fused kernel of Megatron-Core did
    plain = "alltoall" if row.source == "megatron_bridge_perf" else None  # what its recipes leave unsaid
    if row.experts and row.flags.get("moe_dispatcher", plain) == "alltoall":
        return "megatron-alltoall"  # the plain dispatcher: a token once an expert, counts read on the host
    return "megatron"


def _half_reduce(row: Row) -> bool:
    """Whether gradients are kept and reduced in half precision: as stated, or as in Megatron-Bridge's fp8 recipes."""
    stated = row.flags.get("grad_reduce_in_fp32")
    bridge = row.source.startswith("megatron_bridge") and row.precision != "bf16"
    return bridge if stated is None else not stated


def simumax(row: Row) -> Practice:
    # All overlap is off, as the rows say.
    return Practice(
        framework="megatron-plain",
        overlap_grads=False,
        overlap_weights=False,
        overlap_pp=False,
        weight_bytes=2,
        grad_bytes=4,
        optimizer_bytes=12,
        fused=True,
        balanced=row.experts,
        memory_kind=memory_kind(row),
    )


def zero_bubble(row: Row) -> Practice:
    """The fork of Megatron-LM, in fp16. That scores are stored, and gradients in half precision, follows from its
    published memory: flash attention would leave it at two thirds, fp32 gradients above some rows."""
    pp = row.layout["pp"]
    return Practice(
        framework="megatron",
        attention="unfused",
        overlap_grads=False,
        overlap_pp=True,
        weight_bytes=2,
        grad_bytes=2,
        optimizer_bytes=12,
        fused=True,
        synchronous_norm=row.flags.get("optimizer_sync") == "synchronous",
        memory_kind="reserved",
        live_limit={"zb-1p": pp, "zb-2p": 2 * pp}.get(row.layout["schedule"]),
    )


def sailor(row: Row) -> Practice:
    return Practice(
        framework="megatron-deepspeed",
        attention="unfused",
        causal=False,
        overlap_grads=False,
        overlap_pp=False,
        weight_bytes=4,
        grad_bytes=4,
        optimizer_bytes=8,
        fused=False,
        memory_kind=memory_kind(row),
    )


def _scales(row: Row) -> str | None:
    """The recipe of fp8 scales that the row says, by plait's names."""
    if row.precision in ("mxfp8", "nvfp4"):
        return row.precision
    if row.precision != "fp8":
        return None
    said = str(row.flags.get("fp8_recipe") or row.flags.get("features") or "").lower()
    for word, name in (("tensorwise", "tensorwise"), ("block", "blockwise"), ("delayed", "delayed")):
        if word in said:
            return name
    return "tensorwise"


def _parts(row: Row) -> tuple[str, ...]:
    named = row.flags.get("recompute_modules")
    if named:
        return tuple(str(name) for name in named)
    return ("core_attn",) if row.recompute == "selective" else ()
