"""Cluster files: a `Topology` as TOML, both ways.

Numbers are SI base units (bytes, bytes/s, FLOP/s, seconds) or strings with a unit: ``"80 GB"``, ``"300 GB/s"``,
``"200 Gbit/s"``, ``"312 TFLOP/s"``, ``"5 us"``. What is missing, unknown or absurd is refused by file, key and value::

    name = "mine"
    devices = 16
    [device]
    name = "A100-80GB-SXM"
    memory = "80 GiB"
    bandwidth = "2.0 TB/s"
    peaks = { bf16 = "312 TFLOP/s" }
    [[tier]]
    name = "nvlink"
    size = 8
    bandwidth = "300 GB/s"
    latency = "5 us"

``[measured]`` and ``[[share]]`` hold what `plait calibrate` found: each point is a row of numbers in the order of its
class's fields.
"""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

from plait.core.errors import ConfigError
from plait.core.fields import nearest_names, toml_value, typed
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

KINDS = ("gpu", "tpu", "cpu")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8", "fp4")
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p")
_FACTORS = {"": 1.0, "n": 1e-9, "u": 1e-6, "µ": 1e-6, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_FACTORS |= {f"{letter}i": 1024.0**power for power, letter in enumerate("KMGTP", start=1)} | {"K": 1e3}


class Quantity(NamedTuple):
    """A kind of number: its unit's spellings with the factor to base units, and the values that make sense."""

    units: Mapping[str, float]
    low: float
    high: float
    example: str


MEMORY = Quantity({"B": 1.0}, 1e6, 1e15, "80 GB")
RATE = Quantity({"FLOP/s": 1.0, "FLOPS": 1.0, "FLOPs": 1.0, "flop/s": 1.0}, 1e8, 1e18, "312 TFLOP/s")
SPEED = Quantity({"B/s": 1.0, "bit/s": 0.125, "bps": 0.125, "b/s": 0.125}, 1e5, 1e15, "300 GB/s")
TIME = Quantity({"s": 1.0}, 1e-9, 10.0, "5 us")
SHARE = Quantity({"of a core": 1.0}, 0.0, 1.0, "0.1 of a core")
TIMES = Quantity({"times": 1.0}, 0.0, 1e3, "1.1 times")
_POINT_TIME = Quantity({"s": 1.0}, 0.0, 1e5, "5 us")
_PEER_SPEED = Quantity(SPEED.units, 0.0, SPEED.high, "25 GB/s")
_SIZE = Quantity({"B": 1.0}, 0.0, 1e15, "64 MiB")


_Point = TypeVar("_Point", GemmPoint, AttentionPoint, CommPoint, MeetingPoint)


_WORDS: Mapping[type, str] = {int: "a whole number", str: "a string", dict: "a table"}


class _Table:
    """A table of the file that knows its place, and that every key of it has to be asked for."""

    def __init__(self, values: object, where: str, known: Sequence[str]) -> None:
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where}: expected a table, found {type(values).__name__}")
        self.values, self.where = values, where
        for key in values:
            if key not in known:
                raise ConfigError(f"{where}.{key} is no key of a cluster file; {nearest_names(str(key), known)}")

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of ``key``; without it ``default``, or ConfigError where that is None."""
        if key not in self.values:
            if default is None:
                raise ConfigError(f"{self.where}.{key} is missing: expected {_WORDS[kind]}")
            return default
        return typed(kind, self.values[key], f"{self.where}.{key}")

    def list_of(self, key: str) -> list[Any]:
        found = self.values.get(key, [])
        if not isinstance(found, list):
            raise ConfigError(f"{self.where}.{key} = {found!r}: expected a list")
        return found

    def number(self, key: str, quantity: Quantity) -> float:
        if key not in self.values:
            raise ConfigError(f'{self.where}.{key} is missing: for example {key} = "{quantity.example}"')
        return number(self.values[key], quantity, f"{self.where}.{key}")

    def figure(self, key: str, quantity: Quantity) -> float | None:
        """`number`, or None where there is none."""
        return self.number(key, quantity) if key in self.values else None

    def choice(self, key: str, known: Sequence[str], default: str) -> str:
        value = self.get(key, str, default)
        if value not in known:
            raise ConfigError(f"{self.where}.{key} = {value!r}: must be one of {', '.join(known)}")
        return str(value)


def number(value: object, quantity: Quantity, where: str) -> float:
    """``value`` in base units, inside the quantity's range; ConfigError names ``where``, value and what is accepted."""
    found = _in_base_units(value, quantity, where)
    if not quantity.low <= found <= quantity.high:
        base = next(iter(quantity.units))
        raise ConfigError(
            f"{where} = {value!r} is absurd: expected {quantity.low:g} to {quantity.high:g} {base}; "
            f'a number is in {base}, or give a unit: "{quantity.example}"'
        )
    return found


def _in_base_units(value: object, quantity: Quantity, where: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf:
        return float(value)
    match = (
        re.fullmatch(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([^\s0-9].*?)?\s*", value) if isinstance(value, str) else None
    )
    if match is not None:
        text, unit = match.groups(default="")
        for spelling, factor in quantity.units.items():
            prefix = unit.removesuffix(spelling)
            if unit.endswith(spelling) and prefix in _FACTORS:
                try:
                    return float(text) * _FACTORS[prefix] * factor
                except ValueError:
                    break
    raise ConfigError(
        f"{where} = {value!r}: expected a number in {next(iter(quantity.units))}, or one with its unit, "
        f'as in "{quantity.example}"'
    )


def load(path: str | Path) -> Topology:
    """The cluster of a file. ConfigError says what is missing, unknown or absurd in it."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cluster file {path} cannot be read: {why}") from error
    return parse(text, str(path))


def parse(text: str, where: str = "cluster") -> Topology:
    """The cluster of a file's ``text``; ``where`` names the file in errors."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is no TOML: {error}") from error
    table = _Table(values, where, ("name", "devices", "cores", "source", "device", "tier", "measured", "share"))
    tiers = tuple(_tier(tier, f"{where}.tier[{i}]") for i, tier in enumerate(table.list_of("tier")))
    names = tuple(tier.name for tier in tiers)
    cores = table.get("cores", int, 0)
    if "cores" in values and cores < 1:
        raise ConfigError(f"{where}.cores = {cores}: at least 1")
    return Topology(
        name=table.get("name", str, Path(where).stem),
        devices=table.get("devices", int),
        device=_device(table.get("device", dict), f"{where}.device"),
        tiers=tiers,
        measured=_measured(table.get("measured", dict, {}), f"{where}.measured", names),
        cores=cores or None,
        shares=tuple(_share(share, f"{where}.share[{i}]", names) for i, share in enumerate(table.list_of("share"))),
        source=table.get("source", str, ""),
    )


def _device(values: object, where: str) -> Device:
    table = _Table(values, where, [field.name for field in dataclasses.fields(Device)])
    peaks = _Table(table.get("peaks", dict), f"{where}.peaks", PRECISIONS)
    if not peaks.values:
        raise ConfigError(f'{where}.peaks is empty: give one precision at least, as in bf16 = "{RATE.example}"')
    return Device(
        name=table.get("name", str),
        memory=table.number("memory", MEMORY),
        peaks={precision: peaks.number(precision, RATE) for precision in peaks.values},
        bandwidth=table.number("bandwidth", SPEED),
        kind=table.choice("kind", KINDS, "gpu"),
        source=table.get("source", str, ""),
    )


def _tier(values: object, where: str) -> Tier:
    table = _Table(values, where, [field.name for field in dataclasses.fields(Tier)])
    size = table.get("size", int)
    if size < 1:
        raise ConfigError(f"{where}.size = {size}: expected the number of devices of a domain, at least 1")
    return Tier(
        name=table.get("name", str),
        size=size,
        bandwidth=table.number("bandwidth", SPEED),
        latency=table.number("latency", TIME),
        source=table.get("source", str, ""),
    )


def _share(values: object, where: str, tiers: Sequence[str]) -> Share:
    table = _Table(values, where, ("ranks", "device", "measured"))
    ranks = table.get("ranks", int)
    if ranks < 1:
        raise ConfigError(f"{where}.ranks = {ranks}: at least 1")
    device = _device(table.get("device", dict), f"{where}.device")
    measured = _measured(table.get("measured", dict, {}), f"{where}.measured", tiers)
    return Share(ranks=ranks, device=device, measured=measured)


def _measured(values: object, where: str, tiers: Sequence[str]) -> Measured:
    table = _Table(values, where, [field.name for field in dataclasses.fields(Measured)])
    links = table.list_of("links")
    if any(not isinstance(row, list) or len(row) != len(links) for row in links):
        raise ConfigError(f"{where}.links: expected a square matrix of bytes/s, a row for each rank")
    return Measured(
        gemm=tuple(_points(GemmPoint, table, "gemm")),
        attention=tuple(_points(AttentionPoint, table, "attention")),
        comm=tuple(_points(CommPoint, table, "comm", tiers)),
        meetings=tuple(_points(MeetingPoint, table, "meetings")),
        bandwidth=table.figure("bandwidth", SPEED),
        optimizer_bandwidth=table.figure("optimizer_bandwidth", SPEED),
        launch=table.figure("launch", TIME),
        waiting=table.figure("waiting", SHARE),
        crowding=table.figure("crowding", TIMES),
        busy=table.figure("busy", SHARE),
        spread=table.figure("spread", TIMES),
        links=tuple(tuple(number(item, _PEER_SPEED, f"{where}.links") for item in row) for row in links),
    )


def _points(kind: type[_Point], table: _Table, key: str, tiers: Sequence[str] = ()) -> Iterator[_Point]:
    """The rows of ``key``, each the values of one point in the order of its class's fields."""
    hints = get_type_hints(kind)
    for index, row in enumerate(table.list_of(key)):
        where = f"{table.where}.{key}[{index}]"
        if not isinstance(row, list) or not len(hints) - (kind is GemmPoint) <= len(row) <= len(hints):
            raise ConfigError(f"{where}: expected a row [{', '.join(hints)}]")
        values = {name: _value(hints[name], name, item, where) for name, item in zip(hints, row, strict=False)}
        if "tier" in values and values["tier"] not in tiers:
            raise ConfigError(f"{where}: tier {values['tier']!r} is none of {', '.join(tiers)}")
        yield kind(**values)


def _value(kind: type, name: str, item: object, where: str) -> Any:
    known = {"op": OPERATIONS, "precision": PRECISIONS}.get(name)
    if known is not None and item not in known:
        raise ConfigError(f"{where}: {name} = {item!r}: must be one of {', '.join(known)}")
    if kind is float:
        return number(item, _SIZE if name == "size" else _POINT_TIME, f"{where} {name}")
    value = typed(kind, item, f"{where} {name}")
    if kind is int and value < 1:
        raise ConfigError(f"{where}: {name} = {value}: at least 1")
    return value


def dump(topology: Topology) -> str:
    """The text of a cluster file that `parse` reads back as ``topology``."""
    lines = [f"name = {toml_value(topology.name)}", f"devices = {topology.devices}"]
    if topology.cores is not None:
        lines.append(f"cores = {topology.cores}")
    lines += [*_source(topology.source), "", "[device]", *_device_lines(topology.device)]
    for tier in topology.tiers:
        lines += ["", "[[tier]]", f"name = {toml_value(tier.name)}", f"size = {tier.size}"]
        lines += [f"bandwidth = {tier.bandwidth!r}", f"latency = {tier.latency!r}", *_source(tier.source)]
    if topology.measured != Measured():
        lines += ["", "[measured]", *_measured_lines(topology.measured)]
    for share in topology.shares:
        lines += ["", "[[share]]", f"ranks = {share.ranks}", "[share.device]", *_device_lines(share.device)]
        lines += ["[share.measured]", *_measured_lines(share.measured)]
    return "\n".join(lines) + "\n"


def _source(text: str) -> list[str]:
    return [f"source = {toml_value(text)}"] if text else []


def _device_lines(device: Device) -> list[str]:
    lines = [f"name = {toml_value(device.name)}", f"kind = {toml_value(device.kind)}"]
    lines += [f"memory = {device.memory!r}", f"bandwidth = {device.bandwidth!r}", f"peaks = {toml_value(device.peaks)}"]
    return lines + _source(device.source)


def _measured_lines(measured: Measured) -> list[str]:
    lines = []
    for field in dataclasses.fields(Measured):
        value = getattr(measured, field.name)
        if isinstance(value, tuple) and value:
            rows = [list(row if isinstance(row, tuple) else dataclasses.astuple(row)) for row in value]
            lines += [f"{field.name} = [", *(f"    {toml_value(row)}," for row in rows), "]"]
        elif isinstance(value, float):
            lines.append(f"{field.name} = {value!r}")
    return lines
