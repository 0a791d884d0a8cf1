"""What is taken of a host that nobody calibrated: sane on any machine, however busy, and said to be an estimate."""

from __future__ import annotations

import pytest

from plait.planner import host
from plait.planner.host import estimate
from plait.planner.local import doubt, meeting


def _of(monkeypatch: pytest.MonkeyPatch, flags: str, *, found: float = 1e11, cores: int = 4) -> None:
    monkeypatch.setattr(host, "_cpu_lines", lambda: {"flags": flags, "cpu MHz": "2500.000", "model name": "A CPU"})
    monkeypatch.setattr(host, "_products", lambda: found)
    monkeypatch.setattr(host, "_copies", lambda: 4e10)
    monkeypatch.setattr(host, "cores", lambda: cores)
    monkeypatch.setattr(host, "host_memory", lambda: 64e9)


def test_a_rank_has_its_part_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    _of(monkeypatch, "fpu avx fma avx512f")
    for ranks, rate, moved in ((1, 4e11, 4e10), (2, 2e11, 4e10), (4, 1e11, 4e10), (8, 5e10, 2e10)):
        found = estimate(ranks)
        crowding = found.measured.crowding or 1.0
        assert (crowding > 1) == (ranks > 4), "only ranks that share cores spoil each other's caches"
        rate, moved = rate / crowding, moved / crowding
        assert found.device.peaks["fp32"] == pytest.approx(rate)
        assert found.device.bandwidth == pytest.approx(moved), "no rank moves bytes with more than a core"
        assert found.device.memory == 64e9 / ranks
        assert (found.devices, found.cores) == (ranks, 4)
        assert doubt(found).startswith("estimated")


def test_ranks_that_share_cores_lose_more_where_they_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    _of(monkeypatch, "avx512f")
    free, crowd = (meeting(estimate(ranks).measured, ranks, 1e-2) for ranks in (4, 8))
    assert 0 < free < crowd


@pytest.mark.parametrize(
    ("flags", "bf16", "fp16"),
    [
        ("avx512f", 0.5, 0.5),
        ("avx512f avx512_bf16", 2.0, 0.5),
        ("avx512f avx512_bf16 avx512_fp16 amx_bf16", 8.0, 2.0),
        ("fp asimd asimdhp bf16", 2.0, 2.0),
    ],
)
def test_narrow_products_by_flags(monkeypatch: pytest.MonkeyPatch, flags: str, bf16: float, fp16: float) -> None:
    _of(monkeypatch, flags)
    peaks = estimate(4).device.peaks
    assert peaks["bf16"] == pytest.approx(bf16 * peaks["fp32"])
    assert peaks["fp16"] == pytest.approx(fp16 * peaks["fp32"])


def test_a_probe_is_held_to_what_a_core_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, rate in ((1e8, 2.5e9 * 32 / 4), (1e15, 2.5e9 * 32 * 4)):
        _of(monkeypatch, "fma avx", found=found)
        assert estimate(4).device.peaks["fp32"] == pytest.approx(rate)
    _of(monkeypatch, "", found=1e15)
    assert estimate(4).device.peaks["fp32"] == pytest.approx(2.5e9 * 8 * 4)


def test_probes_of_this_host_find_what_a_core_can_do() -> None:
    expected = host._flops(host._cpu_flags())
    assert expected / 8 < host._products() < expected * 8
    assert 1e8 < host._copies() < 1e13
    assert host.cpu_name()
