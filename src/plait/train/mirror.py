"""In-memory replicas: a run's state beside its ranks every few steps, so that losing some costs at most so many steps.

As in Gemini (Wang et al., SOSP 2023), the state goes to memory far more often than to the disk, and what a host holds
goes to the memory of the next one, too: neither a rank nor a host takes the last copy with it. Replicas are
checkpoints, with the same commit and the same hashes, in the folders of `plait.train.replicas`, one a host; on several
hosts each file lies on two (`plait.checkpoint.spread`), and ranks that start again read what is whole over the hosts
that are there (`plait.checkpoint.union`). They load under any plan; the newest of them and of the disk's checkpoints is
what a run goes on from.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import final

from plait.checkpoint import steps, union
from plait.checkpoint.commit import Saved
from plait.checkpoint.saver import Saver
from plait.checkpoint.spread import Hosts, Spread
from plait.checkpoint.state import Snapshot
from plait.checkpoint.union import Whole
from plait.comm.parcels import Parcels
from plait.comm.world import World
from plait.train.exchange import Peers, together
from plait.train.replicas import host_name, launched_folder
from plait.train.run import Setup

SLOWEST = 10e6
"""Bytes a second that a rank's part of a replica moves at least, between hosts too: what is slower is given up."""


def begin(setup: Setup, world: World, memory: Path | None, need: int) -> Replicas:
    """The replicas of ``setup``'s run, in ``memory``, or where that is None in folders that the ranks make; collective.

    ``need``: bytes of a whole one. ConfigError, on all ranks, where one of them has no memory to write to.
    """
    run, folders = setup.config.run, [] if memory is None else [memory]
    assert run.dir is not None, "claim_folder names it"
    home = run.dir

    def claim() -> str:
        if memory is None:
            folders.append(launched_folder(home))
        steps.check_folder(folders[0])
        return host_name(folders[0])

    names = [str(name) for name in together(world, claim)]
    return Replicas(
        folders[0],
        world,
        names,
        every=run.replicas,
        asynchronous=setup.config.checkpoint.asynchronous,
        need=need,
        timeout=run.timeout,
        ours=memory is None,
    )


@final
class Replicas:
    """The replicas of one run, as one of its ranks sees them. Every method but `poll` is collective over all ranks.

    ``folder``: of this host. ``names``: by rank, what tells the hosts apart. ``every``: steps between two replicas.
    ``need``: bytes of a whole one. ``ours``: the ranks made the folder, and take it away. The ranks agree on replicas
    in a group of their own: a checkpoint may be under way on the disk at the same time. Between hosts no wait takes
    longer than ``timeout`` seconds and what a rank's bytes take at `SLOWEST`.
    """

    def __init__(
        self,
        folder: Path,
        world: World,
        names: Sequence[str],
        *,
        every: int,
        asynchronous: bool,
        need: int,
        timeout: float,
        ours: bool,
    ) -> None:
        self._folder, self._rank, self._every, self._ours = folder, world.rank, every, ours
        self.hosts = Hosts.named(names)
        self._spread: Spread | None = None
        if self.hosts.count > 1:
            parcels = Parcels(world, timeout + need / len(names) / SLOWEST)
            self._spread = Spread(hosts=self.hosts, link=parcels)
            self._group = Peers(world, parcels.everyone)
        else:
            self._group = Peers(world)
        self._late: list[Saved] = []
        self._saver = Saver(
            folder, rank=world.rank, group=self._group, keep=1, asynchronous=asynchronous, spread=self._spread
        )

    def save_if_due(self, step: int, snapshot: Callable[[int], Snapshot]) -> None:
        """Keep the state after ``step`` steps, where it is its turn."""
        if step % self._every == 0:
            self._saver.save(snapshot(step))

    def poll(self) -> list[Saved]:
        """How replicas went that have ended since the last call."""
        found, self._late = self._late, []
        return found + self._saver.poll()

    def newest(self) -> tuple[Whole | None, list[str]]:
        """The newest replica that is whole over the hosts, the same on all ranks; and what was passed over, and why."""
        self._late += self._saver.drain()
        return union.agree_whole(self._folder, self._rank, self.hosts, self._group)

    def place(self, replica: Whole) -> Path:
        """This host's folder of ``replica``, which has its manifest. WeightsError on all ranks where one has none."""
        return union.bring_manifest(replica, self._folder, self._rank, self._spread, self._group)

    def bring(self, replica: Whole, place: Path, files: Collection[str]) -> None:
        """Have ``files``, those that this rank reads, in ``place``. WeightsError on all ranks where one misses some."""
        union.bring(replica, place, files, self._rank, self._spread, self._group)

    def forget(self) -> None:
        """Drop all replicas, those that are under way too: they are of another run."""
        self._late += self._saver.drain()
        if self.hosts.leads(self._rank):
            for entry in steps.committed(self._folder):
                steps.remove(entry.path)
        self._group.barrier()

    def end(self, peers: Peers) -> None:
        """The run has ended and its state is on the disk: the ranks' own folder goes. The ranks wait for each other
        among ``peers``: their own group may have been given up."""
        self._late += self._saver.drain()
        peers.barrier()
        if self._ours and self.hosts.leads(self._rank):
            shutil.rmtree(self._folder, ignore_errors=True)
        peers.barrier()  # who goes on, under another cut, makes it anew
