"""The pipeline IR: an `Action` is (kind, stage, microbatch), a `Schedule` is one list of actions a rank.

Both have a text form that parses back::

    schedule 1f1b stages=2 microbatches=2
    0: 0F0 0F1 0B0 0B1
    1: 1F0 1B0 1F1 1B1

Lines may end in ``#`` comments. Without the header the sizes follow from the actions. What makes a schedule *right*
is not decided here but in `plait.schedule.check`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Self

from plait.core.errors import ScheduleError


class Kind(StrEnum):
    """What an action does; the value is its text."""

    F = "F"
    """Forward of one microbatch through one stage."""
    B = "B"
    """Backward; only its input-gradient half where the stage also has `W` actions."""
    W = "W"
    """Weight-gradient half of a split backward."""
    SEND_F = "SEND_F"
    """Start sending the stage's output to the next stage."""
    RECV_F = "RECV_F"
    """Receive the stage's input from the previous stage."""
    SEND_B = "SEND_B"
    """Start sending the gradient of the stage's input to the previous stage."""
    RECV_B = "RECV_B"
    """Receive the gradient of the stage's output from the next stage."""
    REDUCE = "REDUCE"
    """The stage's gradients of this step are complete on this rank: reduce them over the data axes."""


COMPUTE_KINDS = (Kind.F, Kind.B, Kind.W)
"""The kinds that occupy the device; generated schedules hold no others."""
NO_MICROBATCH = -1
"""`Action.microbatch` of a ``REDUCE``, which belongs to a whole step."""

_ACTION = re.compile(r"(\d{1,6})(?:(F|B|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d{1,6})|(REDUCE))", re.ASCII)
_RANK = re.compile(r"(\d{1,6}):(.*)", re.ASCII)
_SIZE = re.compile(r"(stages|microbatches)=(\d{1,6})", re.ASCII)
_NAME = re.compile(r"[^\s#=]+")


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a rank's list, written ``2F0``, ``3SEND_F1`` or ``2REDUCE``."""

    kind: Kind
    stage: int
    microbatch: int = NO_MICROBATCH

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.kind is Kind.REDUCE else self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Inverse of ``str``. Raises `ScheduleError` on anything else."""
        found = _ACTION.fullmatch(text)
        if found is None:
            raise ScheduleError(f"{text!r} is not an action such as 2F0, 2B0, 2W0, 2SEND_F0, 2RECV_B0 or 2REDUCE")
        stage, kind, microbatch, reduce = found.groups()
        return cls(Kind.REDUCE, int(stage)) if reduce else cls(Kind(kind), int(stage), int(microbatch))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One list of actions a pipeline rank, in the order in which the rank starts them.

    ``stages`` counts virtual stages (over all ranks), ``microbatches`` those of one step. A stage with any `Kind.W`
    action splits its backward. A schedule without any `Kind.B` is forward-only (evaluation).
    """

    name: str
    stages: int
    microbatches: int
    ranks: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ScheduleError(f"schedule name {self.name!r} is not one word without spaces, '#' or '='")
        for what, value in (("stages", self.stages), ("microbatches", self.microbatches), ("ranks", len(self.ranks))):
            if value < 1:
                raise ScheduleError(f"schedule {self.name}: {what}={value}, at least 1 is needed")

    @cached_property
    def homes(self) -> dict[int, int]:
        """Stage -> the first rank whose list mentions it; defined for broken schedules too, unlike `placement`."""
        found: dict[int, int] = {}
        for rank, row in enumerate(self.ranks):
            for action in row:
                found.setdefault(action.stage, rank)
        return found

    @property
    def placement(self) -> tuple[int, ...]:
        """Rank of each stage. Raises `ScheduleError` where a stage is on no rank."""
        missing = next((stage for stage in range(self.stages) if stage not in self.homes), None)
        if missing is not None:
            raise ScheduleError(f"schedule {self.name}: stage {missing} of {self.stages} is on no rank")
        return tuple(self.homes[stage] for stage in range(self.stages))

    @cached_property
    def splits(self) -> frozenset[int]:
        """The stages whose backward is split into `Kind.B` and `Kind.W`."""
        return frozenset(action.stage for row in self.ranks for action in row if action.kind is Kind.W)

    @cached_property
    def forward_only(self) -> bool:
        """True where the schedule holds no backward (evaluation)."""
        return not any(action.kind is Kind.B for row in self.ranks for action in row)

    @cached_property
    def lowered(self) -> bool:
        """True where the lists hold communication (`plait.schedule.lower`), False where they are compute only."""
        return any(action.kind not in COMPUTE_KINDS for row in self.ranks for action in row)

    def compute_only(self) -> Schedule:
        """This schedule without its communication."""
        rows = tuple(tuple(action for action in row if action.kind in COMPUTE_KINDS) for row in self.ranks)
        return Schedule(name=self.name, stages=self.stages, microbatches=self.microbatches, ranks=rows)

    def text(self) -> str:
        """The text form; `parse` gives back an equal schedule."""
        lines = [f"schedule {self.name} stages={self.stages} microbatches={self.microbatches}"]
        lines += [f"{rank}: {' '.join(map(str, row))}".rstrip() for rank, row in enumerate(self.ranks)]
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text form. Raises `ScheduleError` naming the line and the token that cannot be read."""
        header: _Header | None = None
        rows: dict[int, tuple[Action, ...]] = {}
        for number, raw in enumerate(text.splitlines(), 1):
            line = raw.partition("#")[0].strip()
            if not line:
                continue
            if line.split()[0] == "schedule":
                if header is not None or rows:
                    raise _unreadable(number, "schedule", "the header comes once, before the ranks")
                header = _header(number, line.split()[1:])
                continue
            rank, row = _row(number, line, header or _Header())
            if rank in rows:
                raise _unreadable(number, f"{rank}:", f"rank {rank} has a list already")
            rows[rank] = row
        if not rows:
            raise ScheduleError("the schedule text has no rank line such as '0: 0F0 0B0'")
        absent = next((rank for rank in range(len(rows)) if rank not in rows), None)
        if absent is not None:
            raise ScheduleError(f"the schedule text has {len(rows)} ranks up to rank {max(rows)}, but no rank {absent}")
        header = header or _Header()
        actions = [action for row in rows.values() for action in row]
        return cls(
            name=header.name,
            stages=header.stages or 1 + max((action.stage for action in actions), default=0),
            microbatches=header.microbatches or 1 + max([0, *(action.microbatch for action in actions)]),
            ranks=tuple(rows[rank] for rank in range(len(rows))),
        )


@dataclass(frozen=True, kw_only=True)
class _Header:
    """What a header line said; 0 where it said nothing."""

    name: str = "custom"
    stages: int = 0
    microbatches: int = 0


def _unreadable(line: int, token: str, reason: str) -> ScheduleError:
    return ScheduleError(f"schedule text, line {line}, at {token!r}: {reason}")


def _header(line: int, tokens: list[str]) -> _Header:
    name = ""
    sizes: dict[str, int] = {}
    for token in tokens:
        found = _SIZE.fullmatch(token)
        if found is not None and found[1] not in sizes:
            sizes[found[1]] = int(found[2])
            if sizes[found[1]] < 1:
                raise _unreadable(line, token, "at least 1 is needed")
        elif found is None and not name and not sizes and _NAME.fullmatch(token):
            name = token
        else:
            raise _unreadable(line, token, "the header is 'schedule NAME stages=N microbatches=N'")
    return _Header(name=name or _Header.name, stages=sizes.get("stages", 0), microbatches=sizes.get("microbatches", 0))


def _row(line: int, text: str, header: _Header) -> tuple[int, tuple[Action, ...]]:
    found = _RANK.fullmatch(text)
    if found is None:
        raise _unreadable(line, text.split()[0], "a rank line such as '0: 0F0 0B0' is wanted")
    row: list[Action] = []
    for token in found[2].split():
        try:
            action = Action.parse(token)
        except ScheduleError as error:
            raise _unreadable(line, token, str(error)) from None
        if header.stages and action.stage >= header.stages:
            raise _unreadable(line, token, f"stage {action.stage} is not among {header.stages} stages")
        if header.microbatches and action.microbatch >= header.microbatches:
            reason = f"microbatch {action.microbatch} is not among {header.microbatches} microbatches"
            raise _unreadable(line, token, reason)
        row.append(action)
    return int(found[1]), tuple(row)
