"""Every number of the time model that was fitted or taken from a measurement, with what it was fitted on.

Nothing else in ``planner`` holds such a number (a test reads the sources). ``python -m plait.planner.fit`` fits them
again. ``NAME.FAMILY`` is the value of one family of devices, ``NAME`` alone that of all others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

FIT_SOURCES = (
    "vtrain_a100",
    "simumax_b200",
    "llm_foundry_mpt",
    "megatron_bridge_perf",
    "zero_bubble",
    "internevo",
    "nemo_h100",
)
"""Sources of ``published.jsonl`` whose step times constants were fitted on: 7 of 15. All others are held out."""

FAMILIES = (
    "GH200",
    "GB200",
    "GB300",
    "A100",
    "A800",
    "H100",
    "H200",
    "H800",
    "B200",
    "B300",
    "MI300",
    "MI325",
    "MI355",
    "TPU-V6E",
    "TPU",
    "V100",
)
"""Families, by the first of them that a device's name holds."""

ALIKE = {
    "A800": "A100",
    "H800": "H100",
    "H200": "H100",
    "GH200": "H100",
    "GB200": "B200",
    "GB300": "B300",
    "B300": "B200",
    "MI325": "MI300",
    "MI355": "MI300",
    "TPU-V6E": "TPU",
    "megatron-clamped": "megatron",
    "megatron-alltoall": "megatron",
    "megatron-plain": "megatron",
    "megatron-deepspeed-profiled": "megatron-deepspeed",
}
"""Families, and frameworks, that share another's values where they have none of their own."""


@dataclass(frozen=True, kw_only=True)
class Constant:
    """A number, its unit, what it means, and where it is from."""

    value: float
    unit: str
    meaning: str
    source: str


_CROSSED = "residuals of all sources, alike; leaving out one at a time covers 80% of it in the mean"
_CALIB = "calib_gemm_sdpa_simumax.json"
_CPU = "plait calibrate on two cores of a Zen 4 EPYC"
_NCCL = "calib_nccl_allreduce_vtrain.json, hardware.json"


def _c(value: float, unit: str, meaning: str, source: str) -> Constant:
    return Constant(value=value, unit=unit, meaning=meaning, source=source)


CONSTANTS: Mapping[str, Constant] = {
    # --- products
    "gemm_share": _c(0.70, "of peak", "rate of a large product, no waves lost", "hardware.json"),
    "gemm_share.A100": _c(0.78, "of peak", "rate of a large product, no waves lost", _CALIB),
    "gemm_share.H100": _c(0.66, "of peak", "rate of a large product, no waves lost", "hardware.json, llm_foundry_mpt"),
    "gemm_share.B200": _c(0.46, "of peak", "rate of a large product, no waves lost", _CALIB),
    "gemm_share.MI300": _c(0.50, "of peak", "rate of a large product, no waves lost", "hardware.json"),
    "gemm_share.MI325": _c(0.60, "of peak", "rate of a large product, no waves lost", "hardware.json"),
    "gemm_share.MI355": _c(0.63, "of peak", "rate of a large product, no waves lost", "hardware.json"),
    "gemm_share.TPU": _c(0.85, "of peak", "rate of a large product, no waves lost", "hardware.json"),
    "low_share": _c(0.65, "of peak", "the same in fp8", "hardware.json"),
    "low_share.B200": _c(0.58, "of peak", "the same in fp8", "megatron_bridge_perf"),
    "low_share.GB200": _c(0.53, "of peak", "the same in fp8, 1200 W", "megatron_bridge_perf"),
    "low_share.GB300": _c(0.75, "of peak", "the same in fp8, 1400 W", "megatron_bridge_perf"),
    "low_share.B300": _c(0.68, "of peak", "the same in fp8, 1100 W", "megatron_bridge_perf"),
    "low_share.MI300": _c(0.49, "of peak", "the same in fp8", "AMD, Measuring Max-Achievable FLOPs, part 2"),
    "low_share.MI325": _c(0.58, "of peak", "the same in fp8", "AMD, Measuring Max-Achievable FLOPs, part 2"),
    "low_share.MI355": _c(0.63, "of peak", "the same in fp8", "as in bf16"),
    "gemm_share.GB200": _c(0.60, "of peak", "rate of a large product, no waves lost, 1200 W", "megatron_bridge_perf"),
    "gemm_share.GB300": _c(0.56, "of peak", "rate of a large product, no waves lost, 1400 W", "megatron_bridge_perf"),
    "fp4_share": _c(0.45, "of peak", "the same in fp4", "megatron_bridge_perf"),
    "processors": _c(132, "count", "processors that tiles are spread over (SMs)", "data sheet"),
    "processors.V100": _c(80, "count", "processors that tiles are spread over (SMs)", "data sheet"),
    "processors.A100": _c(108, "count", "processors that tiles are spread over (SMs)", "data sheet"),
    "processors.B200": _c(148, "count", "processors that tiles are spread over (SMs)", "data sheet"),
    "processors.MI300": _c(304, "count", "processors that tiles are spread over (CUs)", "data sheet"),
    "unaligned": _c(
        2.6, "1", "time of a product with a size that is no multiple of 8, relative to a padded one", "vtrain_a100"
    ),
    "tile": _c(256, "rows", "side of a product's output tile", _CALIB),
    "tile_columns": _c(128, "columns", "other side of it", _CALIB),
    "wave_share": _c(0.5, "1", "share of a last wave's empty tiles that is lost", _CALIB),
    "prologue": _c(140, "k", "inner length that a tile's start and end cost", _CALIB),
    "join": _c(1.7, "1", "power of the norm that joins compute and memory time of an operator", _CALIB),
    "grouped_share": _c(0.82, "1", "rate of a grouped product relative to a single one", _CALIB),
    "kernel_gap": _c(3.5e-6, "s", "start and end of a kernel on the device", "vtrain_a100"),
    "tf32_share": _c(0.65, "of peak", "rate of a large product in tf32", "hardware.json"),
    "watts": _c(1.0, "1", "sustained rate of products under a power limit, of that without", "definition"),
    "watts.500W": _c(
        0.85, "1", "square root of 500 W over 700 W: rate follows clock, power its square or more", "physics"
    ),
    "watts.96GB": _c(
        0.91,
        "1",
        "the same of 580 W: 680 W a superchip (GH200, four a node), some 100 W for its CPU",
        "JUPITER, physics",
    ),
    # --- attention
    "flash_forward": _c(0.45, "of peak", "flash attention forward, head 128", "llm_foundry_mpt"),
    "flash_forward.A100": _c(0.72, "of peak", "flash attention forward, head 128", _CALIB),
    "flash_forward.B200": _c(0.60, "of peak", "flash attention forward, head 128", _CALIB),
    "flash_forward.TPU-V6E": _c(
        0.225, "of peak", "half of the others': heads of 128 in a matrix unit of 256 x 256", "scaling-book"
    ),
    "flash_backward.TPU-V6E": _c(
        0.175, "of peak", "half of the others': heads of 128 in a matrix unit of 256 x 256", "scaling-book"
    ),
    "flash_backward": _c(0.35, "of peak", "flash attention backward, head 128", "llm_foundry_mpt"),
    "flash_backward.A100": _c(0.45, "of peak", "flash attention backward, head 128", _CALIB),
    "flash_backward.B200": _c(0.45, "of peak", "flash attention backward, head 128", _CALIB),
    "flash_dim": _c(8, "elements", "head dim at which attention loses half of its rate", "llm_foundry_mpt"),
    "flash_rows": _c(512, "tokens", "sequence at which attention loses half of its rate", "llm_foundry_mpt"),
    "flash_version": _c(1.0, "1", "rate of a framework's attention kernel relative to the device's best", "definition"),
    "flash_version.fsdp": _c(
        0.63, "1", "the same for llm-foundry's of 2023 (FlashAttention 1, Triton)", "llm_foundry_mpt"
    ),
    "flash_version.fsdp.H100": _c(0.44, "1", "the same on Hopper, for which it was not made", "llm_foundry_mpt"),
    "flash_version.internevo": _c(0.5, "1", "the same for InternEvo's of 2023 (FlashAttention 1)", "internevo"),
    "flash_version.torchtitan.H100": _c(
        0.6, "1", "FlashAttention 2 on Hopper", "Shah et al. 2024, arXiv:2407.08608, figure 5"
    ),
    "flash_version.nanotron.H100": _c(
        0.6, "1", "FlashAttention 2 on Hopper", "Shah et al. 2024, arXiv:2407.08608, figure 5"
    ),
    "flash_version.plait.H100": _c(
        0.6, "1", "FlashAttention 2 on Hopper", "Shah et al. 2024, arXiv:2407.08608, figure 5"
    ),
    "batched_share": _c(0.58, "1", "rate of unfused attention's products relative to a linear layer's", "vtrain_a100"),
    # --- memory
    "memory_share": _c(0.75, "of bandwidth", "memory-bound operators", "hardware.json"),
    "optimizer_share": _c(0.70, "of bandwidth", "the optimizer step", "hardware.json"),
    "optimizer_passes": _c(
        1.1, "1", "bytes the optimizer moves over those of its state read and written once", "zero_bubble"
    ),
    # --- host
    "launch": _c(26e-6, "s", "host time of one operator", "vtrain_a100"),
    "launch.TPU": _c(0.0, "s", "host time of one operator: compiled programs", "definition"),
    "pace": _c(1.0, "1", "host time of an operator under a framework, relative to `launch`", "definition"),
    "pace.megatron-deepspeed-profiled": _c(4.3, "1", "the same, its engine's hooks under a tracer", "vtrain_a100"),
    "pace.megatron-deepspeed": _c(
        2.15, "1", "the same without: tracing about doubles a launch", "half of the one above"
    ),
    "pace_join": _c(
        2.5, "1", "power of the norm that joins the device's and the host's time of a phase", "vtrain_a100"
    ),
    "fused_launch": _c(
        0.7, "1", "host time of an operator under fused modules relative to plain ones", "megatron_bridge_perf"
    ),
    "backward_launch": _c(
        0.75, "1", "host time of an operator in backward (no Python) relative to forward", "vtrain_a100"
    ),
    "expert_launch": _c(0.7, "1", "host time of one expert's launch, in a loop below Python", "megatron_bridge_perf"),
    "expert_cast": _c(
        3.5,
        "launches",
        "host time of casting one expert's rows: tensors of their own, made in Python",
        "megatron_bridge_perf",
    ),
    "microbatch_host": _c(
        2e-4, "s", "host time of a microbatch that nothing hides, beside its operators", "zero_bubble"
    ),
    "step_host": _c(5e-3, "s", "host time of a step that nothing hides: batch, loss, logging", "vtrain_a100"),
    # --- wires
    "link_share": _c(0.75, "of bandwidth", "all-reduce bandwidth inside a node, bus convention", _NCCL),
    "link_share.H100": _c(0.80, "of bandwidth", "all-reduce bandwidth inside a node, bus convention", _NCCL),
    "link_share.B200": _c(0.742, "of bandwidth", "all-reduce bandwidth inside a node, bus convention", _NCCL),
    "pair_share": _c(0.87, "1", "all-reduce bandwidth of two devices in a node relative to that of more", _NCCL),
    "gather_share": _c(0.9, "1", "all-gather and reduce-scatter bandwidth relative to all-reduce", _NCCL),
    "exchange_share": _c(0.97, "1", "all-to-all bandwidth relative to all-reduce", _NCCL),
    "exchange_once": _c(
        0.86, "of bandwidth", "all-to-all between nodes, a token once a node", "DeepEP README: 43 of 50 GB/s"
    ),
    "network_share": _c(0.65, "of bandwidth", "collectives between nodes", _NCCL),
    "network_share.H100": _c(0.75, "of bandwidth", "collectives between nodes", "nemo_h100"),
    "p2p_share": _c(0.7, "of bandwidth", "one message between two devices", _NCCL),
    "link_step": _c(8.3e-6, "s", "latency of one step of a ring inside a node", _NCCL),
    "network_step": _c(15e-6, "s", "latency of one step between nodes", _NCCL),
    "collective_base": _c(23e-6, "s", "fixed latency of a collective", _NCCL),
    "host_link": _c(50e9, "bytes/s", "copies between a device and its host, one direction: PCIe 5.0", "data sheet"),
    "host_link.A100": _c(25e9, "bytes/s", "the same: PCIe 4.0", "data sheet"),
    "host_link.GH200": _c(400e9, "bytes/s", "the same: NVLink-C2C, bound by the host's memory", "data sheet"),
    "host_link.GB200": _c(225e9, "bytes/s", "the same: half of a CPU's NVLink-C2C", "data sheet"),
    "host_link.GB300": _c(225e9, "bytes/s", "the same: half of a CPU's NVLink-C2C", "data sheet"),
    "host_link.TPU": _c(16e9, "bytes/s", "the same", "jax-ml/scaling-book, tpus.md"),
    "host_link.TPU-V6E": _c(32e9, "bytes/s", "the same", "jax-ml/scaling-book, tpus.md"),
    # --- overlap
    # --- CPUs without a calibration
    "flash_forward.cpu": _c(0.5, "of peak", "torch's attention in fp32, long sequences", _CPU),
    "flash_backward.cpu": _c(0.47, "of peak", "the same, backward", _CPU),
    "flash_rows.cpu": _c(64, "tokens", "sequence at which attention loses half of its rate", _CPU),
    "memory_share.cpu": _c(0.3, "of a copy", "memory-bound operators in a step, on fresh memory", _CPU),
    "launch.cpu": _c(3e-6, "s", "host time of one operator, added to its own", _CPU),
    "contention": _c(0.25, "s/s", "slowing of compute by communication beside it", "llm_foundry_mpt"),
    "contention.TPU": _c(0.0, "s/s", "the same on a TPU, whose DMA engines send", "definition"),
    "contention.cpu": _c(1.0, "s/s", "the same on a CPU, whose cores do both", "definition"),
    "gemm_share.cpu": _c(1.0, "of peak", "of a CPU the peak is the best that was measured", "definition"),
    "hidden_share": _c(
        0.55, "1", "share of compute that data-parallel communication can hide under", "llm_foundry_mpt"
    ),
    "prefetch_share": _c(
        0.8, "1", "share of compute that gathers and reductions of zero=3 can hide under", "llm_foundry_mpt"
    ),
    "gather_low": _c(0.0, "1", "1: weights of 8-bit products are gathered in 8 bits", "definition"),
    "gather_low.torchtitan": _c(1.0, "1", "the same: enable_fsdp_float8_all_gather", "torchtitan's recipes"),
    "async_reduce": _c(0.0, "1", "1: tensor parallel sums of input gradients run under weight gradients", "definition"),
    "async_reduce.megatron": _c(1.0, "1", "the same: Megatron since 2022", "Megatron-LM, layers.py"),
    "async_reduce.megatron-plain": _c(0.0, "1", "the same: of 2021, or with its overlap turned off", "definition"),
    "async_reduce.megatron-deepspeed": _c(1.0, "1", "the same: Megatron since 2022", "Megatron-LM, layers.py"),
    "async_reduce.megatron-deepspeed-profiled": _c(
        0.0, "1", "the same under a tracer, which runs kernels one after the other", "vtrain_a100"
    ),
    "async_reduce.internevo": _c(1.0, "1", "the same: flash-attn's tensor-parallel layers", "InternEvo"),
    "split_own": _c(0.0, "1", "1: beside a gather runs the product of a rank's own rows alone", "definition"),
    "split_own.nanotron": _c(1.0, "1", "the same: _ColumnLinearAsyncCommunication", "nanotron, functional.py"),
    "low_messages": _c(0.0, "1", "1: tensor parallel gathers of 8-bit products carry 8 bits", "definition"),
    "low_messages.torchtitan": _c(1.0, "1", "the same: Float8ColwiseParallel", "torchao"),
    "bucket": _c(math.inf, "bytes", "gradients that are reduced by one call", "definition"),
    "bucket.nanotron": _c(50e6, "bytes", "the same: 25 MB of bf16, in fp32", "nanotron's defaults"),
    "own_gathers": _c(0.0, "1", "1: ZeRO 3 gathers and reduces each weight by a call of its own", "definition"),
    "own_gathers.deepspeed-2021": _c(1.0, "1", "the same: DeepSpeed of 2021", "DeepSpeed, partition_parameters.py"),
    "shard_copies": _c(
        0.0, "launches", "copying a tensor's shard of one rank out of, or into, a list that is sent", "definition"
    ),
    "shard_copies.nanotron": _c(
        1.0, "launches", "the same: shards are lists of tensors, rank by rank", "nanotron, distributed.py"
    ),
    "shard_copies.deepspeed-2021": _c(
        1.0, "launches", "the same: DeepSpeed of 2021", "DeepSpeed, partition_parameters.py"
    ),
    "split_share": _c(
        0.9, "1", "share of tensor-parallel communication that overlap in parts hides", "megatron_bridge_perf"
    ),
    "expert_hidden": _c(0.93, "1", "share of expert exchange that overlap hides", "megatron_bridge_perf"),
    "node_once": _c(0.0, "1", "1: a token goes to a node once, whatever number of its experts is there", "definition"),
    "node_once.megatron": _c(1.0, "1", "the same: DeepEP and HybridEP", "definition"),
    "node_once.megatron-alltoall": _c(0.0, "1", "the same: its plain dispatcher", "definition"),
    "imbalance": _c(
        1.3, "1", "rows of the fullest rank's experts over the mean, routing not forced even", "assumption"
    ),
    "owner": _c(
        0.0, "s", "sending of one owner's new weights, where each owner of state broadcasts its own", "definition"
    ),
    "owner.internevo": _c(2.5e-3, "s", "the same under InternEvo", "internevo"),
    # --- interval
    "spread": _c(0.12, "1", "80% of residuals of the log of step time are within", "all kinds"),
    "spread.dense": _c(0.12, "1", "the same, dense on one node", _CROSSED),
    "spread.dense_nodes": _c(0.11, "1", "the same, dense on several nodes", _CROSSED),
    "spread.experts": _c(0.18, "1", "the same, experts on one node", _CROSSED),
    "spread.experts_nodes": _c(0.15, "1", "the same, experts on several nodes", _CROSSED),
}


class Table:
    """Constants by name and family. Not written to once made."""

    def __init__(self, values: Mapping[str, float] | None = None) -> None:
        self._values = {name: constant.value for name, constant in CONSTANTS.items()} | dict(values or {})

    def of(self, name: str, family: str = "") -> float:
        """The value for ``family``, or for the family it is like, or for all."""
        at: str | None = family
        while at:
            if (value := self._values.get(f"{name}.{at}")) is not None:
                return value
            at = ALIKE.get(at)
        return self._values[name]

    def within(self, name: str, framework: str, family: str) -> float:
        """The value for a framework on ``family``, for the framework anywhere, or for all."""
        at: str | None = family
        while at:
            if (value := self._values.get(f"{name}.{framework}.{at}")) is not None:
                return value
            at = ALIKE.get(at)
        return self.of(name, framework)

    def replace(self, values: Mapping[str, float]) -> Table:
        """This table with some values changed."""
        return Table(self._values | dict(values))


DEFAULT = Table()


def family_of(device: str, kind: str = "gpu") -> str:
    """The family of a device by its name; that of no family is its kind."""
    name = device.upper()
    return next((family for family in FAMILIES if family in name), kind)
