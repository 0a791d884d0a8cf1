"""Saves that are spread over the memory of several hosts: each file on two, and whole again from those left."""

from __future__ import annotations

import errno
import os
import queue
import shutil
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.checkpoint import relay, union
from plait.checkpoint.commit import Place, Saved, commit
from plait.checkpoint.manifest import MANIFEST
from plait.checkpoint.relay import Stream, batches
from plait.checkpoint.saver import Saver
from plait.checkpoint.spread import Hosts, Spread
from plait.checkpoint.steps import committed
from plait.checkpoint.union import Whole
from plait.checkpoint.writer import Host
from plait.core.errors import RankError, WeightsError
from tests.checkpoint.ranks import OneThread, assert_state, snapshot, together

PLACES = (0, 0, 1, 1, 2)
HOSTS = Hosts(of=PLACES)
RANKS = len(PLACES)


class Post:
    """The way for bytes between threads; ``bytes``: sent so far."""

    def __init__(self) -> None:
        self.boxes: dict[tuple[int, int], queue.Queue[bytes]] = {}
        self.bytes = 0
        self.over = threading.Event()
        """A rank has died: nobody waits for it."""

    def of(self, rank: int) -> Line:
        return Line(self, rank)

    def box(self, source: int, to: int) -> queue.Queue[bytes]:
        return self.boxes.setdefault((source, to), queue.Queue())


class Line:
    def __init__(self, post: Post, rank: int) -> None:
        self._post, self._rank = post, rank

    def send(self, data: memoryview, to: int) -> Callable[[], None]:
        self._post.bytes += len(data)
        self._post.box(self._rank, to).put(bytes(data))
        return lambda: None

    def receive(self, out: memoryview, source: int) -> Callable[[], None]:
        def wait() -> None:
            while not self._post.over.is_set():
                with suppress(queue.Empty):
                    out[:] = self._post.box(source, self._rank).get(timeout=0.02)
                    return
            raise RankError("a rank has died")

        return wait


def on_hosts(root: Path, work: Callable[[int, Path, Spread, OneThread], Any], post: Post | None = None) -> list[Any]:
    """``work(rank, folder of its host, spread, agreement)`` on every rank."""
    post = post or Post()
    for host in range(HOSTS.count):
        (root / str(host)).mkdir(parents=True, exist_ok=True)

    def one(rank: int, group: OneThread) -> Any:
        return work(rank, root / str(PLACES[rank]), Spread(hosts=HOSTS, link=post.of(rank)), group)

    return together(RANKS, one)


def save(root: Path, step: int, post: Post | None = None, *, asynchronous: bool = True) -> list[Saved]:
    def one(rank: int, folder: Path, spread: Spread, group: OneThread) -> Saved:
        saver = Saver(folder, rank=rank, group=group, keep=1, asynchronous=asynchronous, spread=spread)
        saver.save(snapshot(rank, RANKS, step))
        (saved,) = saver.drain()
        return saved

    found: list[Saved] = on_hosts(root, one, post)
    return found


def newest(root: Path) -> tuple[Whole | None, list[str]]:
    """What all ranks find."""
    found = on_hosts(root, lambda rank, folder, spread, group: union.agree_whole(folder, rank, spread.hosts, group))
    assert all(one == found[0] for one in found)
    whole: tuple[Whole | None, list[str]] = found[0]
    return whole


def fetch(root: Path, whole: Whole, rank_that_wants: int) -> Path:
    """Have all files on the host of one rank, all of whose ranks want them; its folder."""

    def one(rank: int, folder: Path, spread: Spread, group: OneThread) -> Path:
        place = union.bring_manifest(whole, folder, rank, spread, group)
        wanted = whole.holders if PLACES[rank] == PLACES[rank_that_wants] else ()
        union.bring(whole, place, wanted, rank, spread, group)
        return place

    found: Path = on_hosts(root, one)[rank_that_wants]
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three hosts with step 1, then 2."""
    root = tmp_path_factory.mktemp("hosts")
    for step in (1, 2):
        assert [one.error for one in save(root, step)] == [None] * RANKS
    return root


@pytest.mark.parametrize("lost", range(3))
def test_any_host_may_be_lost(saved: Path, tmp_path: Path, lost: int) -> None:
    """The one that takes its place gets what it needs, and what was before the last save is nowhere."""
    root = tmp_path / "hosts"
    shutil.copytree(saved, root)
    assert [entry.step for host in range(3) for entry in committed(root / str(host))] == [2, 2, 2]
    shutil.rmtree(root / str(lost))
    whole, passed = newest(root)
    assert whole is not None
    assert (whole.step, passed, whole.folders[lost]) == (2, [], "")
    place = fetch(root, whole, HOSTS.lead(lost))
    assert place.parent == root / str(lost)
    assert sorted(os.listdir(place)) == sorted([MANIFEST, *whole.holders])
    assert_state(place, 2)
    assert [one.error for one in save(root, 3, asynchronous=False)] == [None] * RANKS
    assert [entry.step for host in range(3) for entry in committed(root / str(host))] == [3, 3, 3]


def test_what_two_hosts_hold_anyway_is_not_sent(saved: Path, tmp_path: Path) -> None:
    """Each file is on two hosts; those that were sent are of tensors that one host alone holds."""
    post = Post()
    save(tmp_path, 2, post)
    whole, _ = newest(tmp_path)
    assert whole is not None
    assert all(len(hosts) == 2 for hosts in whole.holders.values())
    sizes = {
        file: next((tmp_path / str(host)).glob(f"step-*/{file}")).stat().st_size
        for file, (host, _) in whole.holders.items()
    }
    alone = {file for file in sizes if "-and-" not in file}
    assert post.bytes == sum(sizes[file] for file in alone)
    assert post.bytes < 50_000 < sum(sizes[file] for file in set(sizes) - alone)  # the 1.3 MB that all hold among them
    shares = sorted(
        sum(size for file, size in sizes.items() if file.startswith(f"rank-{rank:05d}")) for rank in range(RANKS)
    )
    assert shares[-1] < 1.2 * shares[0]


def test_two_hosts_lost_are_one_too_many(saved: Path, tmp_path: Path) -> None:
    root = tmp_path / "hosts"
    shutil.copytree(saved, root)
    for host in (0, 1):
        shutil.rmtree(root / str(host))
    whole, passed = newest(root)
    assert whole is None
    (why,) = passed
    assert "step-00000002 in memory is not whole: rank-0000" in why
    assert why.endswith("is on none of the 3 hosts")


def test_a_damaged_file_is_taken_from_the_other_host(saved: Path, tmp_path: Path) -> None:
    root = tmp_path / "hosts"
    shutil.copytree(saved, root)
    file = "rank-00000.safetensors"
    damage(root / "0/step-00000002" / file)
    whole, passed = newest(root)
    assert whole is not None
    assert whole.holders[file] == (1,)
    (why,) = passed
    assert why.startswith("host 0: ")
    assert f"{file} is damaged" in why
    assert why.endswith("another copy is taken")
    assert_state(fetch(root, whole, 0), 2)
    damage(root / "0/step-00000002" / file)
    damage(root / "1/step-00000002" / file)
    whole, passed = newest(root)
    assert whole is None
    assert [line.split(":")[0] for line in passed] == ["host 0", "host 1", "step-00000002 in memory is not whole"]


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_two_saves_are_never_mixed(saved: Path, tmp_path: Path) -> None:
    """Host 0 has one save of step 2, host 1 another: together they have every file, and neither save is whole."""
    root, other = tmp_path / "hosts", tmp_path / "other"
    shutil.copytree(saved, root)
    save(other, 2)
    shutil.rmtree(root / "0")
    shutil.copytree(other / "0", root / "0")
    shutil.rmtree(root / "2")
    whole, passed = newest(root)
    assert whole is None
    assert len(passed) == 2
    # A commit that was cut off between the hosts' renames: the step before is there, and is taken.
    save(other, 3)
    shutil.copytree(other / "1/step-00000003", saved.parent / "spare/step-00000003")
    again = tmp_path / "again"
    shutil.copytree(saved, again)
    shutil.copytree(saved.parent / "spare/step-00000003", again / "1/step-00000003")
    whole, passed = newest(again)
    assert whole is not None
    assert whole.step == 2
    assert ["step-00000003 in memory is not whole" in line for line in passed] == [True]


class Killed(BaseException):
    """What ends a rank where it stands."""


BEFORE = ("begin.folder", "file.half", "write.done", "write.agree")
MEANWHILE = ("manifest.written", "commit.checked", "commit.renamed", "end.agree")
"""Other hosts may have given their folders their names then, or not."""
AFTER = ("latest.written", "prune.renamed", "prune.removed", "prune.end")


@pytest.mark.parametrize("phase", [*BEFORE, *MEANWHILE, *AFTER])
def test_a_rank_killed_in_a_save_leaves_one_that_is_whole(saved: Path, tmp_path: Path, phase: str) -> None:
    """The first rank of a host, which names its folder: also where its host is lost with it, or another."""
    for killed in (0, 2) if phase != "begin.folder" else (0,):  # the draft is named by the first of all
        root = tmp_path / f"{killed}"
        shutil.copytree(saved, root)
        with pytest.raises(Killed):
            save_until(root, killed, phase)
        for lost in (None, 0, 1):
            left = tmp_path / f"{killed}-{lost}"
            shutil.copytree(root, left)
            if lost is not None:
                shutil.rmtree(left / str(lost))
            whole, _ = newest(left)
            assert whole is not None
            assert whole.step in ({2} if phase in BEFORE else {3} if phase in AFTER else {2, 3})
            assert_state(fetch(left, whole, 4), whole.step)


def save_until(root: Path, killed: int, phase: str) -> None:
    """Save step 3, and end the rank ``killed`` at ``phase``."""
    post = Post()

    def one(rank: int, folder: Path, spread: Spread, group: OneThread) -> None:
        def probe(passed: str) -> None:
            if (rank, passed) == (killed, phase):
                post.over.set()
                raise Killed

        place = Place(folder=folder, rank=rank, group=group, keep=1, keep_every=0, spread=spread, probe=probe)
        copied = Host().copy(snapshot(rank, RANKS, 3), rank, private=True, hosts=HOSTS)
        commit(3, copied, place, 0.0)

    on_hosts(root, one, post)


def test_no_room_on_one_host_fails_the_save_on_all(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a file that comes from another host: its sender is not kept waiting, and what was there before stays."""
    root = tmp_path / "hosts"
    shutil.copytree(saved, root)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refuse(descriptor: int, data: memoryview, at: int) -> int:
        raise full

    with monkeypatch.context() as only:
        only.setattr(relay, "os", Os(refuse))
        errors = {one.error for one in save(root, 3)}
    assert len(errors) == 1
    assert "No space left on device" in str(errors.pop())
    assert [sorted(os.listdir(root / str(host))) for host in range(3)] == [["latest.json", "step-00000002"]] * 3
    assert [one.error for one in save(root, 4)] == [None] * RANKS


class Os:
    """The module ``os`` with another ``pwrite``."""

    def __init__(self, pwrite: Callable[[int, memoryview, int], int]) -> None:
        self.pwrite = pwrite

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def test_a_sender_that_does_not_come_is_named(tmp_path: Path) -> None:
    class Silent:
        def send(self, data: memoryview, to: int) -> Callable[[], None]:
            return lambda: None

        def receive(self, out: memoryview, source: int) -> Callable[[], None]:
            def wait() -> None:
                raise RankError(f"waited for rank {source}")

            return wait

    def one(rank: int, folder: Path, spread: Spread, group: OneThread) -> Saved:
        saver = Saver(folder, rank=rank, group=group, spread=Spread(hosts=HOSTS, link=Silent()))
        saver.save(snapshot(rank, RANKS, 1))
        (saved,) = saver.drain()
        return saved

    errors = {saved.error for saved in on_hosts(tmp_path, one)}
    assert len(errors) == 1
    assert "waited for rank" in str(errors.pop())
    assert [os.listdir(tmp_path / str(host)) for host in range(3)] == [[], [], []]


def test_copies_that_differ_fail_the_save(tmp_path: Path) -> None:
    """Ranks that should hold the same bits and do not: better found in a replica than in a resumed run."""

    def one(rank: int, folder: Path, spread: Spread, group: OneThread) -> Saved:
        state = snapshot(rank, RANKS, 1)
        for piece in state.pieces:
            if piece.name == "weights/tall" and rank == 4:
                piece.values[::1000] += 1.0
        saver = Saver(folder, rank=rank, group=group, spread=spread)
        saver.save(state)
        (saved,) = saver.drain()
        return saved

    errors = {saved.error for saved in on_hosts(tmp_path, one)}
    assert len(errors) == 1
    assert "rank 4 holds other values than the rank that wrote rank-0000" in str(errors.pop())


def test_a_file_that_comes_damaged_is_refused_on_all_ranks(saved: Path, tmp_path: Path) -> None:
    root = tmp_path / "hosts"
    shutil.copytree(saved, root)
    whole, _ = newest(root)
    assert whole is not None
    damage(root / "0/step-00000002/rank-00000.safetensors")  # after it was looked at
    damage(root / "1/step-00000002/rank-00000.safetensors")

    def one(rank: int, folder: Path, spread: Spread, group: OneThread) -> str:
        place = union.bring_manifest(whole, folder, rank, spread, group)
        try:
            union.bring(whole, place, whole.holders if rank == 4 else (), rank, spread, group)
        except WeightsError as error:
            return str(error)
        return ""

    (why,) = set(on_hosts(root, one))
    assert why.startswith("rank 4: ")
    assert why.endswith("rank-00000.safetensors came damaged from another host")


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=20))
def test_no_rank_sends_or_receives_twice_in_a_batch(pairs: Sequence[tuple[int, int]]) -> None:
    streams = [Stream(file=str(at), bytes=1, source=a, target=b) for at, (a, b) in enumerate(pairs)]
    found = batches(streams)
    assert sorted(one.file for batch in found for one in batch) == sorted(one.file for one in streams)
    for batch in found:
        assert len({one.source for one in batch}) == len({one.target for one in batch}) == len(batch)


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=9), st.data())
def test_twins_and_peers_are_on_other_hosts(names: list[str], data: st.DataObject) -> None:
    hosts = Hosts.named(names)
    ranks = range(len(names))
    assert [names[hosts.lead(host)] for host in range(hosts.count)] == list(dict.fromkeys(names))
    for rank in ranks:
        peer = hosts.peer(rank)
        assert (peer is None) == (hosts.count == 1)
        assert peer is None or hosts.of[peer] == (hosts.of[rank] + 1) % hosts.count
        holders = sorted(data.draw(st.sets(st.sampled_from(ranks))) | {rank})
        twin = hosts.twin(rank, holders)
        assert (twin is None) == (len({names[one] for one in holders}) == 1)
        assert twin is None or (twin in holders and names[twin] != names[rank])
