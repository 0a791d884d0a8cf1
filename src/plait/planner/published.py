"""A published row as a `Job`: the model, plan, cluster and practice that ran. What cannot be expressed is refused.

What a source leaves open is taken from the defaults of the framework that ran it; `notes` says what was chosen.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from plait.core.errors import PlanError
from plait.core.plan import Plan
from plait.core.topology import Tier, Topology
from plait.models.config import MLAConfig, ModelConfig, MoEConfig
from plait.planner.clusters import cluster, device, names
from plait.planner.job import Job
from plait.planner.published_practice import practice_of
from plait.planner.published_rows import Row, rows

__all__ = ["Row", "job_of", "memory_rank", "notes", "rows"]

_SCHEDULES: Final = {
    "none": "1f1b",
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved": "interleaved",
    "zb-1p": "zb-h1",
    "zb-2p": "zb-h2",
    "zb-h1": "zb-h1",
    "zb-h2": "zb-h2",
    "zb-v": "zb-v",
    "dualpipe-v": "dualpipe-v",
    "dualpipe": "dualpipe-v",
}
"""A row's schedule -> the handcrafted one of plait that it is nearest to (zero-bubble's 1p and 2p are searched)."""
_WINDOWED: Final = re.compile(r"causal, (alternating )?sliding window (\d+)( / full)?")
_GATED: Final = ("swiglu", "geglu", "reglu")


def job_of(row: Row) -> Job:
    """The job that ``row`` measured; PlanError or ConfigError where plait has no words for it, with the reason."""
    try:
        model = model_of(row)
        plan = _plan(row)
        topology = _topology(row)
    except ValueError as error:
        raise PlanError(f"{row.id}: {error}") from error
    job = Job(
        model=model,
        plan=plan,
        topology=topology,
        seq=row.batch["seq"],
        global_batch=row.batch["global_batch"],
        practice=practice_of(row),
    )
    plan.mesh(job.world_size)
    return job


def memory_rank(row: Row) -> int | None:
    """The pipeline rank whose peak the row has; None: the fullest. Megatron's logger runs on the last rank."""
    return row.layout["pp"] - 1 if "logger" in str(row.flags.get("memory_kind", "")) else None


def notes(row: Row) -> tuple[str, ...]:
    """What of the row was expressed by something near, in words."""
    said = []
    if row.model["ffn_kind"].startswith("relu"):
        said.append(f"{row.model['ffn_kind']} as gelu: the same products and bytes")
    if row.model["ffn_kind"] in _GATED[1:]:
        said.append(f"{row.model['ffn_kind']} as swiglu: the same products and bytes")
    if "alternating" in row.model["attention"]:
        said.append("alternating windows as one window in every layer that sees as many keys")
    if row.recompute == "unknown":
        said.append("recomputation is not stated: taken as none")
    if row.flags.get("set") == "single":
        said.append("recomputation is assumed by the row and doubtful: taken as none")
    if row.layout["schedule"] in ("zb-1p", "zb-2p"):
        said.append(f"{row.layout['schedule']} (searched) as {_schedule(row)}")
    if row.flags.get("optimizer") == "muon":
        said.append("Muon as AdamW")
    if row.flags.get("packed_sequences"):
        said.append("packed samples as whole ones")
    return tuple(said)


def model_of(row: Row) -> ModelConfig:
    """The row's model. Gated means rotary positions and RMSNorm, else GPT's learned positions and LayerNorm."""
    given, seq = row.model, row.batch["seq"]
    gated = given["ffn_kind"] in _GATED
    if not gated and given["ffn_kind"] not in ("gelu", "relu", "relu2"):
        raise ValueError(f"ffn_kind={given['ffn_kind']!r} is not one of {', '.join(_GATED)}, gelu, relu, relu2")
    qwen3, qwen2 = given["name"].startswith("qwen3"), given["name"].startswith("qwen2")
    moe, mla = _experts(given), None
    if given["mla"] is not None:
        at = given["mla"]
        mla = MLAConfig(
            q_rank=at.get("q_lora"),
            kv_rank=at["kv_lora"],
            nope_dim=at["qk_nope"],
            rope_dim=at["qk_rope"],
            v_dim=at["v_head"],
        )
    sizes = {
        "vocab_size": _vocabulary(row),
        "hidden_size": given["hidden"],
        "num_layers": given["layers"],
        "num_heads": given["heads"],
        "num_kv_heads": given["heads"] if mla is not None else given["kv_heads"],
        "head_dim": 0 if mla is not None else given["head_dim"],
        "ffn_size": given["ffn"],
        "max_positions": max(seq, given["max_seq"] or 0),
        "tied": given["tied"],
        "sliding_window": _window(given["attention"], seq),
    }
    if gated:
        plain = "qwen3" if qwen3 else "qwen2" if qwen2 else "llama"
        family = "deepseek_v3" if mla else plain if moe is None else "qwen3_moe" if qwen3 else "mixtral"
        return ModelConfig(family=family, **sizes, qkv_bias=qwen2, qk_norm=qwen3 and mla is None, moe=moe, mla=mla)
    # Megatron's GPT drops 0.1 of activations by default; MPT, MaxText and NeMo's recipes drop nothing.
    drops = row.source in ("sc21_megatron", "vtrain_a100", "zero_bubble") or row.flags.get("dropout") is True
    return ModelConfig(
        family="gpt2",
        **sizes,
        norm="layernorm",
        activation="gelu_tanh",
        positions="learned",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=moe is None,
        dropout=0.1 if drops else 0.0,
        moe=moe,
    )


def _vocabulary(row: Row) -> int:
    """The vocabulary. The row's own is assumed for vTrain; its one-node rows without tp ran GPT-2's 50257.

    Their head's products, over all depths, batches and widths, take 2.4 times those of tp=2, as odd sizes do.
    """
    if row.flags.get("set") == "single" and row.layout["tp"] == 1 and "model.vocab" in row.assumed:
        return 50257
    return int(row.model["vocab"])


def _experts(given: Mapping[str, Any]) -> MoEConfig | None:
    if not given["experts"]:
        return None
    every, dense = given["moe_every"] or 1, given["first_dense_layers"] or 0
    plain = {layer for layer in range(given["layers"]) if layer < dense or (layer + 1) % every}
    return MoEConfig(
        num_experts=given["experts"],
        top_k=given["top_k"],
        ffn_size=given["moe_ffn"],
        shared_ffn=given["shared_ffn"] or 0,
        dense_layers=tuple(sorted(plain)),
    )


def _window(attention: str, seq: int) -> int | None:
    """The window of every layer. Of windowed and full layers in turn, one that shows a query as many keys in the mean:
    w - w^2/2s."""
    if attention in ("causal", "full"):
        return None
    found = _WINDOWED.fullmatch(attention)
    if found is None:
        raise ValueError(
            f"attention {attention!r} is not one of 'causal', 'full', 'causal, sliding window N', "
            "'causal, alternating sliding window N / full'"
        )
    width = min(int(found[2]), seq)
    if not found[1]:
        return width if width < seq else None
    keys = (seq / 2 + width) / 2
    return max(1, round(seq * (1 - math.sqrt(max(0.0, 1 - 2 * keys / seq)))))


def _schedule(row: Row) -> str:
    name = row.flags.get("nearest_handcrafted_schedule") or row.layout["schedule"]
    if name not in _SCHEDULES:
        raise ValueError(f"schedule {name!r} is not one of {', '.join(_SCHEDULES)}")
    return _SCHEDULES[name]


def _plan(row: Row) -> Plan:
    layout, ranks = row.layout, row.layout["dp"] * row.layout["cp"]
    schedule = _schedule(row)
    if layout["pp"] == 1:
        schedule = "1f1b"
    virtual = layout["vp"] if layout["pp"] > 1 and schedule in ("interleaved", "zb-v", "dualpipe-v") else 1
    group = None
    if layout["zero"] and (layout["hsdp_replicas"] or 1) > 1:
        group = ranks // layout["hsdp_replicas"]
    if layout["zero"] and row.flags.get("zero1_group_size"):
        group = row.flags["zero1_group_size"]
    plan = Plan(
        tp=layout["tp"],
        pp=layout["pp"],
        dp=layout["dp"],
        cp=layout["cp"],
        context="ulysses" if row.flags.get("cp_comm_type") == "a2a" else "ring",
        ep=layout["ep"],
        expert_tp=layout["etp"],
        micro=row.batch["micro_batch"],
        schedule=schedule,
        virtual=virtual,
        zero=layout["zero"],
        zero_group=None if group is None or group >= ranks else group,
        precision="fp8" if row.precision in ("fp8", "mxfp8", "nvfp4") else row.precision,
        recompute=_recompute(row),
        # MaxText cuts the residual's features over its tensor axis: as much as a cut of tokens.
        sequence_parallel=None if layout["tp"] == 1 else layout["sequence_parallel"] or row.source == "maxtext_tpu",
    )
    return replace(plan, stages=_stages(row, plan.stage_count))


def _recompute(row: Row) -> str:
    if row.recompute == "unknown":
        return "none"
    if row.flags.get("set") == "single" and "recompute" in row.assumed:
        # With recomputation, as the simulator beside them says, these rows would reach 61% of the A100's peak.
        return "none"
    layers = row.model["layers"]
    if row.flags.get("recompute_num_layers") and row.layout["pp"] == 1:
        return f"full:0-{min(row.flags['recompute_num_layers'], layers) - 1}"
    if row.flags.get("note") == "every second layer fully recomputed":
        return " ".join(f"full:{layer}" for layer in range(0, layers, 2))
    return row.recompute


def _stages(row: Row, count: int) -> tuple[int, ...] | None:
    """Layers of each virtual stage as the framework cuts them; None: plait's own balanced cut."""
    layers: int = row.model["layers"]
    given = row.flags.get("layers_per_stage_incl_embedding_and_head")
    if count == 1:
        return None
    if given is not None:
        if not isinstance(given, list) or len(given) != count or sum(given) != layers + 2:
            raise ValueError(f"layers_per_stage {given} for {count} stages of {layers} layers")
        return (int(given[0]) - 1, *map(int, given[1:-1]), int(given[-1]) - 1)
    ends = bool(row.flags.get("first_and_last_stage_one_layer_fewer"))
    if row.source == "nanotron_ultrascale":
        return _by_cost(row.model, count)
    if layers % count == 0 and not ends:
        return (layers // count,) * count
    if (layers + 2) % count == 0:
        # The embedding and the head each count as a layer.
        each = (layers + 2) // count
        return (each - 1, *(each,) * (count - 2), each - 1)
    if row.source == "internevo":
        each, more = divmod(layers, count)
        return (each,) * (count - more) + (each + 1,) * more
    if row.experts and row.model["mtp_layers"] is not None:
        # Megatron-Bridge's layouts of DeepSeek-V3 and Kimi K2: the last stage, with MTP and head, has what is left.
        each = math.ceil(layers / count)
        left = layers - each * (count - 1)
        return (each + min(left, 0), *(each,) * (count - 2), max(left, 0))
    return None


def _by_cost(model: Mapping[str, Any], count: int) -> tuple[int, ...]:
    """nanotron's cut: the block that passes a stage's share of all costs is the stage's last.

    A layer costs its products, the head its own, the embedding nothing.
    """
    hidden, query = model["hidden"], model["heads"] * model["head_dim"]
    layer = 4 * query * hidden + 3 * model["ffn"] * hidden
    share = (layer * model["layers"] + model["vocab"] * hidden) / count
    counts = [0] * count
    stage = 0
    for index in range(model["layers"]):
        counts[stage] += 1
        if layer * (index + 1) > share * (stage + 1):
            stage += 1
    return tuple(counts)


def _topology(row: Row) -> Topology:
    """The row's own node size and bandwidths; what it leaves open or assumes is that of the preset with this device."""
    given = row.cluster
    part = device(given["device"])
    preset = next(cluster(name, 1) for name in names() if name != "local" and _is(name, part.name))
    near, far = preset.tiers[0], preset.tiers[-1]
    node, devices = given["devices_per_node"], given["devices"]
    open_ = given["intra_GBps"] is None or "cluster.intra_GBps" in row.assumed
    intra = near.bandwidth if open_ else given["intra_GBps"] * 1e9
    tiers: tuple[Tier, ...] = (replace(near, size=node, bandwidth=intra),)
    if devices > node:
        inter = far.bandwidth if given["inter_Gbps_per_device"] is None else given["inter_Gbps_per_device"] * 1e9 / 8
        tiers += (Tier(name=far.name, size=math.ceil(devices / node) * node, bandwidth=inter, latency=far.latency),)
    return Topology(name=part.name, device=part, devices=devices, tiers=tiers, source="published row")


def _is(name: str, part: str) -> bool:
    return cluster(name, 1).device.name == part
