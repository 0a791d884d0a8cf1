"""This host: its cores and memory, and what they are likely to do where `plait calibrate` has not measured it."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy

from plait.core.topology import Device, Measured, MeetingPoint, Tier, Topology

_NARROW = {
    "bf16": (("amx_bf16", 8.0), ("avx512_bf16", 2.0), ("bf16", 2.0)),
    "fp16": (("amx_fp16", 8.0), ("avx512_fp16", 2.0), ("asimdhp", 2.0)),
}
"""Precision -> flags of processors that multiply such numbers themselves, best first, with the rate over fp32's."""
_WIDE = (("avx512f", 32.0), ("fma", 32.0), ("asimd", 16.0), ("avx", 16.0))
"""Flags, and the fp32 FLOPs that a core does in a cycle."""
_CAST, _PLAIN = 0.5, 8.0
"""Rate of narrow products that are taken as fp32 ones, and FLOPs a cycle without any of these flags."""
_OFF = 4.0
"""How many times faster or slower than its flags and clock say a probe may find a core."""
_CLOCK = 2.5e9
_CROWDING, _CROWDED, _FREE = 1.05, 1e-3, 3e-4
"""What `plait calibrate` finds where ranks share cores: the crowding, and seconds a meeting there and without it."""


def estimate(devices: int) -> Topology:
    """``devices`` ranks on this host, uncalibrated: some milliseconds of products and copies on one core.

    Timed by the processor's own clock, so that other programs hardly matter, and held to what flags and clock of the
    processor allow. Right within a factor of two; `plait calibrate` does better.
    """
    said = _cpu_flags()
    rate = _within(_products(), _flops(said))
    moved = _copies()
    # A rank has a part of the cores, but no more than one of them moves its bytes.
    part, turn = cores() / devices, min(1.0, cores() / devices)
    crowd = devices > cores()
    if crowd:
        part, turn = part / _CROWDING, turn / _CROWDING
    lost = MeetingPoint(ranks=2, apart=1e-2, seconds=_CROWDED if crowd else _FREE)
    measured = Measured(meetings=(lost,), crowding=_CROWDING if crowd else None)
    narrow = {name: next((r for flag, r in flags if flag in said), _CAST) for name, flags in _NARROW.items()}
    share = Device(
        name="cpu",
        memory=host_memory() / devices,
        peaks={"fp32": rate * part} | {name: rate * part * ratio for name, ratio in narrow.items()},
        bandwidth=moved * turn,
        kind="cpu",
        source="estimated",
    )
    # Through memory: one rank writes, the other reads, and both at the same time in the other direction.
    tier = Tier(name="host", size=max(2, devices), bandwidth=moved * turn / 4, latency=2e-5, source="estimated")
    note = "estimated; plait calibrate measures"
    return Topology(
        name="local", device=share, devices=devices, tiers=(tier,), measured=measured, cores=cores(), source=note
    )


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def host_memory() -> float:
    """Bytes of this machine's memory, or of what its control group allows this process."""
    installed = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="ascii").strip() if limit.is_file() else "max"
    return min(installed, float(text)) if text.isdigit() else installed


def cpu_name() -> str:
    """The processor, by its maker's name."""
    return _cpu_lines().get("model name") or platform.processor() or platform.machine()


def _cpu_lines() -> dict[str, str]:
    """What /proc/cpuinfo says of the first core."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8", errors="replace") if info.is_file() else ""
    rows = (line.partition(":") for line in text.split("\n\n", 1)[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in rows}


def _cpu_flags() -> frozenset[str]:
    lines = _cpu_lines()
    return frozenset((lines.get("flags") or lines.get("Features") or "").split())


def _flops(flags: frozenset[str]) -> float:
    """FLOP/s of fp32 that a core's flags and clock promise."""
    megahertz = _cpu_lines().get("cpu MHz", "")
    clock = float(megahertz) * 1e6 if megahertz.replace(".", "", 1).isdigit() else _CLOCK
    return clock * next((flops for flag, flops in _WIDE if flag in flags), _PLAIN)


def _within(found: float, expected: float) -> float:
    return min(max(found, expected / _OFF), expected * _OFF)


def _products() -> float:
    """FLOP/s of one core: products that are small enough for one thread."""
    many, side = 64, 64
    a = numpy.ones((many, side, side), dtype=numpy.float32)
    out = numpy.empty_like(a)
    return 2.0 * many * side**3 / _least(lambda: numpy.matmul(a, a, out=out))


def _copies() -> float:
    """Bytes/s that one core reads and writes."""
    source = numpy.ones(1 << 22, dtype=numpy.float32)
    target = numpy.empty_like(source)
    return 2.0 * source.nbytes / _least(lambda: numpy.copyto(target, source))


def _least(work: Callable[[], object], times: int = 12) -> float:
    """Processor seconds of the fastest of some runs."""
    found = []
    for _ in range(times):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return max(min(found), 1e-9)
