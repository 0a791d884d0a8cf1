"""Clusters: what is refused, which tier holds which ranks, what a share of a host is, and the file both ways."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.cluster_file import MEMORY, OPERATIONS, PRECISIONS, RATE, SPEED, TIME, dump, load, number, parse
from plait.core.errors import ConfigError
from plait.core.topology import (
    AttentionPoint,
    CommPoint,
    Device,
    GemmPoint,
    Measured,
    MeetingPoint,
    Share,
    Tier,
    Topology,
)

TEXT = """
name = "two nodes"
devices = 16
[device]
name = "A100"
memory = "80 GiB"
bandwidth = "2.0 TB/s"
peaks = { bf16 = "312 TFLOP/s", fp32 = 19.5e12 }
[[tier]]
name = "nvlink"
size = 8
bandwidth = "300 GB/s"
latency = "5 us"
[[tier]]
name = "network"
size = 16
bandwidth = "200 Gbit/s"
latency = 1e-5
"""


def test_units_become_base_units() -> None:
    found = parse(TEXT)
    assert found.device.memory == 80 * 1024**3
    assert found.device.bandwidth == 2e12
    assert found.device.peaks == {"bf16": 312e12, "fp32": 19.5e12}
    assert [tier.bandwidth for tier in found.tiers] == [300e9, 25e9]
    assert found.tiers[0].latency == pytest.approx(5e-6)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("devices = 16", "", "cluster.devices is missing"),
        ('memory = "80 GiB"', "", 'cluster.device.memory is missing: for example memory = "80 GB"'),
        ("devices = 16", "device_count = 16", "device_count is no key of a cluster file; nearest: device"),
        ('"300 GB/s"', "300", "cluster.tier[0].bandwidth = 300 is absurd: expected 100000 to 1e+15 B/s"),
        ('"300 GB/s"', '"300 GB"', "expected a number in B/s, or one with its unit"),
        ('"300 GB/s"', '"fast"', "cluster.tier[0].bandwidth = 'fast'"),
        ('"300 GB/s"', "-1.0", "absurd"),
        ('"300 GB/s"', "nan", "expected a number"),
        ('"5 us"', '"5 h"', "cluster.tier[0].latency = '5 h'"),
        ('"312 TFLOP/s"', "312", "cluster.device.peaks.bf16 = 312 is absurd: expected 1e+08 to 1e+18 FLOP/s"),
        ("bf16 =", "bf61 =", "peaks.bf61 is no key of a cluster file; nearest: bf16"),
        ("size = 8", "size = 7", "tier sizes [7, 16]: each must be a multiple of the one before"),
        ("size = 8", 'size = "8"', "cluster.tier[0].size = '8': expected int"),
        ("size = 8", "size = 0", "at least 1"),
        ("devices = 16", "devices = 0", "devices=0: at least 1"),
        ("[[tier]]", "[[link]]", "link is no key"),
        ("name = ", "name ", "is no TOML"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(old: str, new: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(TEXT.replace(old, new))
    assert said in str(error.value)
    assert "\n" not in str(error.value).partition("is no TOML")[0]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('comm = [["all_reduce", "nvlink", 8, 1e6, 1e-3], ["all_sum", "nvlink", 8, 1e6, 1e-3]]', "comm[1]: op"),
        ('comm = [["all_reduce", "ether", 8, 1e6, 1e-3]]', "tier 'ether' is none of nvlink, network"),
        ("gemm = [[1, 2, 3]]", "expected a row [m, n, k, precision, seconds, batch]"),
        ('gemm = [[0, 2, 3, "fp32", 1.0]]', "m = 0: at least 1"),
        ("links = [[0.0, 1e9]]", "square matrix"),
        ("gemm = 3", "expected a list"),
        ("bandwith = 1e9", "nearest: bandwidth"),
    ],
)
def test_measured_rows_are_checked(row: str, said: str) -> None:
    with pytest.raises(ConfigError, match="cluster") as error:
        parse(f"{TEXT}[measured]\n{row}\n")
    assert said in str(error.value)


def test_a_file_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml cannot be read"):
        load(tmp_path / "missing.toml")
    (tmp_path / "bad.toml").write_text(TEXT.replace("devices = 16", ""), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"bad\.toml\.devices is missing"):
        load(tmp_path / "bad.toml")


@pytest.mark.parametrize(
    ("text", "quantity", "value"),
    [
        ("1.5 MB", MEMORY, 1.5e6),
        ("16KiB", TIME, None),
        ("800 Gbps", SPEED, 100e9),
        ("0.3 ms", TIME, 3e-4),
        ("9 PFLOP/s", RATE, 9e15),
        ("1.2.3 GB", MEMORY, None),
        (True, MEMORY, None),
    ],
)
def test_numbers_with_units(text: object, quantity: object, value: float | None) -> None:
    if value is None:
        with pytest.raises(ConfigError):
            number(text, quantity, "here")  # type: ignore[arg-type]
    else:
        assert number(text, quantity, "here") == pytest.approx(value)  # type: ignore[arg-type]


def test_the_tier_that_holds_ranks() -> None:
    found = parse(TEXT)
    assert found.tier_index([0, 7]) == 0
    assert found.tier_index([7, 8]) == 1
    assert found.tier_index([0, 99]) == 1


def _host(shares: tuple[Share, ...]) -> Topology:
    return Topology(
        name="host",
        device=shares[0].device,
        devices=2,
        tiers=(Tier(name="host", size=4, bandwidth=1e9, latency=1e-5),),
        cores=2,
        shares=shares,
    )


def _share(ranks: int, seconds: float) -> Share:
    device = Device(name="cpu", memory=8e9, peaks={"fp32": 1e11}, bandwidth=1e10, kind="cpu")
    point = GemmPoint(m=8, n=8, k=8, precision="fp32", seconds=seconds)
    comm = CommPoint(op="all_reduce", tier="host", ranks=2, size=1e6, seconds=1e-3)
    measured = Measured(gemm=(point,), comm=(comm,), launch=1e-6, bandwidth=1e10)
    return Share(ranks=ranks, device=device, measured=measured)


def test_a_device_of_a_cpu_host_is_one_of_so_many() -> None:
    host = _host((_share(1, 1.0), _share(2, 2.0)))
    assert host.with_devices(1).measured.gemm[0].seconds == 1.0
    assert host.with_devices(2).measured.gemm[0].seconds == 2.0
    eight = host.with_devices(8)  # four times as many ranks as cores: each computes a quarter of the time
    assert eight.measured.gemm[0].seconds == 8.0
    assert eight.measured.launch == 4e-6
    assert eight.measured.bandwidth == 2.5e9
    assert eight.device.peaks["fp32"] == 2.5e10
    assert eight.device.memory == 2e9
    assert eight.measured.comm[0].seconds == 1e-3
    assert parse(TEXT).with_devices(8).devices == 8


def test_ranks_between_those_that_were_measured_have_their_part_of_the_cores() -> None:
    host = dataclasses.replace(_host((_share(8, 4.0), _share(16, 9.0))), cores=8)
    four = host.with_devices(4)  # two cores each: products take half as long, launches and memory what they took
    assert four.measured.gemm[0].seconds == 2.0
    assert four.device.peaks["fp32"] == 2e11
    assert (four.measured.launch, four.measured.bandwidth, four.device.bandwidth) == (1e-6, 1e10, 1e10)
    assert four.device.memory == 16e9
    twelve = host.with_devices(12)  # of turns on eight cores each has a third more than one of sixteen
    assert twelve.measured.gemm[0].seconds == pytest.approx(9.0 * 12 / 16)
    assert twelve.measured.launch == pytest.approx(1e-6 * 12 / 16)
    # Of one rank that was measured with all cores, two have half of them each.
    alone = dataclasses.replace(_host((_share(1, 1.0),)), cores=8)
    assert alone.with_devices(2).measured.gemm[0].seconds == 2.0
    assert alone.with_devices(16).measured.gemm[0].seconds == 16.0
    assert alone.with_devices(16).measured.launch == 2e-6


_NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=8)
_SECONDS = st.floats(1e-9, 10.0)
_COUNTS = st.integers(1, 1 << 40)
_SPEEDS = st.floats(1e5, 1e15)
_DEVICES = st.builds(
    Device,
    name=_NAMES,
    memory=st.floats(1e6, 1e15),
    peaks=st.dictionaries(st.sampled_from(PRECISIONS), st.floats(1e8, 1e18), min_size=1),
    bandwidth=_SPEEDS,
    kind=st.sampled_from(("gpu", "tpu", "cpu")),
    source=_NAMES,
)
_GEMM = st.builds(
    GemmPoint,
    m=_COUNTS,
    n=_COUNTS,
    k=_COUNTS,
    precision=st.sampled_from(PRECISIONS),
    seconds=_SECONDS,
    batch=_COUNTS,
)
_ATTENTION = st.builds(
    AttentionPoint,
    batch=_COUNTS,
    heads=_COUNTS,
    kv_heads=_COUNTS,
    seq=_COUNTS,
    head_dim=_COUNTS,
    precision=st.sampled_from(PRECISIONS),
    forward=_SECONDS,
    backward=_SECONDS,
)
_COMM = st.builds(
    CommPoint,
    op=st.sampled_from(OPERATIONS),
    tier=st.sampled_from(("near", "far")),
    ranks=_COUNTS,
    size=st.floats(0, 1e15),
    seconds=_SECONDS,
)


def _tuples(of: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(of, max_size=2).map(tuple)


_MEASURED = st.builds(
    Measured,
    gemm=_tuples(_GEMM),
    attention=_tuples(_ATTENTION),
    comm=_tuples(_COMM),
    bandwidth=st.none() | _SPEEDS,
    optimizer_bandwidth=st.none() | _SPEEDS,
    launch=st.none() | _SECONDS,
    waiting=st.none() | st.floats(0, 1),
    crowding=st.none() | st.floats(0, 100),
    meetings=_tuples(st.builds(MeetingPoint, ranks=_COUNTS, apart=_SECONDS, seconds=_SECONDS)),
    busy=st.none() | st.floats(0, 1),
    spread=st.none() | st.floats(0, 100),
    links=st.sampled_from(((), ((0.0, 1e9), (2e9, 0.0)))),
)
_TIERS = st.tuples(st.integers(1, 64), st.integers(2, 64), _SPEEDS, _SECONDS).map(
    lambda v: (
        Tier(name="near", size=v[0], bandwidth=v[2], latency=v[3]),
        Tier(name="far", size=v[0] * v[1], bandwidth=v[2], latency=v[3], source="cited"),
    )
)


@settings(max_examples=25, deadline=None)
@given(
    st.builds(
        Topology,
        name=_NAMES,
        device=_DEVICES,
        devices=_COUNTS,
        tiers=_TIERS,
        measured=_MEASURED,
        cores=st.none() | st.integers(1, 256),
        shares=_tuples(st.builds(Share, ranks=_COUNTS, device=_DEVICES, measured=_MEASURED)),
        source=_NAMES,
    )
)
def test_a_cluster_file_reads_back_equal(topology: Topology) -> None:
    assert parse(dump(topology)) == topology


def test_the_example_is_a_cluster_file() -> None:
    found = load(Path(__file__).resolve().parents[2] / "examples" / "cluster.toml")
    assert found.devices == 256
    assert found.tiers[1].bandwidth == 50e9
