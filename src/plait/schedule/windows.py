"""PipeDream-2BW: 1F1B that never flushes, on two versions of the weights. Narayanan et al. 2021, arXiv:2006.09503.

One optimizer step has one *window* of actions. In it a rank runs the backwards of the step's own group of m
microbatches, and the forwards that 1F1B has run ahead by then: p-1-r of the next group on rank r. Their activations
stay in flight across the update, so the pipeline never drains.

**Versions.** Let w(t) be the weights after t updates. Group t runs, forward and backward, on ``w(max(t - 1, 0))``
(`version_of`): of w(t), which window t - 1 makes, its first forwards are too early. So gradients are one update late,
w(t+1) = w(t) - lr * gradient of group t at w(t-1), and two versions are enough as long as m >= p - 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from plait.core.errors import ScheduleError
from plait.schedule.check import check
from plait.schedule.grid import refusal
from plait.schedule.ir import Action, Kind, Schedule
from plait.schedule.order import messages, partner
from plait.schedule.placement import require


def version_of(group: int) -> int:
    """Updates that the weights have had on which ``group`` runs, forward and backward."""
    return max(group - 1, 0)


@dataclass(frozen=True, kw_only=True)
class Windows:
    """The lowered lists of each optimizer step. Microbatch ``m + j`` in a window is microbatch j of the next step.

    Every message of a window is sent and received in it, though what is received last is computed on in the next.
    """

    first: Schedule
    """Fills the pipeline. ``microbatches`` of each of the four is m, though its actions go beyond."""
    steady: Schedule
    last: Schedule
    """Runs no forward of a next step."""
    only: Schedule
    """First and last at once, of a run of one step: 1F1B with its flush."""

    @property
    def microbatches(self) -> int:
        """Microbatches of one step."""
        return self.steady.microbatches

    def of(self, step: int, steps: int, *, start: int = 0) -> Schedule:
        """The window of ``step`` in a run of the steps ``start .. steps - 1``."""
        if steps == start + 1:
            return self.only
        if step == start:
            return self.first
        return self.last if step == steps - 1 else self.steady

    def unrolled(self, steps: int) -> Schedule:
        """A run of ``steps`` as one lowered schedule with one flush, for the checker, the simulator and the grid.

        Microbatches are numbered through; of each stage's REDUCE only that of the last step stays.
        """
        rows: list[list[Action]] = [[] for _ in self.steady.ranks]
        for step in range(steps):
            for row, window in zip(rows, self.of(step, steps).ranks, strict=True):
                kept = (action for action in window if action.kind is not Kind.REDUCE or step == steps - 1)
                row += [shifted(action, step * self.microbatches) for action in kept]
        return Schedule(
            name=self.steady.name,
            stages=self.steady.stages,
            microbatches=steps * self.microbatches,
            ranks=tuple(map(tuple, rows)),
        )


def shifted(action: Action, by: int) -> Action:
    """``action`` of a microbatch ``by`` later; a REDUCE has none and stays."""
    return action if action.kind is Kind.REDUCE else Action(action.kind, action.stage, action.microbatch + by)


def two_bw(ranks: int, microbatches: int) -> Windows:
    """1F1B without flush over steps of ``microbatches``. Raises `ScheduleError` for fewer than ``ranks - 1``."""
    require(ranks=ranks, microbatches=microbatches)
    if microbatches < ranks - 1:
        raise ScheduleError(
            f"schedule=2bw with {microbatches} microbatches on {ranks} ranks: rank 0 would run ahead by more than a "
            "step, onto a third version of the weights; "
            f"what works: at least {ranks - 1} microbatches, or pp={microbatches + 1}"
        )

    def window(*, first: bool, last: bool) -> Schedule:
        rows = tuple(tuple(_row(rank, ranks, microbatches, first=first, last=last)) for rank in range(ranks))
        return Schedule(name="2bw", stages=ranks, microbatches=microbatches, ranks=rows)

    return Windows(
        first=window(first=True, last=False),
        steady=window(first=False, last=False),
        last=window(first=False, last=True),
        only=window(first=True, last=True),
    )


def _row(rank: int, ranks: int, microbatches: int, *, first: bool, last: bool) -> Iterator[Action]:
    ahead = ranks - 1 - rank
    stop = microbatches if last else microbatches + ahead + 1  # the first forward that is not received here any more

    def received(m: int) -> Iterator[Action]:
        if rank > 0 and m < stop:
            yield Action(Kind.RECV_F, rank, m)

    def forward(m: int) -> Iterator[Action]:
        if m < stop:
            yield Action(Kind.F, rank, m)
            if rank < ranks - 1:
                yield Action(Kind.SEND_F, rank, m)

    # Phase 1, once a run: forwards, until the first backward can come back from the last stage.
    for m in range(ahead if first else 0):
        yield from received(m)
        yield from forward(m)
    if first:
        yield from received(ahead)
    # Phase 2: one forward, one backward. The input of the next forward comes while this one's neighbour computes it.
    for m in range(microbatches):
        yield from forward(ahead + m)
        yield from received(ahead + m + 1)
        if rank < ranks - 1:
            yield Action(Kind.RECV_B, rank, m)
        yield Action(Kind.B, rank, m)
        if rank > 0:
            yield Action(Kind.SEND_B, rank, m)
    yield Action(Kind.REDUCE, rank)


def check_windows(windows: Windows) -> tuple[int, ...]:
    """Prove ``windows`` right; returns what each rank holds at most, in microbatch-stages.

    Runs of one to four steps pass `check` (complete, in order, free of deadlock); in every window, each backward is of
    the window's own step, no forward is of a later step than the next, the REDUCE of every stage comes last, and every
    message that is sent is received. Raises `ScheduleError` with the reason and the window's grid.
    """
    m = windows.microbatches
    for window in (windows.first, windows.steady, windows.last, windows.only):
        for row in window.ranks:
            for action in row:
                backward = action.kind in (Kind.B, Kind.W)
                if action.kind is not Kind.REDUCE and not 0 <= action.microbatch < (m if backward else 2 * m):
                    which = "its own step" if backward else "its own step or the next"
                    raise refusal(window, f"{action} is not of {which}, which have {m} microbatches each", action)
            stages = {action.stage for action in row}
            if {action.stage for action in row[-len(stages) :] if action.kind is Kind.REDUCE} != stages:
                raise refusal(window, "the REDUCE of a stage does not end its rank's list", row[-1])
        _check_messages(window)
    for steps in range(1, 4):
        check(windows.unrolled(steps))
    return check(windows.unrolled(4)).live


def _check_messages(window: Schedule) -> None:
    actions = {action for row in window.ranks for action in row}
    twice = Schedule(  # both groups that a window's messages may be of
        name=window.name, stages=window.stages, microbatches=2 * window.microbatches, ranks=window.ranks
    )
    for send in messages(twice):
        if (send in actions) != (partner(send) in actions):
            alone = send if send in actions else partner(send)
            raise refusal(window, f"{alone} has no partner in its window", alone)
