"""What ranks do together outside a step, when it takes long, fails on one, or meets another node's disk."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.checkpoint.reader import Checkpoint, Request
from plait.checkpoint.reshard import volume
from plait.checkpoint.store import WeightFolder
from plait.comm.world import World
from plait.core.config import dump, load, loads
from plait.core.errors import ConfigError, WeightsError
from plait.core.mesh import Mesh
from plait.core.plan import Plan
from plait.core.shard import Box, Cut, Section, ShardSpec, split
from plait.models.config import parameter_shapes
from plait.models.init import InitSource
from plait.parallel.state import Stretch
from plait.train import data, exchange, trainer
from plait.train.exchange import pieces_of, read_stretches, shared_folder, together
from plait.train.launch import Place, Worker
from tests.parallel.cuts import LLAMA, Run, build
from tests.pool import Connect, Pool

TIMEOUT = 2.0
"""Seconds of a step; what is slow takes half of one more."""


def slow_work(connect: Connect, transport: str) -> tuple[list[object], float]:
    world = connect(Mesh(dp=2), timeout=TIMEOUT, transport=transport)

    def work() -> int:
        time.sleep(TIMEOUT + 0.5 if world.rank == 1 else 0)
        return world.rank

    return together(world, work), world.book.timeout


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_work_may_take_longer_than_a_step(pool: Pool, transport: str) -> None:
    assert pool.run(2, slow_work, transport) == [([0, 1], TIMEOUT)] * 2


def failing_work(connect: Connect) -> tuple[str, float]:
    world = connect(Mesh(dp=2))

    def work() -> None:
        if world.rank == 1:
            raise WeightsError("the disk is full")

    with pytest.raises(WeightsError, match="the disk is full") as caught:
        together(world, work)
    return str(caught.value), world.book.timeout


def test_one_ranks_trouble_is_everyones_at_once(pool: Pool) -> None:
    assert pool.run(2, failing_work) == [("rank 1: the disk is full", 60.0), ("the disk is full", 60.0)]


def find_folder(connect: Connect, homes: list[str]) -> str:
    """/proc/self/cwd is one name for another folder in every rank, as a local disk is on every node."""
    world, before = connect(Mesh(dp=2)), Path.cwd()
    os.chdir(homes[world.rank])
    try:
        return str(shared_folder(world, Path("/proc/self/cwd") if world.rank == 0 else None, "run.dir"))
    except ConfigError as error:
        return str(error)
    finally:
        os.chdir(before)


def test_a_folder_that_a_rank_does_not_see_is_refused(pool: Pool, tmp_path: Path) -> None:
    homes = [tmp_path / "node1", tmp_path / "node2"]
    for home in homes:
        home.mkdir()
    assert pool.run(2, find_folder, [str(homes[0])] * 2) == ["/proc/self/cwd"] * 2
    for said in pool.run(2, find_folder, [str(home) for home in homes]):
        assert "is not there for rank 1" in said
        assert "run.dir must lie on storage that every node sees" in said
    assert not any(any(home.iterdir()) for home in homes)


def slow_disk(connect: Connect, text: str, cache: str) -> int:
    """`trainer.run_rank`, with an encoding and a rank's weights that take longer than a step may."""
    place = Place(rank=connect.rank, local_rank=connect.rank, world_size=2)
    worker = Worker(place=place, device="cpu", timeout=60.0)
    encode, write, encoded = data.encode_text, exchange.write_shard, []

    def slow_encode(*arguments: Any) -> Path:
        encoded.append(1)
        time.sleep(TIMEOUT + 0.5)
        return encode(*arguments)

    def slow_write(folder: Path, rank: int, pieces: Any) -> Any:
        time.sleep(TIMEOUT + 0.5 if rank == 0 else 0)
        return write(folder, rank, pieces)

    def in_time(world: World, work: Any) -> list[object]:
        """`together` in a run whose steps have `TIMEOUT`: the rest of it, on a busy machine, has a minute."""
        world.group("pp", "dp", "cp", "tp").barrier()
        usual, world.book.timeout = world.book.timeout, TIMEOUT
        try:
            return together(world, work)
        finally:
            world.book.timeout = usual

    with (
        mock.patch.dict(os.environ, XDG_CACHE_HOME=cache),
        mock.patch.object(data, "encode_text", slow_encode),
        mock.patch.object(exchange, "write_shard", slow_write),
        mock.patch.object(exchange, "together", in_time),
        mock.patch.object(Worker, "connect", lambda self, mesh: connect(mesh)),
    ):
        trainer.run_rank(worker, text, True)
    return len(encoded)


def test_slow_text_and_a_slow_disk_do_not_end_a_run(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("To be, or not to be. " * 50)
    (tmp_path / "run").mkdir()
    sizes = ("model.hidden_size=32", "model.num_layers=2", "model.ffn_size=48", "data.seq=16", "train.steps=1")
    plan = ("plan.tp=1", "plan.pp=1", "plan.dp=2", "plan.zero=1", "train.global_batch=8", "train.eval_every=0")
    config = load(None, [*sizes, *plan, f"data.text={tmp_path}/book.txt", f"run.dir={tmp_path}/run"])
    assert loads(dump(config)) == config
    assert pool.run(2, slow_disk, dump(config), str(tmp_path / "cache")) == [1, 0]
    assert WeightFolder(tmp_path / "run/weights").names
    assert not list((tmp_path / "run").glob(".probe*"))


def written_weights(connect: Connect, text: str, folder: str) -> None:
    """Write the weights that a cut model was filled with; two parameters, a matrix and a vector, are frozen."""
    run = Run(freeze=("layers.1.mlp.down.weight", "layers.0.norm1"))
    parallel, _ = build(connect, text, Plan.parse(text).mesh(4).world_size, LLAMA, run)
    exchange.write_weights(Path(folder), parallel.world, LLAMA, parallel.zero)


@pytest.mark.parametrize(
    "text",
    [
        "dp=4",
        "dp=4 zero=1",
        "tp=4",
        "dp=2 tp=2 zero=2",
        "pp=2 dp=2 zero=3",
        "dp=4 zero=3 zero_group=2",
        "dp=4 zero=2 zero_group=1",
    ],
)
def test_every_element_is_written_once_at_every_level(pool: Pool, tmp_path: Path, text: str) -> None:
    """The store refuses overlaps and gaps when it is read; values are those of the source, bit for bit."""
    pool.run(4, written_weights, text, str(tmp_path / "weights"))
    found, source = WeightFolder(tmp_path / "weights"), InitSource(LLAMA, 3)
    for name in parameter_shapes(LLAMA):
        assert torch.equal(found.read(name), source.read(name))
    numbers = sum(math.prod(shape) for shape in parameter_shapes(LLAMA).values())
    files = [path for path in (tmp_path / "weights").iterdir() if path.suffix == ".safetensors"]
    assert 4 * numbers <= sum(path.stat().st_size for path in files) < 4 * numbers + 8192 * len(files)


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[ShardSpec, int, int]:
    """A tensor of 1 to 3 dims, one of them cut on tp in sections (some in fewer parts than ranks), and data ranks."""
    tp = draw(st.sampled_from([1, 2, 3, 4]))
    parts = [parts for parts in range(1, tp + 1) if tp % parts == 0]
    sections = draw(
        st.lists(
            st.builds(
                lambda size, part: Section(size=size, parts=part),
                st.integers(1, 9),
                st.one_of(st.none(), st.sampled_from(parts)),
            ),
            min_size=1,
            max_size=3,
        )
    )
    dim = draw(st.integers(0, 2))
    shape = [draw(st.integers(1, 4)) for _ in range(draw(st.integers(dim + 1, 3)))]
    shape[dim] = sum(section.size for section in sections)
    cut = Cut(axis="tp", dim=dim, sections=tuple(sections))
    return ShardSpec(shape=tuple(shape), cuts=(cut,)), tp, draw(st.integers(1, 4))


@settings(max_examples=100, deadline=None)
@given(cut_tensors())
def test_stretches_give_every_element_once_and_take_it_back(case: tuple[ShardSpec, int, int]) -> None:
    """Of any cut, any shards: what the ranks give is the whole tensor once, and what they read is what they had."""
    spec, tp, shards = case
    whole = torch.arange(math.prod(spec.shape), dtype=torch.float32).view(spec.shape)
    given_once = torch.zeros(spec.shape)
    for rank in range(tp):
        at = {"tp": rank, "dp": 0}
        pieces = spec.pieces({"tp": tp}, at)
        local = torch.empty(spec.local_shape({"tp": tp}, at))
        for piece in pieces:
            local[_slices(piece.local)] = whole[_slices(piece.box)]
        for shard in range(shards):
            begin, end = split(local.numel(), shards, shard)
            if begin == end:
                continue
            mine = Stretch(
                name="weights/a",
                shape=spec.shape,
                local=tuple(local.shape),
                pieces=pieces,
                start=begin,
                values=local.view(-1)[begin:end].clone(),
                replicas=(rank * shards + shard,),
                counted=True,
            )
            for stored in pieces_of([mine], at):
                parts = stored.values.split([volume(box) for box in stored.boxes])
                for box, part in zip(stored.boxes, parts, strict=True):
                    assert torch.equal(part.view(whole[_slices(box)].shape), whole[_slices(box)])
                    given_once[_slices(box)] += 1
            empty = dataclasses.replace(mine, values=torch.full_like(mine.values, math.nan))
            read_stretches(cast(Checkpoint, _Whole(whole)), [empty])
            assert torch.equal(empty.values, mine.values)
    assert bool((given_once == 1).all())


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*edge) for edge in box)


class _Whole:
    """A checkpoint of one tensor, in memory."""

    path = Path("memory")

    def __init__(self, whole: torch.Tensor) -> None:
        self._whole = whole

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._whole.shape)

    def load(self, requests: list[Request]) -> None:
        for request in requests:
            values = [self._whole[_slices(box)].reshape(-1) for box in request.boxes]
            request.out.view(-1).copy_(torch.cat(values))
