"""One pool of gloo/shared-memory workers for the whole test session: starting processes is what makes suites slow.

A job is a top-level function ``f(connect, *args)``; ``connect(mesh)`` joins the ranks of the job as a `World`.
Workers are daemons that end with the test process, whatever becomes of it.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from plait.comm.world import World
from plait.core.mesh import Mesh

RANKS = 8
JOB_SECONDS = 120.0


class Connect:
    """Joins the ranks of one job."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self.store = store
        self.rank = rank
        self.worlds: list[World] = []

    def __call__(self, mesh: Mesh, *, timeout: float = 60.0, transport: str = "auto") -> World:
        if mesh.world_size == 1:
            return World.alone()
        assert not self.worlds, "one world a job"
        world = World.connect(
            mesh, device=torch.device("cpu"), timeout=timeout, transport=transport, store=self.store, rank=self.rank
        )
        self.worlds.append(world)
        return world


def _work(pipe: Connection, rank: int, port: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port)
    while True:
        try:
            function, args, job = pipe.recv()
        except EOFError:
            return
        connect = Connect(dist.PrefixStore(f"job-{job}", store), rank)
        try:
            answer = (True, function(connect, *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        for world in connect.worlds:
            world.close()
        pipe.send(answer)


class Pool:
    """``RANKS`` processes that run jobs together."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        # The second is what torch's optimizers load at their first step, a second of each worker's otherwise.
        self._context.set_forkserver_preload(["plait.train.trainer", "torch._dynamo"])
        self._workers: list[tuple[Any, Connection]] = []
        # Where the ranks of a job find each other: a store of files would take longer than many a job.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._jobs = 0

    def _start(self, ranks: int) -> None:
        for rank in range(len(self._workers), ranks):
            mine, theirs = self._context.Pipe()
            process = self._context.Process(target=_work, args=(theirs, rank, self._store.port), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, mine))

    def run(self, ranks: int, function: Callable[..., Any], *args: Any, expect_failure: bool = False) -> list[Any]:
        """``function(connect, *args)`` on ranks 0..ranks-1; their results in order. A failing rank's traceback is
        raised."""
        self._start(ranks)
        self._jobs += 1
        pipes = [pipe for _, pipe in self._workers[:ranks]]
        for pipe in pipes:
            pipe.send((function, args, self._jobs))
        answers: dict[Connection, Any] = {}
        deadline = time.monotonic() + JOB_SECONDS
        while len(answers) < ranks:
            ready = wait([pipe for pipe in pipes if pipe not in answers], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = [rank for rank, pipe in enumerate(pipes) if pipe not in answers]
                self.close()
                raise TimeoutError(f"ranks {late} did not end within {JOB_SECONDS:g} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    answers[pipe] = pipe.recv()
                except EOFError:
                    raise RuntimeError(self._death(pipes, pipe, answers)) from None
            if any(not ok for ok, _ in answers.values()) and not expect_failure and len(answers) < ranks:
                # The others may wait for the failed one: do not let them, and start anew.
                time.sleep(0.2)
                for pipe in pipes:
                    with suppress(EOFError):  # one that died: of the failure that is told
                        if pipe not in answers and pipe.poll():
                            answers[pipe] = pipe.recv()
                if len(answers) < ranks:
                    self.close()
                    break
        failed = [
            (rank, answers[pipe][1]) for rank, pipe in enumerate(pipes) if pipe in answers and not answers[pipe][0]
        ]
        if failed and not expect_failure:
            raise AssertionError("\n".join(f"rank {rank}:\n{trace}" for rank, trace in failed))
        return [answers[pipe][1] for pipe in pipes]

    def _death(self, pipes: list[Connection], dead: Connection, answers: dict[Connection, Any]) -> str:
        """What to say of a worker that has ended, with what the others came to: its end may be of theirs; `close`."""
        process, _ = self._workers[pipes.index(dead)]
        process.join(5)
        for pipe in pipes:
            with suppress(EOFError, OSError):
                if pipe is not dead and pipe not in answers and pipe.poll(1):
                    answers[pipe] = pipe.recv()
        told = [f"rank {rank}:\n{answers[pipe][1]}" for rank, pipe in enumerate(pipes) if not answers.get(pipe, "1")[0]]
        self.close()
        return "\n".join([f"rank {pipes.index(dead)} died, exit code {process.exitcode}", *told])

    def close(self) -> None:
        """End the workers; the next job starts new ones."""
        for process, pipe in self._workers:
            pipe.close()
            process.terminate()
        for process, _ in self._workers:
            process.join(5)
        self._workers.clear()
