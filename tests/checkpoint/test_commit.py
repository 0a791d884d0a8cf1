"""A rank is killed at every boundary of a save; what was committed before, or the save itself, is there in full."""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from plait.checkpoint import steps
from plait.checkpoint.phases import COMMITTER, EVERYWHERE
from plait.checkpoint.reader import latest
from plait.checkpoint.saver import PHASES, Saver
from plait.core.errors import ConfigError
from tests.checkpoint.ranks import RANKS, Alone, Nursery, OneThread, assert_state, save, snapshot, together

AROUND = tuple(phase for phase in PHASES if phase.startswith("save."))
ON_ALL = (*AROUND, *EVERYWHERE)
AFTER = COMMITTER[COMMITTER.index("commit.renamed") :]
POINTS = [*itertools.product(range(RANKS), ON_ALL), *((0, phase) for phase in COMMITTER)]


def _steps_left(rank: int, phase: str) -> set[int]:
    """Which step may be the last one after ``rank`` died at ``phase``.

    Step 2 is there from the rename on, which rank 0 does when all have said that their files are written.
    """
    if phase == "save.left":  # the thread is on its way then, wherever it has come to
        return {1, 2}
    if phase == "save.end" or phase in EVERYWHERE[EVERYWHERE.index("end.agreed") :]:
        return {2}
    if rank:
        return {2} if phase in ("write.agreed", "end.enter", "end.agree") else {1}
    return {2} if phase in (*AFTER, "end.agree") else {1}


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with step 1."""
    folder = tmp_path_factory.mktemp("before") / "checkpoints"
    save(folder, RANKS, 1)
    assert_state(folder / "step-00000001", 1)
    return folder


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    found = Nursery()
    yield found
    found.close()


@pytest.mark.parametrize(("rank", "phase"), POINTS)
def test_killed_at_every_boundary(before: Path, tmp_path: Path, nursery: Nursery, rank: int, phase: str) -> None:
    folder, words = tmp_path / "checkpoints", tmp_path / "words"
    shutil.copytree(before, folder)
    words.mkdir()
    codes = nursery.kill(folder, words, rank, phase)
    assert codes == [-signal.SIGKILL if one == rank else 0 for one in range(RANKS)]

    found = latest(folder)
    assert found is not None
    step = int(found.name.removeprefix("step-"))
    assert step in _steps_left(rank, phase)
    assert_state(found, step)
    # The run starts again, on another number of ranks, and saves: nothing is left of what was under way.
    save(folder, 1, 3, keep=1)
    assert sorted(os.listdir(folder)) == ["latest.json", "step-00000003"]
    assert_state(folder / "step-00000003", 3)
    assert json.loads((folder / "latest.json").read_text())["folder"] == "step-00000003"


def test_there_are_enough_boundaries() -> None:
    assert len(PHASES) == len(set(PHASES)) >= 20
    assert set(PHASES) == {*AROUND, *EVERYWHERE, *COMMITTER}
    assert len(ON_ALL) >= 20


def test_the_boundaries_are_passed_in_their_order(tmp_path: Path) -> None:
    save(tmp_path, RANKS, 1)

    def one(rank: int, group: OneThread) -> list[str]:
        passed: list[str] = []
        saver = Saver(tmp_path, rank=rank, group=group, keep=1, asynchronous=False, probe=passed.append)
        saver.save(snapshot(rank, RANKS, 2))
        return passed

    passed = together(RANKS, one)
    for rank, phases in enumerate(passed):
        everywhere = [phase for phase in phases if phase in EVERYWHERE]
        assert everywhere == list(EVERYWHERE)
        assert [phase for phase in phases if phase in COMMITTER] == (list(COMMITTER) if rank == 0 else [])
        assert set(phases) == {*AROUND, *EVERYWHERE, *(() if rank else COMMITTER)}


def test_nothing_is_named_before_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill of the process does not show what a loss of power would; the order of syncs and renames does."""
    save(tmp_path, 2, 1)
    done: list[tuple[str, str]] = []
    sync, rename, replace, rmtree = os.fsync, Path.rename, os.replace, shutil.rmtree

    def name(path: Path | str) -> str:
        found = str(Path(path).relative_to(tmp_path)) if Path(path) != tmp_path else "."
        return re.sub(r"\.tmp-(old-)?[0-9a-f]+", r".tmp-\1ID", found)

    def logged_sync(descriptor: int) -> None:
        done.append(("sync", name(os.readlink(f"/proc/self/fd/{descriptor}"))))
        sync(descriptor)

    def logged_rename(path: Path, target: Path) -> Path:
        done.append(("rename", f"{name(path)} {name(target)}"))
        return rename(path, target)

    def logged_replace(path: Path, target: Path) -> None:
        done.append(("rename", f"{name(path)} {name(target)}"))
        replace(path, target)

    def logged_rmtree(path: Path, ignore_errors: bool = False) -> None:
        done.append(("remove", name(path)))
        rmtree(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(os, "fsync", logged_sync)
    monkeypatch.setattr(Path, "rename", logged_rename)
    monkeypatch.setattr(os, "replace", logged_replace)
    monkeypatch.setattr(shutil, "rmtree", logged_rmtree)
    save(tmp_path, 2, 2, keep=1)
    draft = "step-00000002.tmp-ID"
    assert sorted(done[:2]) == [("sync", f"{draft}/rank-0000{rank}.safetensors") for rank in (0, 1)]
    assert done[2:] == [
        ("sync", f"{draft}/manifest.json"),
        ("sync", draft),
        ("rename", f"{draft} step-00000002"),
        ("sync", "."),
        ("sync", "latest.json.tmp"),
        ("rename", "latest.json.tmp latest.json"),
        ("sync", "."),
        ("rename", "step-00000001 step-00000001.tmp-old-ID"),
        ("sync", "."),
        ("remove", "step-00000001.tmp-old-ID"),
    ]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize(
    ("rank", "phase"),
    [(2, "file.opened"), (0, "file.half"), (3, "file.written"), (1, "file.synced"), (0, "begin.folder")]
    + [(0, phase) for phase in ("manifest.opened", "manifest.synced", "commit.synced")],
)
def test_a_disk_that_fails_on_one_rank_fails_the_save_on_all(
    before: Path, tmp_path: Path, rank: int, phase: str, code: int
) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(before, folder)

    def one(me: int, group: OneThread) -> list[str | None]:
        broken = [me == rank]

        def probe(passed: str) -> None:
            if passed == phase and broken[0]:
                broken[0] = False
                raise OSError(code, os.strerror(code), "disk")

        saver = Saver(folder, rank=me, group=group, keep=1, probe=probe)
        outcomes = []
        for step in (2, 3):
            saver.save(snapshot(me, RANKS, step))
            (saved,) = saver.drain()
            outcomes.append(saved.error)
            if step == 2:
                assert saved.path is None
                group.barrier()
                assert sorted(os.listdir(folder)) == ["latest.json", "step-00000001"]
                group.barrier()
        return outcomes

    outcomes = together(RANKS, one)
    assert outcomes == [[f"rank {rank}: {os.strerror(code)}: disk", None]] * RANKS
    assert_state(folder / "step-00000003", 3)


def _limited(folder: Path, size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    saver = Saver(folder, rank=0, group=Alone(), keep=1)
    saver.save(snapshot(0, 1, 2))
    (saved,) = saver.drain()
    if saved.error is None or os.strerror(errno.EFBIG) not in saved.error:
        raise SystemExit(f"{saved}")


def test_a_file_size_limit(tmp_path: Path) -> None:
    """The kernel itself refuses bytes in the middle of the file."""
    save(tmp_path, 1, 1)
    child = multiprocessing.get_context("forkserver").Process(target=_limited, args=(tmp_path, 600_000))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert sorted(os.listdir(tmp_path)) == ["latest.json", "step-00000001"]
    assert_state(tmp_path / "step-00000001", 1)


def test_no_room_is_found_before_a_byte_is_written(
    before: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(before, folder)
    with monkeypatch.context() as patch:
        patch.setattr(steps, "free_bytes", lambda _: 1_000_000)
        failed = save(folder, RANKS, 2, keep=1)
    assert {saved.path for saved in failed} == {None}
    (error,) = {saved.error for saved in failed}
    assert error is not None
    assert re.search(r"takes [\d.]+ MB, .* has room for 1\.000 MB: [\d.]+ MB are missing", error)
    assert_state(folder / "step-00000001", 1)
    assert [saved.error for saved in save(folder, RANKS, 2, keep=1)] == [None] * RANKS


def test_a_folder_that_cannot_be_written_is_found_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(ConfigError, match="cannot be written"):
            Saver(folder, rank=0, group=Alone())
    with pytest.raises(ConfigError, match=r"takes 1,000,000,000\.000 GB.*make room"):
        Saver(tmp_path / "new", rank=0, group=Alone(), need=10**18)
    steps.check_folder(tmp_path / "new/deep", 1000)
    assert os.listdir(tmp_path / "new/deep") == []
    if os.geteuid() != 0:  # root writes everywhere
        (tmp_path / "new/deep").chmod(0o555)
        with pytest.raises(ConfigError, match="cannot be written"):
            Saver(tmp_path / "new/deep", rank=0, group=Alone())
        (tmp_path / "new/deep").chmod(0o755)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda step, rank: (step + (rank == 2), 0), "rank 2 saves other step than rank 0: 3, not 2"),
        (lambda step, rank: (step, int(rank == 1)), "rank 1 saves other scalars than rank 0"),
    ],
)
def test_ranks_that_are_not_at_one_instant(
    tmp_path: Path, change: Callable[[int, int], tuple[int, int]], word: str
) -> None:
    def one(rank: int, group: OneThread) -> str | None:
        saver = Saver(tmp_path, rank=rank, group=group)
        step, samples = change(2, rank)
        taken = snapshot(rank, RANKS, step)
        object.__setattr__(taken, "step", step)
        object.__setattr__(taken, "scalars", {"samples": samples})
        saver.save(taken)
        (saved,) = saver.drain()
        error: str | None = saved.error
        return error

    assert together(RANKS, one) == [word] * RANKS
    assert os.listdir(tmp_path) == []


def test_a_rank_whose_agreement_is_lost_says_so(tmp_path: Path) -> None:
    class Lost(Alone):
        def gather(self, value: object) -> list[object]:
            raise TimeoutError("no word from rank 1 for 30 s")

    saver = Saver(tmp_path, rank=0, group=Lost())
    saver.save(snapshot(0, 1, 1))
    (saved,) = saver.drain()
    assert saved.path is None
    assert saved.error == "the ranks could not agree: TimeoutError: no word from rank 1 for 30 s"
    assert latest(tmp_path) is None
