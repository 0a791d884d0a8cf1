"""A save whose files lie in the memory of several hosts, each on two of them: who writes, sends and keeps what.

As in Gemini (Wang et al., SOSP 2023): the hosts form a ring, and what host h alone holds is sent to host h + 1. What
ranks of several hosts hold anyway (copies along the data axes) is sent to nobody: one rank writes it, and its *twin*,
a holder on another host, writes the very same file from its own memory. Pure arithmetic, the same on every rank
without a word; the files' sums, which the ranks compare, show that twins hold the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from plait.checkpoint.layout import Run, share
from plait.checkpoint.state import Link, Piece

if TYPE_CHECKING:
    from plait.checkpoint.writer import ShardRecord


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Which rank is on which host: ``of[rank]`` is the host's number, counted from 0 in the order of their ranks."""

    of: tuple[int, ...]

    @classmethod
    def named(cls, names: Sequence[str]) -> Self:
        """By a name of each rank's host, in rank order."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return cls(of=tuple(numbers[name] for name in names))

    @property
    def count(self) -> int:
        """How many hosts there are."""
        return max(self.of) + 1

    def ranks(self, host: int) -> tuple[int, ...]:
        """The ranks on ``host``."""
        return tuple(rank for rank, where in enumerate(self.of) if where == host)

    def lead(self, host: int) -> int:
        """The rank that makes and names folders on ``host``."""
        return self.of.index(host)

    def leads(self, rank: int) -> bool:
        """Whether ``rank`` is its host's `lead`."""
        return self.lead(self.of[rank]) == rank

    def peer(self, rank: int) -> int | None:
        """The rank on the next host that keeps what ``rank`` alone writes; None where there is one host."""
        if self.count == 1:
            return None
        here, there = self.ranks(self.of[rank]), self.ranks((self.of[rank] + 1) % self.count)
        return there[here.index(rank) % len(there)]

    def twin(self, rank: int, holders: Sequence[int]) -> int | None:
        """The rank on another host that writes again what ``rank`` writes of a piece of ``holders``; None: no other
        host has it. The next such host on the ring; its holders take turns."""
        others = {(self.of[one] - self.of[rank]) % self.count for one in holders} - {0}
        if not others:
            return None
        host = (self.of[rank] + min(others)) % self.count
        there = [one for one in sorted(holders) if self.of[one] == host]
        here = [one for one in sorted(holders) if self.of[one] == self.of[rank]]
        return there[here.index(rank) % len(there)]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How a save is spread over hosts, and the way for bytes between them."""

    hosts: Hosts
    link: Link


@dataclass(frozen=True, kw_only=True)
class Part:
    """A file that one rank writes: ``runs`` of its pieces.

    ``to``: the rank that it is sent to, None: nobody. ``copy``: it is a twin's file again, under the twin's name.
    """

    file: str
    runs: tuple[Run, ...]
    to: int | None = None
    copy: bool = False


def file_name(rank: int, twin: int | None = None) -> str:
    """The file of what ``rank`` writes alone, or together with ``twin``."""
    return f"rank-{rank:05d}{'' if twin is None else f'-and-{twin:05d}'}.safetensors"


def parts(pieces: Sequence[Piece], rank: int, hosts: Hosts | None) -> list[Part]:
    """The files that ``rank`` writes of ``pieces``, its own first, which may hold nothing. ``hosts`` None: there is
    one folder, and one file. WeightsError where a piece contradicts itself."""
    runs = share(pieces, rank)
    if hosts is None:
        return [Part(file=file_name(rank), runs=tuple(runs))]
    groups = {piece.replicas for piece in pieces}
    twins = {group: hosts.twin(rank, group) for group in groups}
    by_twin: dict[int | None, list[Run]] = {None: []}
    for run in runs:
        by_twin.setdefault(twins[pieces[run.piece].replicas], []).append(run)
    found = [
        Part(file=file_name(rank, twin), runs=_ordered(pieces, mine), to=hosts.peer(rank) if twin is None else None)
        for twin, mine in by_twin.items()
    ]
    served: dict[int, set[tuple[int, ...]]] = {}
    for group in groups:
        for other in group:
            if hosts.of[other] != hosts.of[rank] and hosts.twin(other, group) == rank:
                served.setdefault(other, set()).add(group)
    for other, shared in sorted(served.items()):
        # What a group of ranks holds is shared out among them apart from all else, and all of them come to the same.
        held = [index for index, piece in enumerate(pieces) if piece.replicas in shared]
        theirs = [
            Run(piece=held[run.piece], box=run.box, start=run.start)
            for run in share([pieces[index] for index in held], other)
        ]
        if theirs:
            found.append(Part(file=file_name(other, rank), runs=_ordered(pieces, theirs), copy=True))
    return found


def _ordered(pieces: Sequence[Piece], runs: Sequence[Run]) -> tuple[Run, ...]:
    """In an order that both twins come to, whatever order their pieces have."""
    return tuple(sorted(runs, key=lambda run: (pieces[run.piece].name, run.box)))


def unlike(records: Sequence[ShardRecord], copies: Sequence[Mapping[str, str]]) -> str | None:
    """Why the files of ``records`` do not lie twice, byte for byte; None where they do. ``copies``: rank by rank, the
    sums of the files that it keeps for another."""
    found = {file: (rank, sums) for rank, row in enumerate(copies) for file, sums in row.items()}
    for record in records:
        if not record["file"]:
            continue
        if record["file"] not in found:
            return f"{record['file']} was written on one host alone"
        rank, sums = found[record["file"]]
        if sums != record["sums"]:
            return f"rank {rank} holds other values than the rank that wrote {record['file']}, where both have the same"
    return None
