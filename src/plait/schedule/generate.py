"""Schedules by name: pure functions of the number of ranks, microbatches and virtual stages a rank.

They emit compute only (`plait.schedule.lower` adds communication). `plait.schedule.placement` says which rank holds
which stage.
"""

from __future__ import annotations

import difflib
import itertools
import math

from plait.core.errors import ScheduleError
from plait.schedule.dualpipe import dualpipe_v
from plait.schedule.ir import Action, Kind, Schedule
from plait.schedule.placement import V_SHAPED, placement_of, require
from plait.schedule.zero_bubble import zb_h1, zb_h2, zb_v

NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v")
"""What `generate` knows."""


def generate(name: str, *, ranks: int, microbatches: int, virtual: int = 1) -> Schedule:
    """The training schedule ``name`` with ``virtual`` stages a rank. Raises `ScheduleError` where there is none."""
    if name not in NAMES:
        nearest = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.0)[0]
        raise ScheduleError(f"schedule={name!r} is unknown; the nearest is {nearest!r}, all are {', '.join(NAMES)}")
    if name == "interleaved":
        return interleaved(ranks, microbatches, virtual)
    if name in V_SHAPED:
        placement_of(name, ranks, virtual)  # refuses what is no V
        return zb_v(ranks, microbatches) if name == "zb-v" else dualpipe_v(ranks, microbatches)
    if virtual != 1:
        raise ScheduleError(
            f"schedule={name} has one stage a rank, so virtual={virtual} does not fit; "
            "virtual=1 does, or schedule=interleaved"
        )
    plain = {"gpipe": gpipe, "1f1b": one_f_one_b, "zb-h1": zb_h1, "zb-h2": zb_h2}
    return plain[name](ranks, microbatches)


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards. Huang et al. 2019, arXiv:1811.06965, figure 2c.

    Bubble (p-1)/m of the ideal time; all m microbatches are live.
    """
    require(ranks=ranks, microbatches=microbatches)
    order = range(microbatches)
    rows = [[Action(kind, rank, m) for kind in (Kind.F, Kind.B) for m in order] for rank in range(ranks)]
    return _schedule("gpipe", ranks, microbatches, rows)


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """1F1B with a flush. Narayanan et al. 2019, arXiv:1806.03377, section 3.2; 2021, arXiv:2104.04473, figure 4.

    Bubble (p-1)/m as GPipe's, but stage i holds min(m, p-i) live microbatches at most.
    """
    require(ranks=ranks, microbatches=microbatches)
    rows = []
    for rank in range(ranks):
        forwards = [Action(Kind.F, rank, m) for m in range(microbatches)]
        backwards = [Action(Kind.B, rank, m) for m in range(microbatches)]
        rows.append(_one_for_one(forwards, backwards, warmup=ranks - 1 - rank))
    return _schedule("1f1b", ranks, microbatches, rows)


def interleaved(ranks: int, microbatches: int, virtual: int) -> Schedule:
    """1F1B over ``virtual`` stages a rank. Narayanan et al. 2021, arXiv:2104.04473, section 2.2 and figure 4.

    Bubble (p-1)/(v m) of the ideal time for every m >= p; p need not divide m. Rank r holds up to
    min(v m, 2(p-1-r) + (v-1) g + 1) live microbatch-stages, g the size of the largest group of microbatches
    (`_groups`). ``virtual=1`` is plain 1F1B.
    """
    require(ranks=ranks, microbatches=microbatches, virtual=virtual)
    groups = _groups(ranks, microbatches)
    rows = []
    for rank in range(ranks):
        # Phase 0: a rank takes a group through its first stage, then through its second, ...; backwards in reverse.
        stages = range(rank, ranks * virtual, ranks)
        forwards = [Action(Kind.F, stage, m) for group in groups for stage in stages for m in group]
        backwards = [Action(Kind.B, stage, m) for group in groups for stage in reversed(stages) for m in group]
        # The first backward comes once the first group is through all stages but the last. A slot of 1F1B moves a
        # microbatch one rank on and a gradient one rank back, hence twice the distance to the last rank.
        distance = ranks - 1 - rank
        warmup = distance if virtual == 1 else 2 * distance + (virtual - 1) * max(map(len, groups))
        rows.append(_one_for_one(forwards, backwards, warmup=warmup))
    return _schedule("interleaved", ranks * virtual, microbatches, rows)


def forward_only(ranks: int, microbatches: int, virtual: int = 1) -> Schedule:
    """Forwards alone, for evaluation, in the order of `interleaved`."""
    require(ranks=ranks, microbatches=microbatches, virtual=virtual)
    groups = _groups(ranks, microbatches)
    rows = [
        [Action(Kind.F, stage, m) for group in groups for stage in range(rank, ranks * virtual, ranks) for m in group]
        for rank in range(ranks)
    ]
    return _schedule("forward", ranks * virtual, microbatches, rows)


def forward_only_v(ranks: int, microbatches: int) -> Schedule:
    """Forwards alone over two stages a rank along a V, in the time of 2m + 2(p-1) forwards of a stage.

    No order is faster: the last rank begins p-1 forwards late, has 2m, and what it ends with has p-1 more to go.
    """
    require(ranks=ranks, microbatches=microbatches)
    rows = []
    for rank in range(ranks):
        down = [Action(Kind.F, rank, m) for m in range(microbatches)]
        up = [Action(Kind.F, 2 * ranks - 1 - rank, m) for m in range(microbatches)]
        # The first microbatch is back up after twice the distance to the last rank.
        rows.append(_one_for_one(down, up, warmup=2 * (ranks - 1 - rank)))
    return _schedule("forward", 2 * ranks, microbatches, rows)


def _one_for_one(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    warmup = min(warmup, len(forwards))
    # Phase 1, warm-up: forwards, until the first backward can come back from the last stage.
    row = forwards[:warmup]
    # Phase 2, steady: one forward, one backward; the number of live microbatches stays.
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        row += [forward, backward]
    # Phase 3, cool-down: the backwards of what is still in flight.
    return row + backwards[len(forwards) - warmup :]


def _groups(ranks: int, microbatches: int) -> list[range]:
    """Cut the microbatches into consecutive groups of at least ``ranks``, as even as possible; all in one if fewer.

    A smaller last group, as Megatron cuts it, has the first rank wait for its microbatches to come round from the last
    rank, and deadlocks for some sizes under this warm-up; larger groups cost memory but no time.
    """
    count = max(1, microbatches // ranks)
    bounds = [math.ceil(index * microbatches / count) for index in range(count + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]


def _schedule(name: str, stages: int, microbatches: int, rows: list[list[Action]]) -> Schedule:
    return Schedule(name=name, stages=stages, microbatches=microbatches, ranks=tuple(map(tuple, rows)))
