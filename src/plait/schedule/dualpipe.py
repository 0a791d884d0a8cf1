"""DualPipe-V: DeepSeek's bidirectional DualPipe cut in half, so that no weight is held twice.

DeepSeek-V3, arXiv:2412.19437, section 3.2.1; https://github.com/deepseek-ai/DualPipe (`DualPipeV.step`, whose eight
steps are numbered as here).
"""

from __future__ import annotations

from plait.schedule.ir import Action, Kind, Schedule
from plait.schedule.placement import require
from plait.schedule.zero_bubble import Row


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """Two stages a rank along a V, forwards of one paired with backwards of the other; up to 2p + 1 microbatch-stages.

    The original runs a pair's forward and backward at once, and hides the messages of one behind the other; here one
    follows the other, and every backward is split, so that its message leaves before its W. For m >= 2p the bubble is
    (p-1)(F + B - W) where W <= B <= F, and never above the original's (p-1)(F&B + B + W - 3W), F&B = F + B + W.
    """
    require(ranks=ranks, microbatches=microbatches)
    count = max(microbatches, 2 * ranks)  # of fewer, the missing ones are taken out of the lists
    rows = []
    for rank in range(ranks):
        row = _row(rank, ranks, count)
        rows.append(tuple(action for action in row if action.microbatch < microbatches))
    return Schedule(name="dualpipe-v", stages=2 * ranks, microbatches=microbatches, ranks=tuple(rows))


def _row(rank: int, ranks: int, count: int) -> list[Action]:
    row = Row(down=rank, up=2 * ranks - 1 - rank)
    distance = ranks - 1 - rank
    whole = (Kind.B, Kind.W)
    # Step 1: nF0.
    for _ in range(2 * distance):
        row.down(Kind.F)
    # Step 2: nF0F1.
    for _ in range(rank + 1):
        row.down(Kind.F)
        row.up(Kind.F)
    # Step 3: nB1W1F1.
    for _ in range(distance):
        row.up(Kind.B, Kind.W, Kind.F)
    # Step 4, the main step: nF0B1F1B0.
    for _ in range(count - 2 * ranks + rank + 1):
        row.down(Kind.F)
        row.up(*whole)
        row.up(Kind.F)
        row.down(*whole)
    # Step 5: nB1F1B0.
    for _ in range(distance):
        row.up(*whole)
        row.up(Kind.F)
        row.down(*whole)
    # Step 6: nB1B0; the W's of its second half wait.
    for index in range(rank + 1):
        row.up(*(whole if 2 * index <= rank else (Kind.B,)))
        row.down(*(whole if 2 * index < rank else (Kind.B,)))
    # Step 7: nWB0, and 8: nW, in the order in which they came to wait.
    waiting = _waiting(row.actions, count)
    for _ in range(distance):
        row.actions.append(waiting.pop(0))
        row.down(Kind.B)
        waiting.append(Action(Kind.W, rank, row.actions[-1].microbatch))
    return row.actions + waiting


def _waiting(actions: list[Action], count: int) -> list[Action]:
    """The W's of the B's that have none yet, in the order of those."""
    done = {(action.stage, action.microbatch) for action in actions if action.kind is Kind.W}
    backwards = [action for action in actions if action.kind is Kind.B]
    return [Action(Kind.W, b.stage, b.microbatch) for b in backwards if (b.stage, b.microbatch) not in done]
