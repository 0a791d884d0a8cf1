"""What else a host does while it is measured: the share of its cores that other programs take."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import cast

from plait.comm.world import World
from plait.train.exchange import gather_json


@dataclass(frozen=True, kw_only=True)
class Moment:
    """When it was, and processor seconds until then: of all cores of this host (None: unknown), and of this process."""

    at: float
    host: float | None
    own: float


def moment() -> Moment:
    """Now."""
    times = os.times()
    return Moment(at=perf_counter(), host=_worked(), own=times.user + times.system)


def foreign(world: World, hosts: Sequence[Sequence[int]], since: Moment) -> float | None:
    """Share of a host's cores that no rank took since then, the most of any host; None where it cannot be told.

    ``hosts``: the ranks of each. Every rank calls this.
    """
    now = moment()
    host = None if now.host is None or since.host is None else now.host - since.host
    room = (now.at - since.at) * (os.cpu_count() or 1)
    rows = cast("list[tuple[float | None, float, float]]", gather_json(world, [host, now.own - since.own, room]))
    shares = []
    for ranks in hosts:
        worked, _, room = rows[ranks[0]]
        if worked is None:
            return None
        shares.append(max(0.0, worked - sum(rows[rank][1] for rank in ranks)) / room)
    return min(1.0, max(shares))


def _worked() -> float | None:
    """Seconds that the cores of this host have worked, those that a hypervisor kept from it included (proc(5))."""
    file = Path("/proc/stat")
    if not file.is_file():
        return None
    user, nice, system, _, _, *rest = map(int, file.read_text(encoding="ascii").split("\n", 1)[0].split()[1:9])
    return float(user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")
