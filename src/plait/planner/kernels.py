"""Seconds of an operator on a device.

A product's time follows from its shape: output tiles go to processors in waves, a tile pays for its start and end, and
the bytes it moves join in (NVIDIA, "Matrix Multiplication Background", tile and wave quantisation). Where the cluster
file holds measured points (`plait calibrate`), the rate is interpolated between them in the log of the sizes.
Attention runs at a share of the peak, memory-bound operators at a share of the memory's bandwidth. Rates and shares are
in :mod:`plait.planner.constants`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from plait.core.topology import Topology
from plait.planner.constants import DEFAULT, Table, family_of
from plait.planner.ops import Op

NEAREST = 4
"""Measured points that an interpolation takes."""


class Machine:
    """A topology with its constants at hand. Equal only to itself, so that results can be cached by it."""

    def __init__(self, topology: Topology, table: Table = DEFAULT) -> None:
        device = topology.device
        family = family_of(device.name, device.kind)
        self.topology = topology
        self.table = table
        self.family = family
        self.measured = topology.measured
        self.gpu = device.kind == "gpu"
        self.shares = {
            "fp8": table.of("low_share", family),
            "fp4": table.of("fp4_share", family),
            "tf32": table.of("tf32_share", family),
        }
        self.share = table.of("gemm_share", family)
        self.cap = table.of("watts", device.name.rpartition("-")[2])
        self.processors = table.of("processors", family)
        self.tiles = (table.of("tile", family), table.of("tile_columns", family))
        self.wave_share = table.of("wave_share", family)
        self.prologue = table.of("prologue", family)
        self.join = table.of("join", family)
        self.grouped_share = table.of("grouped_share", family)
        launch = self.measured.launch or table.of("launch", family)
        # A CPU runs its operators itself: what a launch takes is added to each, and nothing runs ahead.
        own = device.kind == "cpu"
        self.gap = launch if own else table.of("kernel_gap", family) if self.gpu else 0.0
        self.launch = 0.0 if own else launch
        self.flash = {
            "attention_f": table.of("flash_forward", family),
            "attention_b": table.of("flash_backward", family),
        }
        self.flash_dim = table.of("flash_dim", family)
        self.flash_rows = table.of("flash_rows", family)
        self.batched_share = table.of("batched_share", family)
        self.bandwidth = self.measured.bandwidth or device.bandwidth * table.of("memory_share", family)
        self.optimizer_bandwidth = self.measured.optimizer_bandwidth or (
            device.bandwidth * table.of("optimizer_share", family)
        )

    def peak(self, precision: str) -> float:
        """FLOP/s of the data sheet; a precision that the device lacks runs as bf16, fp16 or fp32."""
        peaks = self.topology.device.peaks
        for name in (precision, "bf16", "fp16", "fp32"):
            if name in peaks:
                return peaks[name]
        return max(peaks.values())

    def rate(self, precision: str) -> float:
        """FLOP/s of a large product."""
        return self.peak(precision) * self.shares.get(precision, self.share) * self.cap


@lru_cache(maxsize=1 << 16)
def seconds(machine: Machine, op: Op) -> float:
    """Seconds of ``op`` on the device of ``machine``, once it runs; the host's launches are not in it."""
    if op.kind == "memory":
        return op.bytes / machine.bandwidth + machine.gap * op.kernels
    if op.kind in machine.flash:
        return _attention(machine, op)
    if op.kind == "grouped" and machine.measured.gemm and not machine.gpu:
        return op.flops / _measured_rate(machine, op.m, op.n, op.k, op.precision) + machine.gap * op.groups
    if op.kind == "grouped":
        compute = _tiled(machine, op) / machine.grouped_share
        # One launch an expert, on streams of their own: the device sees no gap between them.
        return compute + op.bytes / machine.bandwidth + machine.gap
    if machine.measured.gemm and op.kind == "product":
        return op.flops / _measured_rate(machine, op.m, op.n, op.k, op.precision)
    compute = _tiled(machine, op)
    if op.kind == "batched":
        compute /= machine.batched_share
    return _joined(machine, compute, op.bytes / machine.bandwidth) + machine.gap * op.kernels


def _joined(machine: Machine, compute: float, memory: float) -> float:
    power = machine.join
    return float((compute**power + memory**power) ** (1 / power))


def _tiled(machine: Machine, op: Op) -> float:
    """Seconds of the arithmetic of a product, of ``op.groups`` products at once."""
    rate = machine.rate(op.precision)
    if not machine.gpu:
        return op.flops / rate
    if op.odd:
        # Rows do not start where tensor cores read whole words: other kernels run.
        rate /= machine.table.of("unaligned", machine.family)
    side, columns = machine.tiles
    best = math.inf
    for rows, wide in ((side, columns), (columns, side), (side, side)):
        tiles = op.groups * math.ceil(op.m / rows) * math.ceil(op.n / wide)
        waves = tiles / machine.processors
        # Split along k or a persistent kernel fills part of a last wave.
        waves += machine.wave_share * (math.ceil(waves) - waves)
        work = 2.0 * rows * wide * (op.k + machine.prologue) * waves * machine.processors
        best = min(best, work / rate)
    return best


def _attention(machine: Machine, op: Op) -> float:
    points = machine.measured.attention
    if len({point.precision for point in points}) > 1:
        points = tuple(point for point in points if point.precision == op.precision)
    if points:
        forward = op.kind == "attention_f"
        # FLOPs of a measured point: two products over half of the keys, two and a half times that in backward.
        rates = [
            2.0
            * p.batch
            * p.heads
            * p.seq
            * p.seq
            * p.head_dim
            * (1 if forward else 5 / 2)
            / (p.forward if forward else p.backward)
            for p in points
        ]
        keys = [(float(p.seq), float(p.head_dim), float(p.batch * p.heads)) for p in points]
        return op.flops / _nearest(keys, rates, (float(op.m), float(op.k), float(op.n)))
    dim = op.k / (op.k + machine.flash_dim)
    full = 128 / (128 + machine.flash_dim)
    rows = op.m / (op.m + machine.flash_rows)
    rate = (
        machine.peak(op.precision)
        * machine.flash[op.kind]
        * machine.cap
        * rows
        * dim
        / full
        * machine.table.within("flash_version", op.framework, machine.family)
    )
    return max(op.flops / rate, op.bytes / machine.bandwidth) + machine.gap * op.kernels


def _measured_rate(machine: Machine, m: int, n: int, k: int, precision: str) -> float:
    points = [point for point in machine.measured.gemm if point.precision == precision]
    if not points:
        points = list(machine.measured.gemm)
    keys = [(float(point.m), float(point.n), float(point.k)) for point in points]
    rates = [2.0 * point.batch * point.m * point.n * point.k / point.seconds for point in points]
    return _nearest(keys, rates, (float(m), float(n), float(k)))


def _nearest(keys: Sequence[tuple[float, ...]], rates: Sequence[float], wanted: tuple[float, ...]) -> float:
    """Rate at ``wanted``: the nearest points in the log of the sizes, weighed by inverse squared distance."""
    logs = [math.log2(max(size, 1.0)) for size in wanted]
    near: list[tuple[float, float]] = []
    for key, rate in zip(keys, rates, strict=True):
        distance = sum((math.log2(max(size, 1.0)) - log) ** 2 for size, log in zip(key, logs, strict=True))
        if distance == 0:
            return rate
        near.append((distance, rate))
    near.sort()
    weights = [(1 / distance, rate) for distance, rate in near[:NEAREST]]
    return sum(weight * rate for weight, rate in weights) / sum(weight for weight, _ in weights)
