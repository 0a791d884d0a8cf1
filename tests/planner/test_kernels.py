"""Seconds of operators: tile and wave quantisation, memory, measured points; and the calibration measurements."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from pathlib import Path

import pytest

from plait.core.topology import AttentionPoint, GemmPoint, Measured
from plait.planner.clusters import cluster
from plait.planner.kernels import Machine, seconds
from plait.planner.ops import Op

H100 = Machine(cluster("h100", 8))


def product(m: int, n: int, k: int, precision: str = "bf16") -> Op:
    moved = 2.0 * (m * k + k * n + m * n)
    shape = {"m": m, "n": n, "k": k, "odd": n % 8 > 0, "flops": 2.0 * m * n * k, "bytes": moved}
    return Op(kind="product", part="mlp", precision=precision, **shape)  # type: ignore[arg-type]


def test_large_products_run_at_their_share_of_the_peak() -> None:
    op = product(16384, 16384, 16384)
    share = op.flops / seconds(H100, op) / H100.peak("bf16")
    assert H100.share * 0.9 < share < H100.share


def test_one_tile_more_than_a_wave_costs() -> None:
    tiles = 132  # 12 x 11 tiles of 256 x 128 fill the processors of an H100 once
    full = seconds(H100, product(12 * 256, 11 * 128, 8192))
    more = seconds(H100, product(13 * 256, 11 * 128, 8192))
    assert tiles == 12 * 11
    assert more / full > 13 / 12 + 0.1


def test_thin_products_are_bound_by_memory() -> None:
    op = product(16, 8192, 8192)
    assert seconds(H100, op) > op.bytes / 3.35e12


def test_odd_sizes_run_slower_than_padded_ones() -> None:
    assert seconds(H100, product(4096, 50257, 2048)) > 2 * seconds(H100, product(4096, 50304, 2048))


def test_narrower_types_are_faster() -> None:
    large = [seconds(H100, product(8192, 8192, 8192, precision)) for precision in ("fp8", "bf16", "tf32", "fp32")]
    assert large == sorted(large)
    assert large[1] > 1.4 * large[0]


def test_many_small_groups_cost_more_than_one_product() -> None:
    one = Op(kind="grouped", part="experts", m=8192, n=4096, k=2048, flops=2.0 * 8192 * 4096 * 2048, bytes=1e8)
    many = dataclasses.replace(one, m=64, groups=128, bytes=2.0 * 128 * 4096 * 2048)
    assert many.groups * many.m == one.m
    assert seconds(H100, many) > 1.5 * seconds(H100, one)


def test_memory_bound_operators_by_bytes() -> None:
    small, large = (seconds(H100, Op(kind="memory", part="norm", bytes=size)) for size in (1e9, 2e9))
    assert large - small == pytest.approx(1e9 / H100.bandwidth)


def cpu(**measured: object) -> Machine:
    topology = cluster("h100", 8)
    device = dataclasses.replace(topology.device, name="some cpu", kind="cpu", peaks={"fp32": 1e11})
    return Machine(dataclasses.replace(topology, device=device, measured=Measured(**measured)))  # type: ignore[arg-type]


def test_measured_points_are_met_and_interpolated() -> None:
    points = tuple(
        GemmPoint(m=m, n=512, k=512, precision="fp32", seconds=2.0 * m * 512 * 512 / rate)
        for m, rate in ((64, 2e10), (256, 4e10), (1024, 6e10))
    )
    machine = cpu(gemm=points)
    for point in points:
        op = product(point.m, point.n, point.k, "fp32")
        assert seconds(machine, op) == pytest.approx(point.seconds)
    op = product(128, 512, 512, "fp32")
    assert 2e10 < op.flops / seconds(machine, op) < 4e10


def test_measured_attention() -> None:
    point = AttentionPoint(
        batch=1, heads=8, kv_heads=8, seq=512, head_dim=64, precision="fp32", forward=1e-3, backward=3e-3
    )
    machine = cpu(attention=(point,))
    shape = {"m": 512, "n": 8, "k": 64, "precision": "fp32"}
    flops = 2.0 * 8 * 512 * 512 * 64
    forward = Op(kind="attention_f", part="core", flops=flops, **shape)  # type: ignore[arg-type]
    backward = Op(kind="attention_b", part="core", flops=2.5 * flops, **shape)  # type: ignore[arg-type]
    assert seconds(machine, forward) == pytest.approx(point.forward)
    assert seconds(machine, backward) == pytest.approx(point.backward)


@pytest.mark.parametrize(("gpu", "preset", "median"), [("A100-PCIe", "a100-80g-pcie", 0.07), ("B200", "b200", 0.15)])
def test_calibration_products(shared: Path, gpu: str, preset: str, median: float) -> None:
    """SimuMax's measured products of each shape, but for one factor of the device."""
    rows = json.loads((shared / "published" / "calib_gemm_sdpa_simumax.json").read_text(encoding="utf-8"))["rows"]
    machine = Machine(cluster(preset, 8))
    errors = []
    for row in rows:
        if row["gpu"] != gpu or row["op"] != "matmul":
            continue
        op = product(row["m"], row["n"], row["k"])
        measured = op.flops / (row["peak_tflops"] * 1e12 * row["efficiency"])
        errors.append(math.log(seconds(machine, op) / measured))
    centre = statistics.median(errors)
    assert abs(centre) < 0.15
    assert statistics.median(abs(error - centre) for error in errors) < median
