"""Which rank holds which virtual stage: in a loop (stage s on rank ``s % ranks``), or along a V.

A V goes down the ranks and back up: with two stages a rank, rank r holds stages r and ``2 ranks - 1 - r``. The last
rank hands over to itself, and the first one holds the first and the last stage.
"""

from __future__ import annotations

from plait.core.errors import ScheduleError

V_SHAPED = ("zb-v", "dualpipe-v")
"""Names of schedules whose stages lie along a V; all others lie in a loop."""


def looped(ranks: int, virtual: int = 1) -> tuple[int, ...]:
    """Rank of each of ``ranks * virtual`` stages: 0, 1, ..., 0, 1, ..."""
    require(ranks=ranks, virtual=virtual)
    return tuple(stage % ranks for stage in range(ranks * virtual))


def v_shaped(ranks: int) -> tuple[int, ...]:
    """Rank of each of ``2 * ranks`` stages: 0, 1, ..., 1, 0."""
    require(ranks=ranks)
    return (*range(ranks), *reversed(range(ranks)))


def placement_of(name: str, ranks: int, virtual: int = 1) -> tuple[int, ...]:
    """Rank of each virtual stage under schedule ``name``; a searched one (``auto``) with two stages a rank lies in a V.

    Raises `ScheduleError` where a V is asked for with another number of stages a rank than two.
    """
    if name in V_SHAPED and virtual != 2:
        raise ScheduleError(f"schedule={name} has two stages a rank, so virtual={virtual} does not fit; virtual=2 does")
    along_v = name in V_SHAPED or (name == "auto" and virtual == 2)
    return v_shaped(ranks) if along_v else looped(ranks, virtual)


def require(**sizes: int) -> None:
    """Raise `ScheduleError` for a size below 1."""
    for name, value in sizes.items():
        if value < 1:
            raise ScheduleError(f"{name}={value} makes no schedule; at least 1 is needed")
