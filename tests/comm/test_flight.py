"""The ring of last  and the one line that names the cause of a hang."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.comm.flight import GROUPS, RECORDS, SIZE, Flight, diagnose, flight_file, read, read_dumps, stamp, suspect
from plait.core.errors import RankError
from plait.core.mesh import Mesh
from tests.pool import Connect, Pool


def test_the_last_operations_are_kept_where_others_can_read_them(tmp_path: Path) -> None:
    path = flight_file(tmp_path, 3)
    assert read(path) is None
    flight = Flight(3, path)
    group = flight.group("tp", (1, 3))
    flight.note("B of stage 1, microbatch 3")
    numbers = [flight.begin("all_reduce", group, (4, index)) for index in range(RECORDS + 10)]
    assert path.stat().st_size == SIZE
    held = read(path)
    assert held is not None
    assert (held["rank"], held["operations"], held["doing"]) == (3, RECORDS + 10, "B of stage 1, microbatch 3")
    assert held["groups"] == [{"axis": "tp", "ranks": [1, 3], "count": RECORDS + 10}]
    assert [record["number"] for record in held["records"]] == numbers[10:]
    last = held["records"][-1]
    assert (last["operation"], last["shape"], last["state"], last["count"]) == (
        "all_reduce",
        [4, RECORDS + 9],
        "started",
        RECORDS + 10,
    )
    flight.waiting(numbers[-1])
    flight.done(numbers[3])  # its place is another's by now
    assert [record["state"] for record in flight.read()["records"]] == ["started"] * (RECORDS - 1) + ["waiting"]
    flight.done(numbers[-1])
    assert flight.read()["records"][-1]["state"] == "done"


def test_operations_and_notes_are_signs_of_life(tmp_path: Path) -> None:
    path = flight_file(tmp_path, 0)
    assert stamp(path) == b""
    flight = Flight(0, path)
    seen = [stamp(path)]
    flight.note("F of stage 0, microbatch 0")
    seen.append(stamp(path))
    flight.done(flight.begin("all_gather", flight.group("dp", (0, 1)), (8,)))
    seen.append(stamp(path))
    assert len(set(seen)) == 3
    assert stamp(path) == seen[-1]


def test_shapes_of_any_size_and_thousands_of_ranks_fit(tmp_path: Path) -> None:
    flight = Flight(0, flight_file(tmp_path, 0))
    for number in range(GROUPS + 20):  # more groups than are counted apart
        flight.begin("all_to_all", flight.group(f"axis {number}", tuple(range(16))), (1 << 40, 2, 3, 4, 5), peer=7)
    held = flight.read()
    assert held["records"][-1]["shape"] == [1 << 40, 2, 3, 4]
    assert held["records"][-1]["peer"] == 7
    assert sum(group["count"] for group in held["groups"]) == GROUPS + 20
    path = flight.dump(tmp_path / "flight")
    assert path.name == "rank-0.json"
    assert read_dumps(path.parent) == [json.loads(json.dumps(held))]


def test_a_record_costs_about_a_microsecond(tmp_path: Path) -> None:
    """0.9 us on the machine of docs/performance.md: ten times that is a mistake, not noise."""
    flight = Flight(0, flight_file(tmp_path, 0))
    group, shape, best = flight.group("tp", (0, 1)), torch.zeros(4, 8, 16).shape, float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(1000):
            number = flight.begin("all_reduce", group, shape)
            flight.waiting(number)
            flight.done(number)
        best = min(best, (time.perf_counter() - begin) / 1000)
    assert best < 9e-6


def dumped(rank: int, *steps: tuple[str, str, tuple[int, ...]], wait: bool = True, doing: str = "") -> dict[str, Any]:
    """A rank's ring after ``steps`` (operation, axis, ranks); it stands still in the last one, or computes."""
    flight = Flight(rank)
    flight.note(doing)
    number = 0
    for operation, axis, ranks in steps:
        peer = {"recv": ranks[0], "send": ranks[-1]}.get(operation, -1)
        number = flight.begin(operation, flight.group(axis, ranks), (4, 8), peer)
        flight.done(number)
    if wait:
        flight.waiting(number)
    return flight.read()


def test_who_has_not_come_is_named() -> None:
    everyone = ("all_reduce", "tp", (0, 1, 2, 3))
    dumps = [dumped(rank, everyone, everyone) for rank in (0, 1, 3)]
    dumps.append(dumped(2, everyone, wait=False, doing="B of stage 1, microbatch 3"))
    assert diagnose(dumps) == (
        "rank 2 never entered all_reduce #2 on tp [4, 8]: it is in B of stage 1, microbatch 3; ranks 0 1 3 wait"
    )
    assert suspect(dumps) == 2
    # One that stands in the operation before, to which all have come, was stopped there.
    assert diagnose([*dumps[:3], dumped(2, everyone)]) == (
        "rank 2 never entered all_reduce #2 on tp [4, 8]: "
        "it is still in all_reduce #1 on tp [4, 8], to which all have come; ranks 0 1 3 wait"
    )
    assert "it has left no record; ranks 0 1 3 wait" in diagnose(dumps[:3])
    assert "stopped by SIGSTOP, it is in B" in diagnose(dumps, {2: "stopped by SIGSTOP"})


def test_a_chain_of_waits_is_followed_to_its_end() -> None:
    """0 and 1 wait for each other's stage, which waits for rank 3: it computes."""
    dumps = [
        dumped(0, ("all_reduce", "dp", (0, 1)), doing="RECV_B of stage 0, microbatch 1"),
        dumped(1, ("recv", "pp", (2, 1)), doing="RECV_B of stage 1, microbatch 1"),
        dumped(2, ("all_reduce", "tp", (2, 3)), doing="F of stage 2, microbatch 0"),
        dumped(3, doing="F of stage 2, microbatch 0", wait=False),
    ]
    assert diagnose(dumps) == (
        "rank 3 never entered all_reduce #1 on tp [4, 8] (F of stage 2, microbatch 0): "
        "it is in F of stage 2, microbatch 0; ranks 0 1 2 wait"
    )


def test_a_message_that_was_never_sent() -> None:
    message = ("recv", "pp", (0, 1))
    sent = ("send", "pp", (0, 1))
    dumps = [dumped(1, message, message), dumped(0, sent, wait=False)]
    assert diagnose(dumps).startswith("rank 0 never sent message #2 [4, 8] to rank 1: it is in no action")


def test_ranks_that_wait_for_each_other() -> None:
    dumps = [dumped(0, ("recv", "pp", (1, 0))), dumped(1, ("recv", "pp", (0, 1)))]
    assert diagnose(dumps) == (
        "ranks wait for each other: rank 0 in message #1 [4, 8] to rank 0 for rank 1; "
        "rank 1 in message #1 [4, 8] to rank 1 for rank 0"
    )


def test_operations_that_have_parted_and_one_that_does_not_end() -> None:
    pair = (0, 1)
    dumps = [dumped(0, ("all_reduce", "dp", pair)), dumped(1, ("all_gather", "dp", pair))]
    assert "operations have parted: rank 0 is in all_reduce #1 on dp" in diagnose(dumps)
    dumps = [dumped(rank, ("all_reduce", "dp", pair)) for rank in pair]
    assert diagnose(dumps) == "ranks [0, 1] are all in all_reduce #1 on dp [4, 8]: it does not end"
    assert suspect(dumps) is None
    assert diagnose([dumped(0, wait=False), dumped(1, wait=False)]) == ""


def hang(connect: Connect, transport: str) -> tuple[str, dict[str, Any]]:
    world = connect(Mesh(tp=3), timeout=2.0, transport=transport)
    group = world.group("tp")
    group.all_reduce(torch.ones(3, 5)).wait()
    world.book.doing = f"F of stage 0, microbatch {world.rank}"
    error = ""
    if world.rank != 1:
        try:
            group.all_gather(torch.ones(2)).wait()
        except RankError as caught:
            error = str(caught)
    elif transport == "gloo":
        time.sleep(2.5)  # one that leaves would end the others' wait
    return error, world.book.flight.read()


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_real_ranks_that_time_out_tell_which_one_is_late(pool: Pool, transport: str) -> None:
    answers = pool.run(3, hang, transport)
    assert "rank 0 wait" in answers[0][0]
    assert not answers[1][0]
    told = diagnose([dump for _, dump in answers])
    assert told == (
        "rank 1 never entered all_gather #2 on tp [2] (F of stage 0, microbatch 0): "
        "it is in F of stage 0, microbatch 1; ranks 0 2 wait"
    )


def two_way(connect: Connect) -> list[tuple[str, int]]:
    world = connect(Mesh(pp=2))
    other = 1 - world.rank
    for _ in range(2):
        world.wire.send(torch.ones(3), other)
    received = [world.wire.recv(torch.empty(3), other) for _ in range(2)]
    assert all(pending.wait().sum() == 3 for pending in received)
    world.wire.flush()
    return [(record["operation"], record["count"]) for record in world.book.flight.read()["records"]]


def test_messages_are_counted_by_direction(pool: Pool) -> None:
    expected = [("send", 1), ("send", 2), ("recv", 1), ("recv", 2)]
    assert pool.run(2, two_way) == [expected, expected]


def test_a_ring_is_read_while_it_is_written(tmp_path: Path) -> None:
    path = flight_file(tmp_path, 0)
    flight = Flight(0, path)
    stop = threading.Event()

    def write() -> None:
        group = flight.group("dp", (0, 1))
        while not stop.is_set():
            flight.done(flight.begin("all_reduce", group, (1,)))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(50):
            held = read(path)
            assert held is not None
            numbers = [record["number"] for record in held["records"]]
            assert numbers == sorted(numbers)
    finally:
        stop.set()
        writer.join()
