"""`Flight`: the last operations of a rank, kept where others can read them, and what they say of a hang.

A rank that stands still in a collective cannot tell why, and the one that it waits for may be stopped or dead. Every
operation therefore leaves a record of 128 bytes in a ring, which for ranks of a local launcher is a mapped file: the
launcher reads it whatever has become of the rank. A record costs about a microsecond, no system call and no memory.

The k-th operation of a group is the same one on all its ranks. So the counts alone say who has not come: `diagnose`
follows them from whoever waits to the rank that waits for nobody.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

RECORDS = 256
"""Operations that are kept."""
GROUPS = 512
"""Groups and channels whose operations are counted; what comes after these is counted together."""
_STARTED, _WAITING, _DONE = range(3)
_STATES = ("started", "waiting", "done")
_HEAD = struct.Struct("<8sqqQ")  # magic, rank, pid, operations so far
_NOTE = struct.Struct("<d80s")  # since when (monotonic), what the rank is doing
_RECORD = struct.Struct("<QdQHHiBB2x4Q60s")  # number, time, count in group, operation, group, peer, state, dims, doing
_MAGIC = b"plaitfl1"
_NOTE_AT, _COUNTS_AT = 32, 128
_NAMES_AT = _COUNTS_AT + 8 * GROUPS
_NAMES = 1 << 15
_RECORDS_AT = _NAMES_AT + _NAMES
_STATE = 32
SIZE = _RECORDS_AT + RECORDS * _RECORD.size
"""Bytes of a rank's ring with its header."""
_PACK = tuple(struct.Struct(f"<QdQHHiBB2x{dims}Q{32 - 8 * dims}x60s").pack_into for dims in range(5))
"""`_RECORD` for a shape of so many dims: padding one in Python would cost a fifth of a record."""
_now = time.monotonic


@final
class Flight:
    """The ring of one rank; in the file at ``path``, or in this process's own memory. For one thread."""

    def __init__(self, rank: int = 0, path: Path | None = None) -> None:
        self.rank = rank
        memory: mmap.mmap | bytearray = bytearray(SIZE)
        if path is not None:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            # In the blocks that its launcher has set aside: memory mapped over a hole of a full disk is a SIGBUS.
            os.pwrite(file, bytes(SIZE), 0)
            memory = mmap.mmap(file, SIZE)
            os.close(file)
        self._memory = memory
        view = memoryview(memory)
        self._counts = view[_COUNTS_AT:_NAMES_AT].cast("Q")
        self._number = view[24:32].cast("Q")
        self._operations: dict[str, int] = {}
        self._groups: dict[tuple[str, tuple[int, ...]], int] = {}
        self._next = 0
        self._doing = b""
        _HEAD.pack_into(memory, 0, _MAGIC, rank, os.getpid(), 0)

    def group(self, axis: str, ranks: tuple[int, ...]) -> int:
        """The number to give to `begin` for operations of ``ranks`` along ``axis``; (source, to) for messages."""
        key = (axis, ranks)
        if key not in self._groups:
            self._groups[key] = min(len(self._groups), GROUPS - 1)
            self._write_names()
        return self._groups[key]

    def note(self, doing: str) -> None:
        """What the rank does from now on, such as ``B of stage 1, microbatch 3``; "" for nothing of the kind."""
        self._doing = doing.encode()
        _NOTE.pack_into(self._memory, _NOTE_AT, time.monotonic(), self._doing)

    def begin(self, operation: str, group: int, shape: Sequence[int], peer: int = -1) -> int:
        """An operation starts on this rank; returns its number, for `waiting` and `done`."""
        code = self._operations.get(operation)
        if code is None:
            code = self._operations[operation] = len(self._operations)
            self._write_names()
        number = self._next
        self._next = number + 1
        self._counts[group] = count = self._counts[group] + 1
        if len(shape) > 4:
            shape = shape[:4]
        dims, at = len(shape), _RECORDS_AT + number % RECORDS * 128
        _PACK[dims](self._memory, at, number, _now(), count, code, group, peer, _STARTED, dims, *shape, self._doing)
        self._number[0] = number + 1
        return number

    def waiting(self, number: int) -> None:
        """The rank stands still until operation ``number`` has ended."""
        if self._next - number <= RECORDS:  # else its place is another's by now
            self._memory[_RECORDS_AT + number % RECORDS * 128 + _STATE] = _WAITING

    @property
    def last(self) -> int:
        """The number of the operation that was started last."""
        return self._next - 1

    def moving(self, number: int) -> None:
        """Operation ``number`` is under way again, and the rank with it."""
        if self._next - number <= RECORDS:
            self._memory[_RECORDS_AT + number % RECORDS * 128 + _STATE] = _STARTED

    def done(self, number: int) -> None:
        """Operation ``number`` has ended on this rank."""
        if self._next - number <= RECORDS:
            self._memory[_RECORDS_AT + number % RECORDS * 128 + _STATE] = _DONE

    def read(self) -> dict[str, Any]:
        """What the ring holds, as JSON values."""
        return decode(bytes(self._memory))

    def dump(self, folder: Path) -> Path:
        """Write `read` to ``rank-R.json`` in ``folder``, which is made."""
        return write_dump(folder, self.read())

    def _write_names(self) -> None:
        groups = [[axis, list(ranks)] for axis, ranks in self._groups]
        text = json.dumps({"operations": list(self._operations), "groups": groups[:GROUPS]}).encode()
        if len(text) > _NAMES - 4:  # thousands of ranks: who they are is left out, how often they met is not
            short = [[axis, []] for axis, _ in groups[:GROUPS]]
            text = json.dumps({"operations": list(self._operations), "groups": short}).encode()
        self._memory[_NAMES_AT + 4 : _NAMES_AT + 4 + len(text)] = text
        self._memory[_NAMES_AT : _NAMES_AT + 4] = len(text).to_bytes(4, "little")


def flight_file(folder: Path, rank: int) -> Path:
    """Where rank ``rank`` of the launcher with the private ``folder`` keeps its ring."""
    return folder / f"flight-{rank}"


def stamp(path: Path) -> bytes:
    """Bytes that change whenever the rank with the ring at ``path`` starts an operation, or notes what it does."""
    try:
        with open(path, "rb") as file:
            return file.read(_COUNTS_AT)[24:]
    except FileNotFoundError:
        return b""


def read(path: Path) -> dict[str, Any] | None:
    """The ring at ``path`` as JSON values; None where there is none (yet)."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    return decode(content) if len(content) == SIZE and content[:8] == _MAGIC else None


def decode(content: bytes) -> dict[str, Any]:
    """JSON values of a ring's bytes: rank, pid, what it is doing, counts by group, and records, oldest first."""
    _, rank, pid, number = _HEAD.unpack_from(content)
    since, doing = _NOTE.unpack_from(content, _NOTE_AT)
    length = int.from_bytes(content[_NAMES_AT : _NAMES_AT + 4], "little")
    try:
        names = json.loads(content[_NAMES_AT + 4 : _NAMES_AT + 4 + length] or b"{}")
    except ValueError:  # read while it was written
        names = {}
    known, groups = names.get("operations", []), names.get("groups", [])
    counts = memoryview(content)[_COUNTS_AT:_NAMES_AT].cast("Q")
    records = []
    for place in range(RECORDS):
        fields = _RECORD.unpack_from(content, _RECORDS_AT + place * _RECORD.size)
        at, when, count, code, group, peer, state, dims, *sizes, text = fields
        if count == 0 or at >= number or code >= len(known) or group >= len(groups):
            continue
        record = {"number": at, "time": when, "operation": known[code], "state": _STATES[state]}
        record |= {"group": group, "count": count, "axis": groups[group][0], "ranks": groups[group][1]}
        record |= {"shape": sizes[:dims], "doing": _text(text)}
        records.append(record | ({"peer": peer} if peer >= 0 else {}))
    records.sort(key=lambda record: int(record["number"]))
    return {
        "rank": rank,
        "pid": pid,
        "operations": number,
        "doing": _text(doing),
        "since": since,
        "groups": [{"axis": axis, "ranks": ranks, "count": counts[i]} for i, (axis, ranks) in enumerate(groups)],
        "records": records,
    }


def _text(content: bytes) -> str:
    return content.rstrip(b"\0").decode(errors="replace")


def write_dump(folder: Path, dump: Mapping[str, Any]) -> Path:
    """Write one rank's ring to ``rank-R.json`` in ``folder``, which is made; whole or not at all (OSError)."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{dump['rank']}.json"
    draft = folder / f"{path.name}.tmp"
    try:
        draft.write_text(json.dumps(dump) + "\n", encoding="utf-8")
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    return path


def read_dumps(folder: Path) -> list[dict[str, Any]]:
    """The dumps in ``folder``, by rank."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("rank-*.json")]
    return sorted(found, key=lambda dump: int(dump["rank"]))


def diagnose(dumps: Sequence[Mapping[str, Any]], places: Mapping[int, str] | None = None) -> str:
    """One line that names the logical cause of a hang: who has not come to what, where it is instead, and who waits.

    ``dumps``: of the ranks, as `Flight.read` gives them; a rank without one is taken for gone. ``places``: what else is
    known of ranks, such as ``stopped by SIGSTOP``; it is said beside where they are. "" when no rank waits.
    """
    by_rank, waits = _waits(dumps)
    if not waits:
        return ""
    disagreement = _disagreement(by_rank, waits)
    if disagreement:
        return disagreement
    path = _follow(by_rank, waits)
    last, waiting = path[-1], sorted(waits)
    if last in path[:-1]:
        ring = path[path.index(last) : -1]
        told = [f"rank {one} in {_name(waits[one])} for rank {_missing(by_rank, one, waits[one])[0]}" for one in ring]
        return f"ranks wait for each other: {'; '.join(told)}"
    if len(path) == 1:
        return f"ranks {waiting} are all in {_name(waits[last])}: it does not end"
    record, known = waits[path[-2]], (places or {}).get(last, "")
    place = _place(by_rank.get(last), waits.get(last))
    place = f"{known}, {place}" if known and last in by_rank else known or place
    others = [rank for rank in waiting if rank != last]
    who = f"rank {others[0]} waits" if len(others) == 1 else f"ranks {' '.join(map(str, others))} wait"
    verb = "sent" if record["operation"] == "recv" else "entered"
    return f"rank {last} never {verb} {_name(record)}: {place}; {who}"


def suspect(dumps: Sequence[Mapping[str, Any]]) -> int | None:
    """The rank that `diagnose` names as the one that others wait for; None where it names none."""
    by_rank, waits = _waits(dumps)
    if not waits or _disagreement(by_rank, waits):
        return None
    path = _follow(by_rank, waits)
    return path[-1] if len(path) > 1 and path[-1] not in path[:-1] else None


def _waits(
    dumps: Sequence[Mapping[str, Any]],
) -> tuple[dict[int, Mapping[str, Any]], dict[int, Mapping[str, Any]]]:
    """The dumps by rank, and the record in which each rank that stands still does so."""
    by_rank = {int(dump["rank"]): dump for dump in dumps}
    return by_rank, {rank: held for rank, dump in by_rank.items() if (held := standing(dump)) is not None}


def _follow(by_rank: Mapping[int, Mapping[str, Any]], waits: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """From the first rank that stands still to one that it waits for, and so on: to a rank that waits for nobody, or
    to one that was there already."""
    path = [min(waits)]
    while path[-1] in waits and path[-1] not in path[:-1]:
        missing = _missing(by_rank, path[-1], waits[path[-1]])
        if not missing:
            break
        # Of several that have not come, one that stands nowhere is the cause; those that wait are its victims.
        path.append(min(missing, key=lambda other: (other in waits, other)))
    return path


def standing(dump: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The record of the operation in which a rank stands still; None for one that does not."""
    return next((record for record in reversed(dump["records"]) if record["state"] == "waiting"), None)


def _name(record: Mapping[str, Any]) -> str:
    """``all_reduce #118 on tp [4, 64] (RECV_F of stage 2, microbatch 5)``."""
    doing = f" ({record['doing']})" if record["doing"] else ""
    if record["operation"] == "recv":
        return f"message #{record['count']} {list(record['shape'])} to rank {record['ranks'][1]}{doing}"
    return f"{record['operation']} #{record['count']} on {record['axis']} {list(record['shape'])}{doing}"


def _place(dump: Mapping[str, Any] | None, record: Mapping[str, Any] | None) -> str:
    if dump is None:
        return "it has left no record"
    if record is not None:
        return f"it is still in {_name(record)}, to which all have come"
    return f"it is in {dump['doing']}" if dump["doing"] else "it is in no action of the schedule"


def _missing(dumps: Mapping[int, Mapping[str, Any]], rank: int, record: Mapping[str, Any]) -> list[int]:
    """Ranks that have not come to ``record``, in which ``rank`` stands still."""
    others = [record["peer"]] if record["operation"] == "recv" else [one for one in record["ranks"] if one != rank]
    return [other for other in others if _count(dumps.get(other), record) < record["count"]]


def _count(dump: Mapping[str, Any] | None, record: Mapping[str, Any]) -> int:
    """How many operations of the group of ``record`` a rank has started."""
    groups = [] if dump is None else dump["groups"]
    same = (group for group in groups if (group["axis"], group["ranks"]) == (record["axis"], record["ranks"]))
    return next((int(group["count"]) for group in same), 0)


def _disagreement(dumps: Mapping[int, Mapping[str, Any]], standing: Mapping[int, Mapping[str, Any]]) -> str:
    """Two ranks of a group whose operation of the same number is not the same one: their programs have parted."""
    for rank, record in standing.items():
        for other in set(record["ranks"]) - {rank} if record["operation"] != "recv" else ():
            for theirs in dumps.get(other, {"records": []})["records"]:
                same = all(theirs[key] == record[key] for key in ("axis", "ranks", "count"))
                if same and theirs["operation"] != record["operation"]:
                    ours = f"rank {rank} is in {_name(record)}"
                    return f"the ranks' operations have parted: {ours}, rank {other} in {_name(theirs)}"
    return ""
