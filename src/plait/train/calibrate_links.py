"""Seconds of collectives and messages between the ranks of a run, over plait's own groups and wire.

All groups of a partition work at the same time, as they do in a run. A tier is a host (its ranks) or the network (one
rank of each host, and all ranks together).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from statistics import quantiles
from time import perf_counter, process_time, sleep

import torch
from torch import Tensor

from plait.comm.group import Group, Pending
from plait.comm.world import World
from plait.core.topology import CommPoint

HOST, NETWORK = "host", "network"
CPU_SIZES = (4 << 10, 64 << 10, 1 << 20, 8 << 20)
GPU_SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20)
MATRIX_SIZE = 4 << 20
"""Bytes of the messages of the rank-to-rank matrix."""
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_WARM = 2
_WINDOWS = 2
_SLEEP = 0.2
_LONG = 1 << 20
_COLD, _CACHE = 4 << 20, 64 << 20
"""Bytes of an operation that is taken to find its tensor in memory, and of more tensors than caches hold."""


def partitions(hosts: Sequence[Sequence[int]]) -> Iterator[tuple[str, list[tuple[int, ...]]]]:
    """(tier, groups that work at once) for every size that is measured. ``hosts``: the ranks of each, alike in number.

    On a host: neighbours in groups of 2, 4, ... and all. On the network: the i-th rank of each host, and all ranks.
    """
    local = len(hosts[0])
    for size in sizes_of(local):
        yield HOST, [tuple(ranks[i : i + size]) for ranks in hosts for i in range(0, local, size)]
    for size in sizes_of(len(hosts)):
        blocks = [hosts[i : i + size] for i in range(0, len(hosts), size)]
        yield NETWORK, [tuple(ranks) for block in blocks for ranks in zip(*block, strict=True)]
    if len(hosts) > 1 and local > 1:
        yield NETWORK, [tuple(rank for ranks in hosts for rank in ranks)]


def sizes_of(count: int) -> list[int]:
    """Powers of two that divide ``count``, and itself: 12 -> 2, 4, 12; none below 2."""
    powers = [1 << e for e in range(1, count.bit_length()) if count % (1 << e) == 0]
    return powers if count in powers or count < 2 else [*powers, count]


def collectives(world: World, tier: str, group: Group, sizes: Sequence[int], repeats: int) -> list[CommPoint]:
    """Every collective of ``group`` over ``sizes`` (bytes of the whole tensor; of a rank's own for all-to-all)."""
    found = []
    for size in sizes:
        count = size // 4 // group.size * group.size
        # Activations are sent while they are in a cache; weights and gradients, whose messages are long, come from
        # memory: those take turns.
        copies = 1 if world.device.type == "cuda" or size < _COLD else -(-_CACHE // size)
        wholes = cycle([torch.ones(count, device=world.device) for _ in range(copies)])
        part = torch.ones(count // group.size, device=world.device)
        for op in COLLECTIVES:
            call = partial(_call, op, group, wholes, part)
            seconds = _together(world, call, repeats if size < _LONG else max(2, repeats // 4))
            found.append(CommPoint(op=op, tier=tier, ranks=group.size, size=float(4 * count), seconds=seconds))
    return found


def _call(op: str, group: Group, wholes: Iterator[Tensor], part: Tensor) -> Pending:
    whole = next(wholes)
    if op == "all_gather":
        return group.all_gather(part, whole)
    if op == "reduce_scatter":
        return group.reduce_scatter(whole, part)
    return group.all_reduce(whole) if op == "all_reduce" else group.all_to_all(whole)


def messages(
    world: World, tier: str, pairs: Sequence[tuple[int, int]], sizes: Sequence[int], repeats: int
) -> list[CommPoint]:
    """One way between the ranks of ``pairs``, all pairs at once: half of there and back. Every rank calls this."""
    found = []
    mine = next((pair for pair in pairs if world.rank in pair), None)
    for size in sizes:
        times = ping(world, mine, size, repeats if size < _LONG else max(2, repeats // 4))
        found.append(CommPoint(op="p2p", tier=tier, ranks=2, size=float(size), seconds=times))
    return found


def ping(world: World, pair: tuple[int, int] | None, size: int, repeats: int) -> float:
    """Seconds of a message of ``size`` bytes one way between this rank and the other of ``pair``; 0 without one."""
    world.group("pp", "dp", "cp", "tp").barrier()
    if pair is None:
        return 0.0
    first, peer = world.rank == min(pair), sum(pair) - world.rank
    message, answer = torch.zeros(size // 4, device=world.device), torch.empty(size // 4, device=world.device)
    times = []
    for _ in range(_WARM + repeats):
        begin = perf_counter()
        if first:
            world.wire.send(message, peer)
        world.wire.recv(answer, peer).wait()
        if not first:
            world.wire.send(message, peer)
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        times.append((perf_counter() - begin) / 2)
    world.wire.flush()
    return quantiles(times[_WARM:], n=4, method="inclusive")[0]


def waiting(world: World) -> float:
    """Share of a core that a rank takes while it waits: all but the first wait for it, which sleeps."""
    everyone = world.group("pp", "dp", "cp", "tp")
    everyone.barrier()
    begin, used = perf_counter(), process_time()
    if world.rank == 0:
        sleep(_SLEEP)
    everyone.barrier()
    share = 0.0 if world.rank == 0 else (process_time() - used) / (perf_counter() - begin)
    shares = everyone.all_reduce(torch.tensor([share], dtype=torch.float64, device=world.device)).wait()
    return min(1.0, float(shares) / max(1, everyone.size - 1))


def matrix(world: World, repeats: int = 4) -> list[list[float]]:
    """Rank-to-rank bytes/s of every pair, 0 on the diagonal, the same on every rank.

    Rounds of a tournament: in each, every rank meets one other, so that n ranks take n - 1 rounds.
    """
    size = world.mesh.world_size
    mine = torch.zeros(size, dtype=torch.float64)
    for pairs in tournament(size):
        pair = next((pair for pair in pairs if world.rank in pair), None)
        took = ping(world, pair, MATRIX_SIZE, repeats)
        if pair is not None:
            mine[sum(pair) - world.rank] = took
    rows = world.group("pp", "dp", "cp", "tp").all_gather(mine.to(world.device)).wait().cpu().view(size, size)
    mean = (rows + rows.t()) / 2
    return [[MATRIX_SIZE / took if took > 0 else 0.0 for took in row] for row in mean.tolist()]


def tournament(size: int) -> Iterator[list[tuple[int, int]]]:
    """Rounds in which everybody meets everybody once (the circle method; who meets nobody in an odd field rests)."""
    seats = list(range(size)) + ([-1] if size % 2 else [])
    for _ in range(len(seats) - 1):
        pairs = [(seats[i], seats[-1 - i]) for i in range(len(seats) // 2)]
        yield [pair for pair in pairs if -1 not in pair]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def _together(world: World, call: Callable[[], Pending], repeats: int) -> float:
    """Seconds of one call: of the slowest rank, all starting from a barrier, in the best of a few windows."""
    everyone = world.group("pp", "dp", "cp", "tp")
    for _ in range(_WARM):
        call().wait()
    times = []
    for _ in range(_WINDOWS):
        everyone.barrier()
        begin = perf_counter()
        for _ in range(repeats):
            call().wait()
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        times.append((perf_counter() - begin) / repeats)
    took = torch.tensor(times, dtype=torch.float64, device=world.device)
    return float(everyone.all_reduce(took, "max").wait().min())
