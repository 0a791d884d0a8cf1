"""Groups and messages over both transports, against sums and concatenations of the same tensors in one process."""

from __future__ import annotations

import errno
import mmap
import os
import random
import resource
import subprocess
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from plait.comm import ring as rings
from plait.comm import sends
from plait.comm.group import Group, Pending
from plait.comm.torch_group import TorchWire
from plait.comm.world import World
from plait.core.errors import ConfigError, RankError
from plait.core.mesh import Mesh
from tests.pool import Connect, Pool

TRANSPORTS = ("auto", "gloo")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
OPERATIONS = ("all_reduce", "max", "reduce_scatter", "all_gather", "all_to_all")
UNEVEN = ("exchange", "gather_rows", "scatter_rows")
"""Each rank with rows of its own number, zero among them."""
SMALL_RING, SMALL_CHUNK = 1 << 14, 1 << 11
"""Bytes. Rings this small are full and wrap around all the time."""


@contextmanager
def rings_of(ring: int, chunk: int) -> Iterator[None]:
    """Other sizes of shared memory in this process: set the same on all ranks, before the first group."""
    before = rings.RING, rings.CHUNK
    rings.RING, rings.CHUNK = ring, chunk
    try:
        yield
    finally:
        rings.RING, rings.CHUNK = before


def tensors(size: int, rows: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """One tensor [rows, 3] a rank. Small whole numbers: their sums are exact in every dtype and order."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-8, 9, (rows, 3), generator=generator).to(dtype) for _ in range(size)]


@dataclass
class Case:
    """One operation: its start, and what this rank must get."""

    text: str
    start: Callable[[], Pending]
    wanted: Tensor


def case(group: Group, operation: str, part: int, dtype: torch.dtype, seed: int, *, inside: bool = False) -> Case:
    """``part``: rows of the smallest part. ``inside``: results in place, as ZeRO's buffers are used."""
    size, index = group.size, group.index
    if operation in UNEVEN:
        return uneven_case(group, operation, part, dtype, seed)
    rows = part if operation in ("all_gather", "all_reduce", "max") else part * size
    inputs = tensors(size, rows, dtype, seed)
    total = torch.stack(inputs).sum(0).to(dtype)
    x = inputs[index].clone()
    text = f"{operation} of {part} rows of {dtype} over {group.axis}, inside={inside}"
    if operation == "all_reduce":
        return Case(text, lambda: group.all_reduce(x), total)
    if operation == "max":
        return Case(text, lambda: group.all_reduce(x, "max"), torch.stack(inputs).amax(0))
    if operation == "all_to_all":
        return Case(text, lambda: group.all_to_all(x), torch.cat([one.chunk(size)[index] for one in inputs]))
    if operation == "reduce_scatter":
        own = slice(index * part, (index + 1) * part)
        return Case(text, lambda: group.reduce_scatter(x, out=x[own] if inside else None), total[own])
    whole = torch.full((size * rows, 3), -99).to(dtype)
    own = slice(index * rows, (index + 1) * rows)
    if inside:
        whole[own] = x
        return Case(text, lambda: group.all_gather(whole[own], out=whole), torch.cat(inputs))
    return Case(text, lambda: group.all_gather(x), torch.cat(inputs))


def uneven_case(group: Group, operation: str, part: int, dtype: torch.dtype, seed: int) -> Case:
    """Up to ``part`` rows a run; about a third of the runs are empty, and on some seeds all of a rank's."""
    size, index = group.size, group.index
    draw = random.Random(seed)
    counts = [[draw.choice((0, part, draw.randint(0, part))) for _ in range(size)] for _ in range(size)]
    idle = draw.randrange(2 * size)
    counts = [[0 if idle in (source, to) else counts[source][to] for to in range(size)] for source in range(size)]
    text = f"{operation} of {counts} rows of {dtype} over {group.axis}"
    if operation == "exchange":
        inputs = [tensors(1, sum(counts[rank]), dtype, seed + rank)[0] for rank in range(size)]
        received = torch.cat([inputs[rank].split(counts[rank])[index] for rank in range(size)])
        return Case(text, lambda: group.exchange(inputs[index], counts), received)
    if operation == "gather_rows":
        inputs = [tensors(1, counts[0][rank], dtype, seed + rank)[0] for rank in range(size)]
        return Case(text, lambda: group.gather_rows(inputs[index], counts[0]), torch.cat(inputs))
    inputs = tensors(size, sum(counts[0]), dtype, seed)
    own = torch.stack(inputs).sum(0).to(dtype).split(counts[0])[index]
    return Case(text, lambda: group.scatter_rows(inputs[index], counts[0]), own)


def verify(one: Case, result: Tensor) -> None:
    assert result.dtype == one.wanted.dtype, one.text
    assert torch.equal(result, one.wanted), one.text


def test_a_limit_on_files_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python ignores SIGXFSZ: a file that is too large is an error like any other."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(ConfigError, match=r"memory a group, .* file is 1,048,576 bytes \(ulimit -f\); what works"):
            rings.create_file(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    monkeypatch.setattr(mmap, "mmap", mock.Mock(side_effect=OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))))
    with pytest.raises(ConfigError, match=r"Cannot allocate memory \(ulimit -v\)"):
        rings.map_rings(2, -1)


# Every operation


def run_operations(connect: Connect, size: int, transport: str) -> int:
    group = connect(Mesh(tp=size), transport=transport).group("tp")
    seed = 0
    for operation in (*OPERATIONS, *UNEVEN):
        for dtype in DTYPES:
            for part in (0, 1, 2, 17, 333):
                for inside in (False, True) if operation in ("reduce_scatter", "all_gather") else (False,):
                    if part == 0 and transport == "gloo" and operation not in UNEVEN:
                        continue
                    seed += 1
                    one = case(group, operation, part, dtype, seed, inside=inside)
                    verify(one, one.start().wait())
    return seed


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_operation_equals_one_process(pool: Pool, size: int, transport: str) -> None:
    assert min(pool.run(size, run_operations, size, transport)) > 100


# Long tensors, many in flight


def run_in_flight(connect: Connect, size: int, ring: int, chunk: int, rows: list[int], seed: int) -> None:
    with rings_of(ring, chunk):
        group = connect(Mesh(tp=size)).group("tp")
        shuffle = random.Random(seed)
        for number in range(12):
            batch = []
            for _ in range(shuffle.randint(1, 5)):
                operation, dtype = shuffle.choice((*OPERATIONS, *UNEVEN)), shuffle.choice(DTYPES)
                part, inside = shuffle.choice(rows), shuffle.random() < 0.5
                batch.append(case(group, operation, part, dtype, seed * 100 + number, inside=inside))
            pending = [(one, one.start()) for one in batch]
            shuffle.shuffle(pending)
            for one, operation_under_way in pending:
                result = operation_under_way.wait()
                verify(one, result)
                assert operation_under_way.wait() is result


@pytest.mark.parametrize("size", [2, 3, 4])
def test_operations_longer_than_a_chunk_and_a_ring_wait_in_any_order(pool: Pool, size: int) -> None:
    for seed in range(3):
        pool.run(size, run_in_flight, size, SMALL_RING, SMALL_CHUNK, [0, 1, 50, 200, 683, 3000], seed)


def run_real_sizes(connect: Connect) -> None:
    group = connect(Mesh(tp=2)).group("tp")
    rows = rings.RING // 4 // 3 + 1000
    batch = [
        case(group, name, part, torch.float32, 5)
        for name, part in (("all_reduce", rows), ("all_gather", rows // 8), ("exchange", rows), ("scatter_rows", rows))
    ]
    for one, pending in [(one, one.start()) for one in batch]:
        verify(one, pending.wait())


def test_a_tensor_longer_than_the_real_ring(pool: Pool) -> None:
    pool.run(2, run_real_sizes)


# Two groups and messages at once


def run_interleaved(connect: Connect, seed: int, transport: str, steps: int) -> int:
    """The same random program on all ranks of a 2 x 2 mesh, with waits at other places on each."""
    with rings_of(SMALL_RING, SMALL_CHUNK):
        world = connect(Mesh(dp=2, tp=2), transport=transport, timeout=15.0)
        groups = [world.group("tp"), world.group("dp"), world.group("dp", "tp")]
        program = random.Random(seed)
        mine = random.Random(1000 * seed + world.rank)
        under_way: list[tuple[Case, Pending]] = []
        for step in range(steps):
            operation, dtype = program.choice((*OPERATIONS, *UNEVEN)), program.choice(DTYPES)
            part, which, inside = program.choice([1, 7, 100, 400]), program.choice(groups), program.random() < 0.5
            source, to = program.sample(range(4), 2)
            if program.random() < 0.3:
                message = tensors(1, part, dtype, seed * 10_000 + step)[0]
                if world.rank == source:
                    world.wire.send(message, to)
                elif world.rank == to:
                    arriving = world.wire.recv(torch.empty_like(message), source)
                    under_way.append((Case(f"message {step}", lambda arriving=arriving: arriving, message), arriving))
            else:
                one = case(which, operation, part, dtype, seed * 10_000 + step, inside=inside)
                under_way.append((one, one.start()))
            while under_way and (len(under_way) > 6 or mine.random() < 0.5):
                one, pending = under_way.pop(mine.randrange(len(under_way)))
                verify(one, pending.wait())
        mine.shuffle(under_way)
        for one, pending in under_way:
            verify(one, pending.wait())
        world.wire.flush()
        world.group("dp", "tp").barrier()
    return steps


@pytest.mark.parametrize("seed", range(4))
def test_random_interleavings_of_groups_and_messages(pool: Pool, seed: int) -> None:
    assert pool.run(4, run_interleaved, seed, "auto", 300) == [300] * 4


def run_full_ring(connect: Connect) -> list[float]:
    """Rank 0 starts its second operation before the first has been read everywhere, rank 1 after: the operations lie
    elsewhere in their rings. Rank 0 then finds no room for the fourth until rank 1 has read the second; rank 1, which
    found room, waits for a message that rank 0 sends after that."""
    with rings_of(100 * 64, 100 * 64):
        world = connect(Mesh(tp=2), timeout=4.0)
        group = world.group("tp")
        first, *others = [torch.ones(lines * 16) for lines in (60, 30, 50, 20)]
        message = torch.zeros(4)
        if world.rank == 0:
            opened, *rest = [group.all_reduce(first), group.all_reduce(others[0])]
            opened.wait()
            rest += [group.all_reduce(x) for x in others[1:]]
            world.wire.send(torch.full((4,), 7.0), 1)
        else:
            group.all_reduce(first).wait()
            time.sleep(0.3)
            rest = [group.all_reduce(x) for x in others]
            world.wire.recv(message, 0).wait()
        sums = [float(pending.wait().sum()) for pending in rest]
        world.wire.flush()
        return [*sums, float(message.sum())]


def test_a_rank_that_waits_makes_room_for_the_others(pool: Pool) -> None:
    assert pool.run(2, run_full_ring) == [[960, 1600, 640, 0], [960, 1600, 640, 28]]


# Bits


def run_bits(connect: Connect, size: int) -> list[bytes]:
    group = connect(Mesh(tp=size)).group("tp")
    generator = torch.Generator().manual_seed(group.index)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        x = (torch.randn(5000, generator=generator) * 10 ** torch.randn(5000, generator=generator)).to(dtype)
        whole = group.all_reduce(x.clone()).wait()
        if x.numel() % size == 0:
            part = group.reduce_scatter(x.clone()).wait()
            assert torch.equal(part, whole.chunk(size)[group.index]), "the same sums by another operation"
        rows.append(whole.float().numpy().tobytes())
    return rows


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_ranks_get_the_same_bits_every_time(pool: Pool, size: int) -> None:
    first, second = pool.run(size, run_bits, size), pool.run(size, run_bits, size)
    assert all(rows == first[0] for rows in first + second)


# Failures


def failure(action: Callable[[], object]) -> tuple[str, float]:
    """The message of the RankError of ``action``, and after how many seconds it came."""
    begin = time.monotonic()
    try:
        action()
    except RankError as error:
        return str(error), time.monotonic() - begin
    return "no error", time.monotonic() - begin


def run_disagree(connect: Connect, how: str) -> str:
    world = connect(Mesh(tp=2), timeout=5.0)
    group, other = world.group("tp"), 1 - world.rank
    rows = 4 + 2 * world.rank
    if how == "message":
        # What this rank expects is what it sends: the other sends another size.
        world.wire.send(torch.ones(rows), other)
        pending = world.wire.recv(torch.empty(rows), other)
        group.barrier()
    else:
        starts: dict[str, Callable[[Tensor], Pending]] = {
            "all_reduce": group.all_reduce,
            "reduce_scatter": group.reduce_scatter,
            "exchange": lambda x: group.exchange(x, [[0, rows], [rows, 0]]),
        }
        pending = starts[how](torch.ones(rows))
    return failure(pending.wait)[0]


@pytest.mark.parametrize("how", ["all_reduce", "reduce_scatter", "exchange", "message"])
def test_sizes_that_disagree_are_an_error_not_garbage(pool: Pool, how: str) -> None:
    for rank, told in enumerate(pool.run(2, run_disagree, how)):
        mine, theirs = (16, 24) if rank == 0 else (24, 16)
        assert f"a message of {theirs} bytes came where one of {mine} was expected" in told


def run_misfit(connect: Connect) -> list[str]:
    group = connect(Mesh(tp=2)).group("tp")
    x = torch.ones(3, 2)
    starts = [
        lambda: group.exchange(x, [[1, 1], [1, 1]]),
        lambda: group.gather_rows(x, [2, 2]),
        lambda: group.scatter_rows(x, [2, 2]),
    ]
    return [failure(start)[0] for start in starts]


def test_rows_that_are_not_the_counts_are_refused_before_anything_is_sent(pool: Pool) -> None:
    for told in pool.run(2, run_misfit):
        wanted = [("exchange", 2), ("gather_rows", 2), ("scatter_rows", 4)]
        assert told == [f"{name} over tp: 3 rows where the counts say {rows}" for name, rows in wanted]


def run_uneven_bytes(connect: Connect, transport: str) -> dict[tuple[str, str, str], int]:
    world = connect(Mesh(tp=3), transport=transport)
    group = world.group("tp")
    counts = [[7, 1, 2], [0, 5, 0], [3, 0, 0]]
    group.exchange(torch.ones(sum(counts[group.index]), 4), counts).wait()
    own = counts[0][group.index]
    group.scatter_rows(group.gather_rows(torch.ones(own, 4), counts[0]).wait(), counts[0]).wait()
    return dict(world.book.ledger.bytes)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_uneven_operations_book_the_bytes_that_leave_the_rank(pool: Pool, transport: str) -> None:
    for rank, booked in enumerate(pool.run(3, run_uneven_bytes, transport)):
        rows = {"exchange": [3, 0, 3][rank], "gather_rows": 2 * [7, 1, 2][rank], "scatter_rows": 10 - [7, 1, 2][rank]}
        assert booked == {("tp", name, ""): 16 * count for name, count in rows.items()}


def run_missing(connect: Connect, transport: str, what: str, timeout: float) -> tuple[str, float]:
    world = connect(Mesh(dp=1, tp=3), transport=transport, timeout=timeout)
    group = world.group("tp")
    group.barrier()
    world.book.doing = "B of stage 2, microbatch 5"
    if world.rank == 1:
        time.sleep(1.7 * timeout)
        return "late", 0.0
    if what == "recv" and world.rank == 0:
        return failure(lambda: world.wire.recv(torch.empty(4), 1).wait())
    if what == "exchange":
        return failure(lambda: group.exchange(torch.ones(0), [[0] * 3] * 3).wait())
    return failure(lambda: group.all_reduce(torch.ones(4)).wait())


@pytest.mark.parametrize("what", ["all_reduce", "exchange", "recv"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_never_comes_is_named_within_the_time_out(pool: Pool, transport: str, what: str) -> None:
    timeout = 1.0
    told, _, other = pool.run(3, run_missing, transport, what, timeout)
    for message, seconds in (told, other):
        assert seconds < 1.6 * timeout
        assert "B of stage 2, microbatch 5" in message
        assert f"{timeout:g} s" in message
    assert "rank 0" in told[0]
    if what == "recv":
        assert "from rank 1" in told[0]
    else:
        assert "over tp" in told[0]
        expected = "missing: ranks [1] of [0, 1, 2]" if transport == "auto" else "with ranks [0, 1, 2]"
        assert expected in told[0]


# Messages


def run_flood(connect: Connect, transport: str, count: int, rows: int, *, both: bool) -> int:
    with rings_of(SMALL_RING, SMALL_CHUNK):
        world = connect(Mesh(pp=2), transport=transport)
        other = 1 - world.rank
        sent = [tensors(2, rows + number % 3, torch.float32, number) for number in range(count)]
        if world.rank == 0 or both:
            for message in sent:
                world.wire.send(message[world.rank], other)
        if world.rank == 1 and not both:
            time.sleep(0.3)
        if world.rank == 1 or both:
            arriving = [world.wire.recv(torch.empty_like(message[other]), other) for message in sent]
            order = list(range(count))
            random.Random(world.rank).shuffle(order)
            for number in order:
                assert torch.equal(arriving[number].wait(), sent[number][other])
        world.wire.flush()
        world.group("pp").barrier()
        return count


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("both", [False, True])
def test_more_messages_than_a_ring_holds(pool: Pool, transport: str, both: bool) -> None:
    """The receiver is late, or both send everything before they receive anything: neither may deadlock."""
    assert pool.run(2, _flood, transport, both) == [150, 150]


def _flood(connect: Connect, transport: str, both: bool) -> int:
    return run_flood(connect, transport, 150, 300, both=both)


def run_long_message(connect: Connect) -> bool:
    with rings_of(SMALL_RING, SMALL_CHUNK):
        world = connect(Mesh(pp=2))
        (message,) = tensors(1, 50_000, torch.float32, 3)
        if world.rank == 0:
            world.wire.send(message, 1)
            world.wire.flush()
        same = world.rank == 0 or torch.equal(world.wire.recv(torch.empty_like(message), 0).wait(), message)
        world.group("pp").barrier()
        return same


def test_a_message_longer_than_the_ring(pool: Pool) -> None:
    assert pool.run(2, run_long_message) == [True, True]


# Groups


def run_alone(connect: Connect) -> bool:
    world = World.alone()
    group = world.group("tp")
    x = torch.ones(3)
    results = [
        group.all_reduce(x),
        group.reduce_scatter(x),
        group.all_gather(x),
        group.all_to_all(x),
        group.exchange(x, [[3]]),
        group.gather_rows(x, [3]),
        group.scatter_rows(x, [3]),
    ]
    return all(pending.wait() is x for pending in results) and not world.book.ledger.bytes


def test_a_group_of_one_sends_nothing(pool: Pool) -> None:
    assert pool.run(1, run_alone) == [True]


def run_membership(connect: Connect, transport: str) -> tuple[list[tuple[int, ...]], list[float]]:
    world = connect(Mesh(pp=2, tp=2), transport=transport)
    groups = [world.group("tp"), world.group("pp"), world.group("pp", "tp"), world.shared("pair", [(0, 3)])]
    sums = [float(group.all_reduce(torch.tensor([1.0 + world.rank])).wait()) for group in groups]
    assert world.group("tp") is groups[0]
    return [group.ranks for group in groups], sums


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_groups_follow_the_mesh_and_partitions(pool: Pool, transport: str) -> None:
    found = pool.run(4, run_membership, transport)
    assert found[0] == ([(0, 1), (0, 2), (0, 1, 2, 3), (0, 3)], [3.0, 4.0, 10.0, 5.0])
    assert found[3] == ([(2, 3), (1, 3), (0, 1, 2, 3), (0, 3)], [7.0, 6.0, 10.0, 5.0])
    assert found[1][0][3] == (1,)


def run_channels(connect: Connect) -> list[float]:
    """Both directions to both neighbours, all sent before any is received."""
    world = connect(Mesh(pp=4), transport="gloo")
    wire = world.wire
    assert isinstance(wire, TorchWire)
    after, before = (world.rank + 1) % 4, (world.rank - 1) % 4
    wire.send(torch.tensor([10.0 + world.rank]), after)
    wire.send(torch.tensor([20.0 + world.rank]), before)
    got = [float(wire.recv(torch.empty(1), source).wait()) for source in (before, after)]
    wire.flush()
    return got


def test_both_directions_at_once_through_torch(pool: Pool) -> None:
    assert pool.run(4, run_channels) == [[10.0 + (rank - 1) % 4, 20.0 + (rank + 1) % 4] for rank in range(4)]


def run_ring(connect: Connect, steps: int) -> int:
    """Messages on around a ring of ranks, as context parallelism sends them; most that a rank held at a time of those
    that the next rank has had for some time: three of them are less than may be held."""
    world = connect(Mesh(cp=3), transport="gloo")
    after, before, most = (world.rank + 1) % 3, (world.rank - 1) % 3, 0
    sent: list[weakref.ref[Tensor]] = []
    message = torch.full((sends.HELD // 4 // 3,), float(world.rank))
    for step in range(steps):
        sent.append(weakref.ref(message))
        world.wire.send(message, after)
        message = world.wire.recv(torch.empty_like(message), before).wait()
        assert message[0] == (world.rank - step - 1) % 3
        world.group("cp").barrier()  # all have received it, and so sent theirs
        deadline = time.monotonic() + 2.0
        while (held := sum(one() is not None for one in sent)) > 3 and time.monotonic() < deadline:
            time.sleep(1e-3)
        most = max(most, held)
    world.wire.flush()
    return most


def test_what_has_left_is_not_held_to_the_end_of_a_step(pool: Pool) -> None:
    """gloo says of no message that it has left unless it is waited for."""
    assert max(pool.run(3, run_ring, 9)) <= 3


def test_ranks_that_found_different_devices_are_told(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    store.set("device/1", "cuda")
    with pytest.raises(ConfigError, match=r"different devices: \{'cpu': \[0\], 'cuda': \[1\]\}"):
        World.connect(Mesh(tp=2), device=torch.device("cpu"), store=store, rank=0)


def leave_early(connect: Connect, operation: str) -> tuple[str, float]:
    """Rank 1 is taken for dead by rank 0, which waits for it: the pid it gave is that of a process that has ended."""
    world = connect(Mesh(pp=2), timeout=30.0)
    group = world.group("pp")
    group.barrier()
    if world.rank == 1:
        return "", 0.0
    child = subprocess.Popen(["true"])
    child.wait()
    world.book.pids[1] = child.pid
    begin = time.monotonic()
    pending = world.wire.recv(torch.empty(2), 1) if operation == "recv" else group.all_reduce(torch.ones(2))
    try:
        pending.wait()
    except RankError as error:
        return str(error), time.monotonic() - begin
    return "", 0.0


@pytest.mark.parametrize("operation", ["recv", "all_reduce"])
def test_nobody_waits_for_a_rank_that_has_died(pool: Pool, operation: str) -> None:
    (error, seconds), _ = pool.run(2, leave_early, operation)
    assert error.endswith("rank 1 has died")
    assert seconds < 5
