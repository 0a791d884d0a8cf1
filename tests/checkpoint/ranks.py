"""Ranks that save together, as threads and as processes, and a state that has every form a run's can have."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from plait.checkpoint.reader import Checkpoint
from plait.checkpoint.reshard import flat_to_boxes
from plait.checkpoint.saver import Saver
from plait.checkpoint.state import Piece, Snapshot
from plait.core.shard import Box, full, split

RANKS = 4
SCALARS = {"samples": 96, "scale": 65536.0, "plan": "tp=2 dp=2", "seen": [1, None, "x"]}


def state(step: int) -> dict[str, torch.Tensor]:
    """The whole tensors after ``step`` steps."""
    draw = torch.Generator().manual_seed(step)
    return {
        "weights/rows": torch.randn(9, 8, generator=draw),  # uneven rows
        "weights/columns": torch.randn(5, 6, generator=draw).bfloat16(),
        "exp_avg/rows": torch.randn(9, 8, generator=draw),  # flat ranges, as ZeRO cuts them
        "weights/tall": torch.randn(640, 512, generator=draw),  # held by all, and large enough to be cut
        "weights/norm": torch.randn(7, generator=draw).double(),  # held by all
        "weights/bias": torch.randn(3, generator=draw).half(),  # held by two
        "router/share": torch.arange(6) + step,
        "router/on": torch.tensor([True, False]),
        "optimizer/step": torch.tensor(float(step)),  # a scalar, held by all
        "weights/none": torch.zeros(0, 4),
        "weights/few": torch.randn(2, 3, generator=draw),  # fewer rows than ranks
    }


def _at(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(start, stop) for start, stop in box)]


def snapshot(rank: int, ranks: int, step: int) -> Snapshot:
    """What ``rank`` of ``ranks`` holds of `state`."""
    pieces: list[Piece] = []
    everyone = tuple(range(ranks))
    for name, tensor in state(step).items():
        shape = tuple(tensor.shape)
        replicas: tuple[int, ...] = ()
        if name in ("weights/rows", "weights/few"):
            boxes = [(split(shape[0], ranks, rank), (0, shape[1]))]
        elif name == "weights/columns":
            boxes = [((0, shape[0]), split(shape[1], ranks, rank))]
        elif name == "exp_avg/rows":
            boxes = flat_to_boxes(shape, *split(tensor.numel(), ranks, rank))
        elif name == "weights/bias":
            if rank > 1:
                continue
            boxes, replicas = [full(shape)], everyone[:2]
        elif name.startswith("router/"):
            if rank != ranks - 1:
                continue
            boxes = [full(shape)]
        else:
            boxes, replicas = [full(shape)], everyone
        parts = [_at(tensor, box).reshape(-1) for box in boxes]
        values = torch.cat(parts) if parts else tensor.new_empty(0)
        pieces.append(Piece(name=name, shape=shape, values=values, boxes=tuple(boxes), replicas=replicas))
    return Snapshot(step=step, pieces=pieces, scalars={**SCALARS, "step": step})


def assert_state(path: Path, step: int) -> None:
    """The checkpoint in ``path`` is `state` of ``step``, every bit of it."""
    opened = Checkpoint.open(path, verify=True)
    wanted = state(step)
    assert opened.step == step
    assert opened.scalars == {**SCALARS, "step": step}
    assert set(opened.names) == set(wanted)
    for name, tensor in wanted.items():
        found = opened.read(name)
        assert found.dtype == tensor.dtype, name
        assert found.shape == tensor.shape, name
        assert torch.equal(found, tensor), name


class Alone:
    """The agreement of one rank with itself."""

    def gather(self, value: Any) -> list[Any]:
        return [json.loads(json.dumps(value))]


class Threads:
    """The agreement of threads of one process; make one for all, and call `of` for each rank."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks, timeout=30)
        self.rows: list[Any] = [None] * ranks

    def of(self, rank: int) -> OneThread:
        return OneThread(self, rank)


class OneThread:
    def __init__(self, all_of_them: Threads, rank: int) -> None:
        self._all, self._rank = all_of_them, rank

    def gather(self, value: Any) -> list[Any]:
        self._all.rows[self._rank] = json.dumps(value)
        self._all.barrier.wait()
        found = [json.loads(row) for row in self._all.rows]
        self._all.barrier.wait()
        return found

    def barrier(self) -> None:
        self._all.barrier.wait()


def together(ranks: int, work: Callable[[int, OneThread], Any]) -> list[Any]:
    """``work(rank, agreement)`` in a thread a rank; what they gave. The first error is raised here."""
    shared = Threads(ranks)
    found: list[Any] = [None] * ranks

    def one(rank: int) -> None:
        try:
            found[rank] = work(rank, shared.of(rank))
        except BaseException as error:
            found[rank] = error
            shared.barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return found


class Files:
    """The agreement of processes by files in ``folder``; an OSError once ``folder/dead`` is there, or after 30 s."""

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        self._folder, self._rank, self._ranks, self._turn = folder, rank, ranks, 0

    def gather(self, value: Any) -> list[Any]:
        self._turn += 1
        mine = self._folder / f"{self._turn}-{self._rank}"
        mine.with_suffix(".tmp").write_text(json.dumps(value))
        os.replace(mine.with_suffix(".tmp"), mine)
        deadline = time.monotonic() + 30
        rows = [self._folder / f"{self._turn}-{rank}" for rank in range(self._ranks)]
        while not all(row.exists() for row in rows):
            if (self._folder / "dead").exists() or time.monotonic() > deadline:
                missing = [rank for rank, row in enumerate(rows) if not row.exists()]
                if missing:
                    raise OSError(f"ranks {missing} are gone")
            time.sleep(0.001)
        return [json.loads(row.read_text()) for row in rows]


def save(folder: Path, ranks: int, step: int, **options: Any) -> list[Any]:
    """Save `state` of ``step`` with ``ranks`` threads; each rank's outcome."""

    def one(rank: int, group: OneThread) -> Any:
        saver = Saver(folder, rank=rank, group=group, **options)
        saver.save(snapshot(rank, ranks, step))
        (saved,) = saver.drain()
        return saved

    return together(ranks, one)


def _rank(folder: Path, words: Path, rank: int, phase: str | None) -> None:
    """Save step 2 over step 1 as ``rank``, and be killed at ``phase``."""

    def probe(passed: str) -> None:
        if passed == phase:
            os.kill(os.getpid(), signal.SIGKILL)

    with Saver(folder, rank=rank, group=Files(words, rank, RANKS), keep=1, probe=probe) as saver:
        saver.save(snapshot(rank, RANKS, 2))


def _born(folder: Path, words: Path, rank: int, phase: str | None) -> int:
    child = os.fork()
    if child:
        return child
    try:
        _rank(folder, words, rank, phase)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _ended(child: int) -> int:
    """The exit code of ``child``; it is killed where it takes more than 30 s."""
    deadline = time.monotonic() + 30
    while True:
        gone, status = os.waitpid(child, os.WNOHANG)
        if gone:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.001)


def _nursery(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while (job := pipe.recv()) is not None:
        folder, words, rank, phase = job
        children = [_born(folder, words, one, phase if one == rank else None) for one in range(RANKS)]
        codes = {rank: _ended(children[rank])}
        (words / "dead").touch()
        codes |= {one: _ended(child) for one, child in enumerate(children) if one != rank}
        pipe.send([codes[one] for one in range(RANKS)])


class Nursery:
    """A process that gives birth to ranks by fork: starting one anew for each of hundreds would take minutes."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["plait.parallel.apply"])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_nursery, args=(theirs,))
        self._process.start()
        theirs.close()

    def kill(self, folder: Path, words: Path, rank: int, phase: str) -> list[int]:
        """All `RANKS` save step 2 into ``folder``, and ``rank`` is killed at ``phase``: their exit codes."""
        self._pipe.send((folder, words, rank, phase))
        if not self._pipe.poll(150):
            raise TimeoutError("no answer from the nursery")
        codes: list[int] = self._pipe.recv()
        return codes

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(10)
