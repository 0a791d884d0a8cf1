"""`Saver`: what was given at one instant is what is stored; one save at a time; failures are told."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from plait.checkpoint import disk
from plait.checkpoint.disk import BLOCK, block_sums
from plait.checkpoint.reader import Checkpoint, latest
from plait.checkpoint.saver import Saver
from plait.checkpoint.state import Piece, Snapshot
from plait.checkpoint.steps import committed
from plait.core.errors import ConfigError
from plait.core.shard import full
from tests.checkpoint.ranks import Alone, OneThread, assert_state, save, snapshot, together


def one_piece(values: torch.Tensor, step: int = 1, **scalars: object) -> Snapshot:
    shape = tuple(values.shape)
    return Snapshot(
        step=step, pieces=[Piece(name="w", shape=shape, values=values, boxes=(full(shape),))], scalars=scalars
    )


def test_what_changes_after_save_is_not_stored(tmp_path: Path) -> None:
    """Weights and scalars of one instant, however long the writing takes."""
    go = threading.Event()
    saver = Saver(tmp_path, rank=0, group=Alone(), probe=lambda phase: go.wait(30) if phase == "begin.enter" else None)
    weights, scalars = torch.arange(1000.0), {"sample": [1]}
    taken = Snapshot(
        step=1, pieces=[Piece(name="w", shape=(1000,), values=weights, boxes=(((0, 1000),),))], scalars=scalars
    )
    saver.save(taken)
    assert saver.busy
    assert saver.poll() == []
    weights.zero_()
    scalars["sample"][0] = 2
    go.set()
    (saved,) = saver.drain()
    assert saved.error is None
    assert saved.path == tmp_path / "step-00000001"
    assert not saver.busy
    opened = Checkpoint.open(tmp_path / "step-00000001")
    assert torch.equal(opened.read("w"), torch.arange(1000.0))
    assert opened.scalars == {"sample": [1]}


def test_a_second_save_waits_for_the_first(tmp_path: Path) -> None:
    order: list[str] = []
    saver = Saver(tmp_path, rank=0, group=Alone(), keep=5, probe=order.append)
    for step in (1, 2, 3):
        saver.save(one_piece(torch.full((100,), float(step)), step))
    assert [saved.step for saved in saver.drain()] == [1, 2, 3]
    assert saver.drain() == []
    begins = [at for at, phase in enumerate(order) if phase == "save.copied"]
    ends = [at for at, phase in enumerate(order) if phase == "save.end"]
    assert all(end < begin for end, begin in zip(ends, begins[1:], strict=False))
    for step in (1, 2, 3):
        assert torch.equal(Checkpoint.open(tmp_path / f"step-{step:08d}").read("w"), torch.full((100,), float(step)))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_layouts_that_change_from_save_to_save(tmp_path: Path, asynchronous: bool) -> None:
    """The buffer is used again, grown, and never shows through."""
    saver = Saver(tmp_path, rank=0, group=Alone(), keep=10, asynchronous=asynchronous)
    tensors = [torch.rand(500), torch.rand(3_000_000), torch.rand(40, 50).t(), torch.rand(7).double(), torch.rand(500)]
    for step, values in enumerate(tensors, start=1):
        saver.save(one_piece(values, step))
        (saved,) = saver.drain()
        assert saved.error is None
        assert torch.equal(Checkpoint.open(tmp_path / f"step-{step:08d}", verify=True).read("w"), values)


def test_a_parameter_that_wants_gradients(tmp_path: Path) -> None:
    saver = Saver(tmp_path, rank=0, group=Alone(), asynchronous=False)
    saver.save(one_piece(torch.nn.Parameter(torch.ones(3, 3))))
    assert [saved.error for saved in saver.drain()] == [None]


def test_what_stays(tmp_path: Path) -> None:
    saver = Saver(tmp_path, rank=0, group=Alone(), keep=2, keep_every=4)
    for step in range(1, 12):
        saver.save(one_piece(torch.tensor(float(step)), step))
        saver.drain()
        kept = [entry.step for entry in committed(tmp_path)]
        assert kept == [s for s in range(1, step + 1) if s % 4 == 0 or s > step - 2]
    for keep, every in ((0, 0), (1, -1)):
        with pytest.raises(ConfigError, match=r"\[checkpoint\] keep"):
            Saver(tmp_path, rank=0, group=Alone(), keep=keep, keep_every=every)


def test_the_one_good_checkpoint_is_never_pruned(tmp_path: Path) -> None:
    """keep=1, and the newer ones are damaged: they do not count."""
    save(tmp_path, 1, 1, keep=9)
    save(tmp_path, 1, 2, keep=9)
    (tmp_path / "step-00000002/rank-00000.safetensors").unlink()
    saver = Saver(tmp_path, rank=0, group=Alone(), keep=1)

    def fail(phase: str) -> None:
        if phase == "commit.synced":
            raise OSError(28, "No space left on device")

    broken = Saver(tmp_path, rank=0, group=Alone(), keep=1, probe=fail)
    broken.save(snapshot(0, 1, 3))
    assert broken.drain()[0].error == "rank 0: No space left on device"
    assert latest(tmp_path) == tmp_path / "step-00000001"
    assert_state(tmp_path / "step-00000001", 1)
    saver.save(snapshot(0, 1, 3))
    assert saver.drain()[0].error is None
    assert [entry.step for entry in committed(tmp_path)] == [3]


def test_what_was_just_saved_is_not_pruned_for_a_newer_one(tmp_path: Path) -> None:
    """A run went back: the newest checkpoint has a wrong byte, which pruning does not look for."""
    save(tmp_path, 1, 4, keep=9)
    save(tmp_path, 1, 9, keep=9)
    damaged = tmp_path / "step-00000009/rank-00000.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    saver = Saver(tmp_path, rank=0, group=Alone(), keep=1, keep_every=4)
    for step in (5, 6):
        saver.save(snapshot(0, 1, step))
        assert saver.drain()[0].error is None
        assert latest(tmp_path) == tmp_path / f"step-{step:08d}"
        assert [entry.step for entry in committed(tmp_path)] == [4, step, 9]


def test_what_fails_after_the_commit_is_a_warning(tmp_path: Path) -> None:
    save(tmp_path, 1, 1)

    def fail(phase: str) -> None:
        if phase == "latest.written":
            raise OSError(5, "Input/output error")

    saver = Saver(tmp_path, rank=0, group=Alone(), keep=1, probe=fail)
    saver.save(snapshot(0, 1, 2))
    (saved,) = saver.drain()
    assert saved.error is None
    assert saved.path == tmp_path / "step-00000002"
    assert saved.warning == "step 2 is saved, but what follows failed: Input/output error"
    assert [entry.step for entry in committed(tmp_path)] == [1, 2]  # nothing is pruned that a pointer may point to
    assert latest(tmp_path) == tmp_path / "step-00000002"


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        (Piece(name="w", shape=(4,), values=torch.zeros(3), boxes=(((0, 4),),)), "w: 3 values do not fill"),
        (Piece(name="w", shape=(2,), values=torch.zeros(2), boxes=(((0, 2),),)), "both hold elements"),
        (Piece(name="w", shape=(5,), values=torch.zeros(1), boxes=(((4, 5),),)), "several shapes"),
        (Piece(name="w", shape=(4,), values=torch.zeros(1).long(), boxes=(((0, 1),),)), "several dtypes"),
        (Piece(name="v", shape=(4,), values=torch.zeros(1), boxes=(((0, 1),),)), "3 of the 4 elements"),
    ],
)
def test_pieces_that_make_no_whole_fail_on_all_ranks(tmp_path: Path, bad: Piece, word: str) -> None:
    """A rank that cannot even copy does not leave the others waiting."""
    good = Piece(name="w", shape=(4,), values=torch.zeros(4), boxes=(((0, 4),),))
    if word == "both hold elements":
        good = Piece(name="w", shape=(2,), values=torch.zeros(2), boxes=(((0, 2),),))

    def one(rank: int, group: OneThread) -> str:
        saver = Saver(tmp_path, rank=rank, group=group)
        saver.save(Snapshot(step=1, pieces=[bad if rank else good], scalars={}))
        (saved,) = saver.drain()
        assert saved.path is None
        return str(saved.error)

    errors = together(2, one)
    assert errors[0] == errors[1]
    assert word in errors[0]
    assert list(tmp_path.iterdir()) == []


def test_scalars_that_are_no_json_fail_the_save(tmp_path: Path) -> None:
    saver = Saver(tmp_path, rank=0, group=Alone())
    saver.save(one_piece(torch.zeros(1), scale=float("inf")))
    (saved,) = saver.drain()
    assert "no plain JSON" in str(saved.error)


def test_ranks_without_tensors_and_runs_without_any(tmp_path: Path) -> None:
    def one(rank: int, group: OneThread) -> str | None:
        saver = Saver(tmp_path, rank=rank, group=group, keep=5)
        pieces = [Piece(name="w", shape=(2,), values=torch.ones(2), boxes=(((0, 2),),))] if rank == 1 else []
        saver.save(Snapshot(step=1, pieces=pieces, scalars={}))
        saver.save(Snapshot(step=2, pieces=[], scalars={"only": "scalars"}))
        error: str | None = next((saved.error for saved in saver.drain() if saved.error), None)
        return error

    assert together(3, one) == [None] * 3
    assert sorted(path.name for path in (tmp_path / "step-00000001").iterdir()) == [
        "manifest.json",
        "rank-00001.safetensors",
    ]
    assert Checkpoint.open(tmp_path / "step-00000002", verify=True).scalars == {"only": "scalars"}


def test_leaving_waits_unless_an_error_ends_the_run(tmp_path: Path) -> None:
    with Saver(tmp_path, rank=0, group=Alone()) as saver:
        saver.save(one_piece(torch.zeros(5)))
    assert not saver.busy
    go = threading.Event()
    start = time.monotonic()
    with (
        pytest.raises(KeyError),
        Saver(tmp_path, rank=0, group=Alone(), probe=lambda p: go.wait(20) if p == "begin.enter" else None) as saver,
    ):
        saver.save(one_piece(torch.zeros(5), 2))
        raise KeyError
    assert time.monotonic() - start < 15
    go.set()
    saver.drain()


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, BLOCK - 1, BLOCK, 2 * BLOCK + 4096, 5 * BLOCK + 17])
@pytest.mark.parametrize("shift", [0, 3])
def test_files_of_every_length_with_their_sums(tmp_path: Path, size: int, shift: int) -> None:
    """In memory that begins with a page, and in memory that does not: there the page cache is what takes it."""
    memory = torch.randint(0, 256, (size + 3 + 4096,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    begin = -memory.data_ptr() % 4096 + shift
    content = memoryview(memory.numpy())[begin : begin + size]
    passed: list[str] = []
    sums = disk.write(tmp_path / "x", size, lambda start, stop: content[start:stop], passed.append)
    assert (tmp_path / "x").read_bytes() == content.tobytes()
    assert sums == block_sums(content)
    assert disk.first_damage(tmp_path / "x", size, sums) is None
    assert passed[0] == "opened"
    assert passed[-2:] == ["written", "synced"]
    if size:
        damaged = bytearray(content)
        damaged[size // 2] ^= 1
        (tmp_path / "x").write_bytes(damaged)
        assert "is damaged between bytes" in str(disk.first_damage(tmp_path / "x", size, sums))
        with pytest.raises(FileExistsError):
            disk.write(tmp_path / "x", size, lambda start, stop: content[start:stop], passed.append)


def test_a_write_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the thread that writes is not lost."""

    def full_disk(descriptor: int, data: memoryview, offset: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("plait.checkpoint.disk.os.pwrite", full_disk)
    content = memoryview(bytes(3 * BLOCK))
    with pytest.raises(OSError, match="No space left"):
        disk.write(tmp_path / "x", len(content), lambda start, stop: content[start:stop], lambda _: None)
