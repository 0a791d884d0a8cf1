"""`Topology`: the devices of a cluster, their links by tier, and what was measured of them. Pure data.

Units: bytes, seconds, FLOP/s, bytes/s a device and direction. A tier is a kind of domain: 8 devices on NVLink, 72 in a
rack, all on the network. Devices are numbered so that those of a domain are neighbours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from plait.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, or one process's share of a CPU."""

    name: str
    memory: float
    """Bytes."""
    peaks: Mapping[str, float]
    """Precision (``fp32 tf32 bf16 fp16 fp8 fp4``) -> dense FLOP/s of the data sheet, or the best that was measured."""
    bandwidth: float
    """Bytes/s of its memory."""
    kind: str = "gpu"
    """``gpu``, ``tpu`` or ``cpu``."""
    source: str = ""

    def slowed(self, factor: float) -> Device:
        """The same where it computes only 1 / ``factor`` of the time."""
        return replace(self.narrowed(factor), bandwidth=self.bandwidth / factor)

    def narrowed(self, factor: float) -> Device:
        """The same with 1 / ``factor`` of the cores."""
        return replace(self, peaks={precision: peak / factor for precision, peak in self.peaks.items()})


@dataclass(frozen=True, kw_only=True)
class Tier:
    """Links of one kind: ``size`` devices that reach each other over them, ``bandwidth`` each way a device."""

    name: str
    size: int
    bandwidth: float
    latency: float
    """Seconds of one message of a few bytes."""
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class GemmPoint:
    """``seconds`` that a product [m, k] x [k, n] took in ``precision``; ``batch`` of them at once."""

    m: int
    n: int
    k: int
    precision: str
    seconds: float
    batch: int = 1


@dataclass(frozen=True, kw_only=True)
class AttentionPoint:
    """Seconds of causal attention over ``batch`` sequences, forward and backward."""

    batch: int
    heads: int
    kv_heads: int
    seq: int
    head_dim: int
    precision: str
    forward: float
    backward: float


@dataclass(frozen=True, kw_only=True)
class CommPoint:
    """``seconds`` of one collective; ``size`` is the whole tensor's bytes (all-gather: gathered; p2p: the message)."""

    op: str
    """``all_reduce all_gather reduce_scatter all_to_all broadcast p2p``."""
    tier: str
    ranks: int
    size: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class MeetingPoint:
    """``seconds`` that each of ``ranks`` loses, beyond the collective itself, where they meet after ``apart`` seconds:
    the last one is waited for, and ranks that share a core wait for their turns."""

    ranks: int
    apart: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What `plait calibrate` found. Empty or None where nothing was measured."""

    gemm: tuple[GemmPoint, ...] = ()
    attention: tuple[AttentionPoint, ...] = ()
    comm: tuple[CommPoint, ...] = ()
    bandwidth: float | None = None
    """Bytes/s of memory-bound operators (read plus written)."""
    optimizer_bandwidth: float | None = None
    """Bytes/s of the optimizer step (read plus written)."""
    launch: float | None = None
    """Seconds of the host for one operator."""
    waiting: float | None = None
    """CPU hosts: the share of a core that a rank takes while it waits for another."""
    crowding: float | None = None
    """CPU hosts, more ranks than cores: how many times longer a rank's work takes beyond its turns (each finds the
    caches full of another's). It is in the points."""
    meetings: tuple[MeetingPoint, ...] = ()
    busy: float | None = None
    """The share of the host's cores that other programs took meanwhile."""
    spread: float | None = None
    """How far apart the passes were: the slower over the faster, less 1, in the median of what is computed."""
    links: tuple[tuple[float, ...], ...] = ()
    """Rank-to-rank bytes/s, 0 on the diagonal."""

    def slowed(self, factor: float) -> Measured:
        """The same where a rank computes only 1 / ``factor`` of the time. Communication as it is."""
        return replace(
            self.narrowed(factor),
            bandwidth=self.bandwidth and self.bandwidth / factor,
            launch=self.launch and self.launch * factor,
        )

    def narrowed(self, factor: float) -> Measured:
        """The same where a rank has 1 / ``factor`` of the cores: one of them launches operators and waits for memory in
        any case."""
        gemm = tuple(replace(point, seconds=point.seconds * factor) for point in self.gemm)
        attention = tuple(
            replace(point, forward=point.forward * factor, backward=point.backward * factor) for point in self.attention
        )
        return replace(
            self,
            gemm=gemm,
            attention=attention,
            optimizer_bandwidth=self.optimizer_bandwidth and self.optimizer_bandwidth / factor,
        )


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one of ``ranks`` processes of a CPU host gets while all of them work: they share cores, cache and memory."""

    ranks: int
    device: Device
    measured: Measured


@dataclass(frozen=True, kw_only=True)
class Topology:
    """``devices`` alike, on ``tiers`` from the innermost out; the last tier holds all of them."""

    name: str
    device: Device
    devices: int
    tiers: tuple[Tier, ...]
    measured: Measured = field(default_factory=Measured)
    cores: int | None = None
    """CPU hosts: ranks of a host that compute at full speed at once. None: each device computes for itself."""
    shares: tuple[Share, ...] = ()
    """CPU hosts: what was measured with other numbers of ranks; see `with_devices`."""
    source: str = ""

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise ConfigError(f"cluster {self.name}: devices={self.devices}: at least 1")
        if not self.tiers:
            raise ConfigError(f"cluster {self.name}: no tier of links: give at least one")
        sizes = [tier.size for tier in self.tiers]
        if any(inner >= outer or outer % inner for inner, outer in itertools.pairwise(sizes)):
            raise ConfigError(f"cluster {self.name}: tier sizes {sizes}: each must be a multiple of the one before")
        for what, value in self._numbers():
            if not (0 < value < math.inf):
                raise ConfigError(f"cluster {self.name}: {what} = {value}: expected a finite number above 0")

    def _numbers(self) -> Sequence[tuple[str, float]]:
        rows = [("device.memory", self.device.memory), ("device.bandwidth", self.device.bandwidth)]
        rows += [(f"device.peaks.{name}", peak) for name, peak in self.device.peaks.items()]
        for tier in self.tiers:
            rows += [(f"tier {tier.name} size", tier.size), (f"tier {tier.name} bandwidth", tier.bandwidth)]
            rows.append((f"tier {tier.name} latency", tier.latency))
        return rows

    def with_devices(self, devices: int) -> Topology:
        """The same cluster with another number of devices.

        On a host whose processes share its cores, a device is then the share of one of so many: the measured one with
        the nearest number of ranks, at least as many where there is one. Ranks that are fewer or more than its have
        more or fewer of the cores each, down to one, which speeds what they compute, and beyond that fewer turns on
        them, which slows all that they do.
        """
        if not self.shares:
            return replace(self, devices=devices)
        enough = [share for share in self.shares if share.ranks >= devices]
        share = min(enough, key=lambda s: s.ranks) if enough else max(self.shares, key=lambda s: s.ranks)
        cores = self.cores or 1
        turns = max(devices, cores) / max(share.ranks, cores)
        threads = min(devices, cores) / min(share.ranks, cores)
        device = share.device.slowed(turns).narrowed(threads)
        device = replace(device, memory=device.memory * share.ranks / devices)
        return replace(self, devices=devices, device=device, measured=share.measured.slowed(turns).narrowed(threads))

    def tier_index(self, ranks: Sequence[int]) -> int:
        """Index of the innermost tier with a domain that holds all ``ranks``; the last one where none does."""
        for index, tier in enumerate(self.tiers):
            if len({rank // tier.size for rank in ranks}) == 1:
                return index
        return len(self.tiers) - 1
