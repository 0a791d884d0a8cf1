"""Replicas on several hosts, of real runs: a host is lost with its memory, and nothing more than the step under way."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest

from plait.core.config import dump, loads
from plait.telemetry.record import read_metrics
from plait.train.events_log import EVENTS, read
from plait.train.launch import Place, Worker
from plait.train.run import prepare
from plait.train.step import Steps, Taken
from plait.train.trainer import train
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
LOST = 7
"""The step in which hosts are lost: the disk has 4, the memory 7."""
PLANS = {
    # All weights are on both hosts; what compression keeps back is each rank's own.
    "copies": (2, ("plan.dp=2", "plan.compress=topk:0.25", "run.fallback_plans=[]")),
    # Masters and moments are cut over the hosts: each has what the other has not.
    "cut": (4, ("plan.dp=2", "plan.tp=2", "plan.zero=1")),
}


class LostError(Exception):
    """All ranks end here."""


def visit(connect: Connect, text: str, world_size: int, memories: list[str], lost: int) -> None:
    """One rank of a run on the hosts whose memory ``memories`` are, by rank, until step ``lost``."""
    setup, rank = prepare(loads(text), world_size=world_size), connect.rank
    place = Place(rank=rank, local_rank=rank, world_size=world_size)
    worker = Worker(place=place, device="cpu", timeout=60.0, memory=Path(memories[rank]))
    take = Steps.take

    def until(self: Steps, step: int) -> Taken:
        if step == lost:
            raise LostError
        return take(self, step)

    with mock.patch.object(Steps, "take", until), suppress(LostError):
        train(setup, connect(setup.plan.mesh(world_size)), as_json=True, worker=worker)


def memories(root: Path, ranks: int) -> list[str]:
    """Two hosts, half of the ranks on each."""
    found = [root / f"memory-{2 * rank // ranks}" for rank in range(ranks)]
    for folder in found:
        folder.mkdir(exist_ok=True)
    return [str(folder) for folder in found]


def resumed(folder: Path) -> list[tuple[int, str]]:
    return [(event.fields["step"], event.fields["source"]) for event in read(folder / EVENTS) if event.kind == "resume"]


@pytest.mark.parametrize("name", PLANS)
def test_a_host_is_lost_with_its_memory(pool: Pool, tokens: Path, tmp_path: Path, name: str) -> None:
    """Another comes in its place, with nothing: the run goes on from the step under way. Then a byte is wrong, too."""
    ranks, plan = PLANS[name]
    calm, folder = tmp_path / "calm", tmp_path / "run"
    pool.run(ranks, jobs.train_in_pool, dump(config(tokens, calm, *RUN, *plan)), ranks)
    hosts = memories(tmp_path, ranks)
    pool.run(ranks, visit, dump(config(tokens, folder, *RUN, *plan)), ranks, hosts, LOST)
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == list(range(LOST))
    again = dump(config(tokens, folder, *RUN, *plan, "run.resume=true"))
    before = tmp_path / "before"
    shutil.copytree(folder, before)
    shutil.copytree(hosts[0], tmp_path / "kept")

    empty(Path(hosts[-1]))
    pool.run(ranks, visit, again, ranks, hosts, 99)
    assert resumed(folder) == [(LOST, "memory")]
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == list(range(8))
    same_run(folder, calm, loss=0.0, weights=0.0)

    # The same loss, and a wrong byte in what the lost host's ranks had sent to the other: the disk has to do.
    shutil.rmtree(folder)
    before.rename(folder)
    for host, content in ((hosts[0], tmp_path / "kept"), (hosts[-1], None)):
        empty(Path(host))
        if content is not None:
            shutil.copytree(content, host, dirs_exist_ok=True)
    (mirrored, *_) = sorted(Path(hosts[0]).glob(f"step-*/rank-{ranks - 1:05d}*"))
    flipped = bytearray(mirrored.read_bytes())
    flipped[-1] ^= 1
    mirrored.write_bytes(flipped)
    pool.run(ranks, visit, again, ranks, hosts, 99)
    assert resumed(folder) == [(4, "disk")]
    troubles = [event.fields["error"] for event in read(folder / EVENTS) if event.kind == "damaged"]
    assert f"{mirrored} is damaged between bytes" in troubles[0]
    assert f"{mirrored.name} is on none of the 2 hosts" in troubles[1]
    same_run(folder, calm, loss=0.0, weights=0.0)


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
