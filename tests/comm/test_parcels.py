"""Bytes from rank to rank beside a run's own traffic."""

from __future__ import annotations

import time

import pytest

from plait.comm.parcels import Parcels
from plait.core.errors import RankError
from plait.core.mesh import Mesh
from tests.pool import Connect, Pool

SIZE = 3 << 20


def ring(connect: Connect) -> tuple[bytes, bytes]:
    """Two runs of bytes to the next rank, and from the one before: what came, and what was awaited."""
    world = connect(Mesh(dp=3))
    parcels, to, source = Parcels(world, 30.0), (world.rank + 1) % 3, (world.rank - 1) % 3
    out = [memoryview(bytearray(SIZE)) for _ in range(2)]
    came = [parcels.receive(part, source) for part in out]
    gone = [parcels.send(memoryview(bytearray([10 * turn + world.rank]) * SIZE), to) for turn in range(2)]
    for wait in (*came, *gone):
        wait()
    parcels.everyone.barrier()
    return bytes([out[0][0], out[0][-1], out[1][0], out[1][-1]]), bytes([source, source, 10 + source, 10 + source])


def test_what_is_sent_arrives_in_order(pool: Pool) -> None:
    for came, awaited in pool.run(3, ring):
        assert came == awaited


def alone(connect: Connect) -> float:
    """Rank 0 waits for what rank 1 never sends; how long."""
    world = connect(Mesh(dp=2))
    parcels = Parcels(world, 0.5)
    begin = time.monotonic()
    if world.rank == 0:
        wait = parcels.receive(memoryview(bytearray(8)), 1)
        with pytest.raises(RankError, match=r"rank 0 waited for rank 1 to send 8 bytes in vain, time-out 0\.5 s"):
            wait()
    world.group("dp").barrier()
    return time.monotonic() - begin


def test_who_does_not_send_is_named_in_time(pool: Pool) -> None:
    assert 0.4 < max(pool.run(2, alone)) < 20
