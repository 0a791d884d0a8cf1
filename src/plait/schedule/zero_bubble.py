"""Zero-bubble schedules: W, the weight-gradient half of a split backward, fills what 1F1B leaves idle.

ZB-H1 and ZB-H2: Qi et al. 2023, arXiv:2401.10241, section 2. ZB-V: there section 6, and as the V-ZB of Qi et al. 2024,
arXiv:2405.15362. F, B and W below are the times of the three kinds of action in one stage.
"""

from __future__ import annotations

from plait.schedule.ir import Action, Kind, Schedule
from plait.schedule.placement import require


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B's warm-up; rank r runs its W's r microbatches late, so that every rank holds min(m, p) microbatches at most.

    Bubble (p-1)(F + B - W) on every rank for W <= F: a third of 1F1B's where F = B = W.
    """
    return _handcrafted("zb-h1", ranks, microbatches, stretch=1)


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """Twice ZB-H1's warm-up and delay of W: every rank holds up to min(m, 2p-1) microbatches.

    For W <= F, a rank idles (p-1)(F + B - 2W) between its own first and last action: nothing where F = B = W. A step
    that ends with a norm over all ranks takes the (p-1) F until the last rank has begun as well, and there it gains
    nothing over ZB-H1 where F = B = W.
    """
    return _handcrafted("zb-h2", ranks, microbatches, stretch=2)


def _handcrafted(name: str, ranks: int, microbatches: int, *, stretch: int) -> Schedule:
    require(ranks=ranks, microbatches=microbatches)
    rows = []
    for rank in range(ranks):
        warmup = min(stretch * (ranks - 1 - rank), microbatches)
        delay = stretch * rank
        # Phase 1, warm-up: forwards, until the first backward can come back from the last stage.
        row = [Action(Kind.F, rank, m) for m in range(warmup)]
        # Phase 2, steady, and 3, cool-down (without the F's): the W of `delay` microbatches before follows each B.
        for m in range(microbatches):
            if warmup + m < microbatches:
                row.append(Action(Kind.F, rank, warmup + m))
            row.append(Action(Kind.B, rank, m))
            if m >= delay:
                row.append(Action(Kind.W, rank, m - delay))
        # Phase 4: the W's that are left, while B's go on to the first rank.
        row += [Action(Kind.W, rank, m) for m in range(max(0, microbatches - delay), microbatches)]
        rows.append(tuple(row))
    return Schedule(name=name, stages=ranks, microbatches=microbatches, ranks=tuple(rows))


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Two stages a rank along a V; no rank holds more than 2p microbatch-stages, as much as 1F1B's first rank.

    For F = B = W a rank never idles between its own first and last action (m >= 2p - 1).
    """
    require(ranks=ranks, microbatches=microbatches)
    # The phases fit any number of microbatches from here on; of fewer, the missing ones are taken out of the lists.
    count = max(microbatches, 2 * ranks - 1)
    rows = []
    for rank in range(ranks):
        row = _v_row(rank, ranks, count)
        rows.append(tuple(action for action in row if action.microbatch < microbatches))
    return Schedule(name="zb-v", stages=2 * ranks, microbatches=microbatches, ranks=tuple(rows))


def _v_row(rank: int, ranks: int, count: int) -> list[Action]:
    row = Row(down=rank, up=2 * ranks - 1 - rank)
    distance = ranks - 1 - rank
    # Phase 1: forwards on the way down, until the first microbatch comes back up.
    for _ in range(2 * distance + 1):
        row.down(Kind.F)
    # Phase 2: one up, one down, until the first backward comes down.
    for _ in range(rank):
        row.up(Kind.F)
        row.down(Kind.F)
    # Phase 3: the way up is whole; its backwards begin.
    for _ in range(distance + 1):
        row.up(Kind.F, Kind.B, Kind.W)
    # Phase 4, steady: each stage one forward and one backward.
    while row.count(Kind.F, up=True) < count:
        if row.count(Kind.F, up=False) < count:
            row.down(Kind.F)
        row.down(Kind.B, Kind.W)
        row.up(Kind.F, Kind.B, Kind.W)
    # Phase 5: backwards alone, whose W's wait.
    for _ in range(rank):
        row.down(Kind.B)
        row.up(Kind.B)
    for _ in range(distance + 1):
        row.down(Kind.B, Kind.W)
    # Phase 6: the W's that are left.
    for _ in range(count - row.count(Kind.W, up=True)):
        row.up(Kind.W)
    for _ in range(count - row.count(Kind.W, up=False)):
        row.down(Kind.W)
    return row.actions


class Row:
    """The list of one rank of a V as it grows: stage ``down`` on the way down, ``up`` on the way back.

    Each kind of each stage takes the microbatches in order.
    """

    def __init__(self, *, down: int, up: int) -> None:
        self.actions: list[Action] = []
        self._stages = (down, up)
        self._next: dict[tuple[Kind, int], int] = {}

    def down(self, *kinds: Kind) -> None:
        """The next microbatch of each of ``kinds``, in the stage on the way down."""
        self._append(kinds, self._stages[0])

    def up(self, *kinds: Kind) -> None:
        """The same in the stage on the way up."""
        self._append(kinds, self._stages[1])

    def count(self, kind: Kind, *, up: bool) -> int:
        """Microbatches that ``kind`` of the stage has taken."""
        return self._next.get((kind, self._stages[up]), 0)

    def _append(self, kinds: tuple[Kind, ...], stage: int) -> None:
        for kind in kinds:
            microbatch = self._next.get((kind, stage), 0)
            self._next[kind, stage] = microbatch + 1
            self.actions.append(Action(kind, stage, microbatch))
