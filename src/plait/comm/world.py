"""`World`: binds a `Mesh` to processes: start-up, groups along any axes, messages, shutdown."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from plait.comm import ring
from plait.comm.flight import Flight
from plait.comm.group import Alone, Book, Group
from plait.comm.meet import meet
from plait.comm.ring import Ring
from plait.comm.shared_memory import SharedMemoryGroup
from plait.comm.torch_group import FakeWire, TorchGroup, TorchWire
from plait.comm.wire import SharedMemoryWire
from plait.core.errors import ConfigError, PlanError, RankError
from plait.core.mesh import AXES, EXPERT_AXES, Mesh

SHARED_MEMORY_RANKS = 8
"""Larger groups use gloo: reading every member's data costs a rank n-1 reads, where a ring algorithm costs two."""


@final
class World:
    """The processes of a run, seen from one of them. Nothing in it is global: pass it.

    ``transport`` is how CPU ranks of one host talk: ``auto`` (shared memory where it can, else gloo) or ``gloo``; or
    ``fake``: not at all (see `fake`).
    """

    def __init__(
        self,
        mesh: Mesh,
        *,
        rank: int,
        device: torch.device,
        store: Store | None,
        timeout: float,
        transport: str,
        flight: Flight | None = None,
    ) -> None:
        self.mesh = mesh
        self.rank = rank
        self.device = device
        self.book = Book(rank=rank, timeout=timeout, flight=flight or Flight(rank))
        self.at = mesh.coordinate(rank)
        """Index of this rank along every axis, of both folds."""
        self._store = store
        self._groups: dict[tuple[str, ...], Group] = {}
        self._named = 0
        self._descriptors: list[int] = []
        self._fake = transport == "fake"
        self._shared = self._share_memory(transport)
        self._wire: SharedMemoryWire | TorchWire | FakeWire
        if self._fake:
            self._wire = FakeWire()
        elif self._shared:
            self._wire = SharedMemoryWire(self.book, self._connect)
        else:
            self._wire = self._torch_wire()

    @classmethod
    def alone(cls, device: torch.device | str = "cpu") -> World:
        """One process, no peers."""
        return cls(Mesh(), rank=0, device=torch.device(device), store=None, timeout=60.0, transport="auto")

    @classmethod
    def fake(cls, mesh: Mesh, *, rank: int, device: torch.device | str = "cpu") -> World:
        """One rank of a world whose others are not there: collectives book their bytes and leave any values behind.

        Of use with fake tensors. There may be one at a time in a process; `close` it.
        """
        dist.init_process_group("fake", rank=rank, world_size=mesh.world_size)
        return cls(mesh, rank=rank, device=torch.device(device), store=None, timeout=60.0, transport="fake")

    @classmethod
    def connect(
        cls,
        mesh: Mesh,
        *,
        device: torch.device,
        timeout: float = 60.0,
        transport: str = "auto",
        store: Store | None = None,
        rank: int | None = None,
        flight: Flight | None = None,
    ) -> World:
        """Join the other ranks: through the launcher's variables (RANK, WORLD_SIZE, MASTER_ADDR ...) or a given
        ``store``. ``flight`` keeps the last operations; None: in this process's memory.

        Raises `PlanError` when the launcher started another number of ranks than ``mesh`` has.
        """
        patience = timedelta(seconds=timeout)
        if store is None:
            if mesh.world_size == 1 and "RANK" not in os.environ:
                return cls.alone(device)
            store, rank, size = next(iter(rendezvous("env://", timeout=patience)))
            if size != mesh.world_size:
                raise PlanError(
                    f"the launcher started {size} ranks, the plan's mesh {mesh.sizes} needs {mesh.world_size}"
                )
            if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun, which may have started ranks before these
                store = meet(store, rank, size, timeout)
        assert rank is not None
        store.set_timeout(patience)
        if mesh.world_size > 1:
            _same_device(store, rank, mesh.world_size, device)
            try:
                dist.init_process_group(
                    "nccl" if device.type == "cuda" else "gloo",
                    store=PrefixStore("plait", store),
                    rank=rank,
                    world_size=mesh.world_size,
                    timeout=patience,
                )
            except RuntimeError as error:
                raise RankError(f"rank {rank} waits for the others to start, for {timeout:g} s: {error}") from error
        return cls(mesh, rank=rank, device=device, store=store, timeout=timeout, transport=transport, flight=flight)

    def group(self, *axes: str) -> Group:
        """The ranks that differ from this one along ``axes``, of one fold, alone. The first call for an axis set is
        collective."""
        wanted = tuple(axis for axis in (*AXES, *EXPERT_AXES[1:]) if axis in axes)
        if wanted not in self._groups:
            self._groups[wanted] = self.partition("+".join(wanted), self.mesh.groups(wanted))
        return self._groups[wanted]

    def shared(self, name: str, groups: Sequence[tuple[int, ...]]) -> Group:
        """`partition`, made once for a ``name``."""
        if (name,) not in self._groups:
            self._groups[name,] = self.partition(name, groups)
        return self._groups[name,]

    def partition(self, name: str, groups: Sequence[tuple[int, ...]]) -> Group:
        """Make the groups of an arbitrary partition of some ranks (collective over all ranks); returns this rank's own,
        or a group of one when it is in none."""
        self._named += 1
        mine = next((ranks for ranks in groups if self.rank in ranks), (self.rank,))
        shared = self._shared and max(len(ranks) for ranks in groups) <= SHARED_MEMORY_RANKS
        made: dist.ProcessGroup | None = None
        if not shared:
            # Nobody else is there to take part in making the groups of others.
            for ranks in groups if not self._fake else (mine,):
                if len(ranks) > 1:
                    group = dist.new_group(list(ranks), timeout=timedelta(seconds=self.book.timeout))
                    made = group if self.rank in ranks else made
        if len(mine) == 1:
            return Alone(name, self.book, self.device)
        if shared:
            return SharedMemoryGroup(name, mine, self.book, self._rings(f"{self._named}/{mine[0]}", mine))
        assert made is not None
        return TorchGroup(name, mine, self.book, made, self.device)

    def _torch_wire(self) -> TorchWire:
        """Messages through torch.distributed; on GPUs connected to the neighbours on the pipeline's ring."""
        if self.mesh.pp == 1:
            return TorchWire(self.book, self.device, None, None)
        patience = timedelta(seconds=self.book.timeout)
        up, down = dist.new_group(timeout=patience), dist.new_group(timeout=patience)
        wire = TorchWire(self.book, self.device, up, down)
        if self.device.type == "cuda":
            line = self.mesh.group(self.rank, ["pp"])
            here = line.index(self.rank)
            others = {line[here - 1], line[(here + 1) % len(line)]} - {self.rank}
            # NCCL connects two ranks at their first message, and waits for the other side: in an order that all share.
            for source, to in sorted({pair for other in others for pair in ((self.rank, other), (other, self.rank))}):
                word = torch.zeros(1, device=self.device)
                if source == self.rank:
                    wire.send(word, to)
                else:
                    wire.recv(word, source).wait()
            wire.flush()
        return wire

    @property
    def wire(self) -> SharedMemoryWire | TorchWire | FakeWire:
        """Messages between any two ranks."""
        return self._wire

    def close(self) -> None:
        """Leave the others. Groups and messages end here."""
        self._groups.clear()
        for descriptor in self._descriptors:
            with suppress(OSError):
                os.close(descriptor)
        self._descriptors.clear()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _share_memory(self, transport: str) -> bool:
        """Whether all ranks are CPU processes of one host (agreed: every rank sees every other's identity)."""
        if self.mesh.world_size == 1 or self._store is None:
            return False
        usable = self.device.type == "cpu" and transport == "auto" and ring.available()
        self._store.set(f"host/{self.rank}", ring.host_identity() if usable else f"apart {self.rank}")
        self._store.set(f"pid/{self.rank}", str(os.getpid()))
        names = {self._get(f"host/{rank}", rank) for rank in range(self.mesh.world_size)}
        if len(names) > 1:
            return False
        self.book.pids.update({rank: int(self._get(f"pid/{rank}", rank)) for rank in range(self.mesh.world_size)})
        return True

    def _get(self, key: str, rank: int) -> str:
        assert self._store is not None
        try:
            return str(self._store.get(key).decode())
        except RuntimeError as error:
            raise RankError(f"rank {self.rank} waits for rank {rank} to start, for {self.book.timeout:g} s") from error

    def _rings(self, key: str, ranks: tuple[int, ...]) -> list[Ring]:
        """The shared rings of ``ranks``; the first of them to arrive makes the file, the others open it."""
        assert self._store is not None
        if self._store.add(f"claim/{key}", 1) == 1:
            descriptor = ring.create_file(len(ranks))
            self._store.set(f"file/{key}", f"/proc/{os.getpid()}/fd/{descriptor}")
        else:
            descriptor = os.open(self._get(f"file/{key}", ranks[0]), os.O_RDWR)
        self._descriptors.append(descriptor)
        rings = ring.map_rings(len(ranks), descriptor)
        # No member may leave, and take the file's name with it, before all have opened it.
        if len(ranks) > 1:
            if self._store.add(f"opened/{key}", 1) == len(ranks):
                self._store.set(f"ready/{key}", "")
            self._get(f"ready/{key}", ranks[0])
        return rings

    def _connect(self, source: int, to: int) -> Ring:
        return self._rings(f"wire/{source}/{to}", (source,))[0]


def _same_device(store: Store, rank: int, world_size: int, device: torch.device) -> None:
    """ConfigError when some ranks found a GPU and others did not: they would wait for each other in vain."""
    store.set(f"device/{rank}", device.type)
    try:
        found = [store.get(f"device/{other}").decode() for other in range(world_size)]
    except RuntimeError as error:
        raise RankError(f"rank {rank} waits for the others to start: {error}") from error
    if len(set(found)) > 1:
        kinds = {kind: [other for other in range(world_size) if found[other] == kind] for kind in sorted(set(found))}
        raise ConfigError(f"the ranks found different devices: {kinds}; use run.device=cpu, or a GPU for each rank")
