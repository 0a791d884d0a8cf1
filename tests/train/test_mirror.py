"""Replicas on several hosts, of real runs: a host is lost with its memory, and nothing more than the step under way."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from unittest import mock

import pytest

from plait.checkpoint import relay, union
from plait.checkpoint.steps import committed
from plait.core.config import dump, loads
from plait.core.errors import WeightsError
from plait.telemetry.record import read_metrics
from plait.train.events_log import EVENTS, read
from plait.train.launch import Place, Worker
from plait.train.run import prepare
from plait.train.step import Steps, Taken
from plait.train.trainer import train
from tests.checkpoint.test_spread import Os
from tests.pool import Connect, Pool
from tests.train import jobs
from tests.train.test_trainer import config, same_run, tokens

__all__ = ["tokens"]

RUN = (
    "train.steps=8",
    "train.eval_every=0",
    "checkpoint.every=4",
    "checkpoint.asynchronous=false",
    "run.replicas=1",
    "run.device=cpu",
)
RANKS = 2
LOST = 7
"""The step in which hosts are lost: the disk has 4, the memory 7."""
PLANS = {
    # All weights are on both hosts; what compression keeps back is each rank's own.
    "copies": ("plan.dp=2", "plan.compress=topk:0.25"),
    # Masters and moments are cut over the hosts: each has what the other has not.
    "cut": ("plan.dp=2", "plan.zero=1"),
}


class LostError(Exception):
    """All ranks end here."""


def visit(connect: Connect, text: str, memories: list[str], lost: int, fails: bool = False) -> None:
    """One rank of a run on the hosts whose memory ``memories`` are, by rank, until step ``lost``. ``fails``: no file
    comes from another host."""
    setup, rank = prepare(loads(text), world_size=RANKS), connect.rank
    place = Place(rank=rank, local_rank=rank, world_size=RANKS)
    worker = Worker(place=place, device="cpu", timeout=60.0, memory=Path(memories[rank]))
    take = Steps.take

    def until(self: Steps, step: int) -> Taken:
        if step == lost:
            raise LostError
        return take(self, step)

    def refuse(*_: object) -> None:
        raise WeightsError("rank 1: No space left on device")  # as all ranks come to say

    with mock.patch.object(Steps, "take", until), suppress(LostError), ExitStack() as patches:
        if fails:
            patches.enter_context(mock.patch.object(union, "bring", refuse))
        train(setup, connect(setup.plan.mesh(RANKS)), as_json=True, worker=worker)


def memories(root: Path) -> list[str]:
    """Two hosts, a rank on each."""
    found = [root / f"memory-{rank}" for rank in range(RANKS)]
    for folder in found:
        folder.mkdir()
    return [str(folder) for folder in found]


def resumed(folder: Path) -> list[tuple[int, str]]:
    return [(event.fields["step"], event.fields["source"]) for event in read(folder / EVENTS) if event.kind == "resume"]


@pytest.mark.parametrize("name", PLANS)
def test_a_host_is_lost_with_its_memory(pool: Pool, tokens: Path, tmp_path: Path, name: str) -> None:
    """Another comes in its place, with nothing: the run goes on from the step under way. Then a byte is wrong, too."""
    plan = PLANS[name]
    calm, folder = tmp_path / "calm", tmp_path / "run"
    pool.run(RANKS, jobs.train_in_pool, dump(config(tokens, calm, *RUN, *plan)), RANKS)
    hosts = memories(tmp_path)
    pool.run(RANKS, visit, dump(config(tokens, folder, *RUN, *plan)), hosts, LOST)
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == list(range(LOST))
    again = dump(config(tokens, folder, *RUN, *plan, "run.resume=true"))
    before = tmp_path / "before"
    shutil.copytree(folder, before)
    shutil.copytree(hosts[0], tmp_path / "kept")

    def restore() -> None:
        """The memory as the loss of a host has left it."""
        for host in hosts:
            empty(Path(host))
        shutil.copytree(tmp_path / "kept", hosts[0], dirs_exist_ok=True)

    restore()
    pool.run(RANKS, visit, again, hosts, 99)
    assert resumed(folder) == [(LOST, "memory")]
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == list(range(8))
    same_run(folder, calm, loss=0.0, weights=0.0)

    # The same loss, and no room for what comes from the other; or a wrong byte in what the lost host's ranks had sent
    # there: the disk has to do.
    def again_from_the_disk(fails: bool) -> list[str]:
        shutil.rmtree(folder)
        shutil.copytree(before, folder)
        pool.run(RANKS, visit, again, hosts, 99, fails)
        assert resumed(folder) == [(4, "disk")]
        same_run(folder, calm, loss=0.0, weights=0.0)
        return [event.fields["error"] for event in read(folder / EVENTS) if event.kind == "damaged"]

    restore()
    if name == "cut":
        (why,) = again_from_the_disk(fails=True)
        assert why == f"the replica of step {LOST} cannot be had: rank 1: No space left on device"
        restore()
    (mirrored, *_) = sorted(Path(hosts[0]).glob(f"step-*/rank-{RANKS - 1:05d}*"))
    flipped = bytearray(mirrored.read_bytes())
    flipped[-1] ^= 1
    mirrored.write_bytes(flipped)
    damaged, incomplete = again_from_the_disk(fails=False)
    assert f"{mirrored} is damaged between bytes" in damaged
    assert f"{mirrored.name} is on none of the 2 hosts" in incomplete


def test_replicas_of_a_run_whose_folder_was_removed_are_not_gone_on_from(
    pool: Pool, tokens: Path, tmp_path: Path
) -> None:
    """Whoever starts the ranks is still there, and so is what they had left in memory."""
    folder, hosts = tmp_path / "run", memories(tmp_path)
    more = (*PLANS["copies"], "train.steps=2", "checkpoint.every=0", "run.resume=true")
    for steps in (1, 2):
        text = dump(config(tokens, folder, *RUN, *more))
        pool.run(RANKS, visit, text, hosts, steps)
        assert resumed(folder) == []
        assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == list(range(steps))
        shutil.rmtree(folder)


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def crowded(connect: Connect, text: str, memories: list[str]) -> None:
    """One rank of two; the memory of the second has no room for what comes from the first."""

    def refuse(descriptor: int, data: memoryview, at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with mock.patch.object(relay, "os", Os(refuse)) if connect.rank else nullcontext():
        visit(connect, text, memories, 99)


def test_no_room_in_memory_ends_no_run(pool: Pool, tokens: Path, tmp_path: Path) -> None:
    folder, steps = tmp_path / "run", 3
    text = dump(config(tokens, folder, *RUN, *PLANS["cut"], f"train.steps={steps}"))
    pool.run(RANKS, crowded, text, memories(tmp_path))
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == list(range(steps))
    told = [event.fields for event in read(folder / EVENTS) if event.kind == "replica"]
    assert [fields["step"] for fields in told] == [1, 2, 3]
    assert all("rank 1: No space left on device: " in str(fields["error"]) for fields in told)
    assert [entry.step for entry in committed(folder / "checkpoints")] == [steps]
