"""Ranks of one start find each other in a store that those of earlier starts have used."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence

import pytest
import torch.distributed as dist

from plait.comm.meet import meet
from plait.core.errors import RankError


def starts(store: dist.Store, ranks: Sequence[int], size: int, timeout: float = 10.0) -> dict[int, str]:
    """What each of ``ranks`` reads that rank 0 has written, or the error that it meets."""
    found: dict[int, str] = {}

    def one(rank: int) -> None:
        try:
            own = meet(store, rank, size, timeout)
            if rank == 0:
                own.set("note", uuid.uuid4().hex)
            found[rank] = own.get("note").decode()
        except RankError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_each_start_has_a_part_of_its_own() -> None:
    store = dist.HashStore()
    notes = []
    for size in (3, 3, 2, 4, 1):
        found = starts(store, range(size), size)
        assert len(set(found.values())) == 1
        notes.append(found[0])
    assert len(set(notes)) == 5


def test_what_a_start_that_came_to_nothing_has_left_harms_no_other() -> None:
    store = dist.HashStore()
    failed = starts(store, [1, 2], 3, timeout=0.1)
    assert failed == {rank: f"rank {rank} waits for rank 0 to start, for 0.1 s" for rank in (1, 2)}
    assert starts(store, [0], 3, timeout=0.1)[0] == "rank 0 waits for ranks [1, 2] to start, for 0.1 s"
    assert len(set(starts(store, range(3), 3).values())) == 1


@pytest.mark.parametrize("last", [0, 1])
def test_whoever_comes_last(last: int) -> None:
    store, found = dist.HashStore(), {}
    late = threading.Timer(0.2, lambda: found.update(starts(store, [last], 2)))
    late.start()
    found.update(starts(store, [1 - last], 2))
    late.join()
    assert len(found) == 2
    assert len(set(found.values())) == 1
