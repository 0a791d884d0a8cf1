"""`Keeper`: saves a run's whole state as it goes, and brings the run back to what was saved, under any plan.

A checkpoint holds the tensors of `plait.parallel.state` and, as scalars, what `Keeper.save` lists. A run goes on from
one when it is the same run: same model, seed, data, global batch and frozen parameters. Everything else may change:
plan, number of ranks, precision, steps, optimizer settings, what is measured, ``[run]`` and ``[checkpoint]``. Under the
same plan it then does what it would have done, bit for bit; under another one the same up to the order of additions.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, final

import torch

from plait.checkpoint.commit import Saved
from plait.checkpoint.reader import Checkpoint, agree_latest
from plait.checkpoint.saver import Saver
from plait.checkpoint.state import Piece, Snapshot
from plait.checkpoint.steps import committed
from plait.comm.aside import aside
from plait.comm.world import World
from plait.core.config import Config, dump, load
from plait.core.errors import ConfigError, WeightsError
from plait.core.shard import full
from plait.models.config import parameter_count
from plait.parallel.apply import Parallel
from plait.parallel.state import begin_moments, own_state, set_own_state, settle, stretches
from plait.telemetry.record import read_metrics
from plait.train.data import Samples
from plait.train.events_log import EVENTS, EventLog
from plait.train.exchange import counted_elements, gather_json, pieces_of, read_stretches, together
from plait.train.replicas import Replicas
from plait.train.run import Setup, trained_shapes
from plait.train.same import check_same, expected, identity
from plait.train.step import Steps

FOLDER = "checkpoints"
"""Of a run folder, unless checkpoint.dir names another."""


@final
class Peers:
    """All ranks, as `plait.checkpoint` speaks with them: over a group of their own, from a thread of their own."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._group = aside(world)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value`` (plain JSON), in rank order, on every rank."""
        return gather_json(self._world, value, self._group)

    def barrier(self) -> None:
        """Return when every rank has come here."""
        self._group.barrier()


@final
class Keeper:
    """The checkpoints of one run. Every method but `warnings` is collective over all ranks.

    ConfigError where checkpoints cannot be written, and where a run that does not resume would mix its own with those
    that are there.
    """

    def __init__(
        self, setup: Setup, parallel: Parallel, samples: Samples, steps: Steps, memory: Path | None = None
    ) -> None:
        self._setup, self._parallel, self._steps, self._world = setup, parallel, steps, parallel.world
        section, run = setup.config.checkpoint, setup.config.run
        assert run.dir is not None, "claim_folder names it"
        self.folder = section.dir or run.dir / FOLDER
        self.log = EventLog(run.dir / EVENTS) if self._world.rank == 0 else None
        """Of the run; on rank 0 alone."""
        self._identity = identity(setup, samples)
        self._peers = Peers(self._world)
        self._saved: int | None = None
        self._warnings: list[str] = []
        self._replicas: Replicas | None = None

        def make() -> None:
            if not run.resume and committed(self.folder):
                raise ConfigError(
                    f"{self.folder} already holds checkpoints: set run.resume=true to go on from them, or another "
                    "run.dir or checkpoint.dir"
                )
            self._saver = Saver(
                self.folder,
                rank=self._world.rank,
                group=self._peers,
                keep=section.keep,
                keep_every=section.keep_every,
                asynchronous=section.asynchronous,
                # fp32 masters, and two moments of what is trained.
                need=4 * parameter_count(setup.model)
                + 8 * sum(math.prod(shape) for shape in trained_shapes(setup).values()),
            )

            if memory is not None and run.replicas:
                self._replicas = Replicas(
                    memory,
                    rank=self._world.rank,
                    group=Peers(self._world),
                    every=run.replicas,
                    asynchronous=section.asynchronous,
                )

        together(self._world, make)

    # --- saving

    def save(self, step: int) -> None:
        """Save the state after ``step`` steps, unless that is what was saved or loaded last."""
        if step != self._saved:
            self._saver.save(self.snapshot(step))
            self._saved = step
        self._hear(self._saver.poll())

    def snapshot(self, step: int) -> Snapshot:
        """The state after ``step`` steps; its tensors are the live ones."""
        world, plan = self._world, self._setup.plan
        pieces = pieces_of(stretches(self._parallel, self._steps.optimizer), world.at)
        for name, value in own_state(self._parallel).items():
            shape = tuple(value.shape)
            pieces.append(Piece(name=f"{_own(world.rank)}{name}", shape=shape, values=value, boxes=(full(shape),)))
        scalars = {
            "step": step,
            "sample": (step + self._steps.shift) * self._setup.config.train.global_batch,
            "plan": str(plan),
            "ranks": world.mesh.world_size,
            "run": self._identity,
            "model": self._setup.model.to_mapping(),
            "config": dump(self._setup.config),
            **self._steps.scalars(),
        }
        return Snapshot(step=step, pieces=pieces, scalars=scalars)

    def save_if_due(self, step: int) -> None:
        """`save` every ``checkpoint.every`` steps, in memory every ``run.replicas``."""
        every = self._setup.config.checkpoint.every
        if every and step % every == 0:
            self.save(step)
        else:
            self._hear(self._saver.poll())
            if self._replicas is not None:
                self._replicas.save_if_due(step, self.snapshot)
                self._tell("replica", self._replicas.poll())

    def finish(self, step: int) -> bool:
        """Save, and wait; whether the state after ``step`` steps is on the disk."""
        # What is under way ends first: ranks hear of a failure at unlike times, and have to try again together.
        self._hear(self._saver.drain())
        self.save(step)
        self._hear(self._saver.drain())
        self._peers.barrier()  # the one that commits ends last: the next wait for it is a step's
        return self._saved == step

    def warnings(self) -> list[str]:
        """What went wrong with saves since the last call, in words: the run goes on, and the next save is tried."""
        found, self._warnings = self._warnings, []
        return found

    def _hear(self, saves: list[Saved]) -> None:
        if any(saved.error is not None and saved.step == self._saved for saved in saves):
            self._saved = None
        self._tell("checkpoint", saves)

    def _tell(self, what: str, saves: list[Saved]) -> None:
        for saved in saves:
            trouble = saved.error or saved.warning
            if trouble is not None:
                self._warnings.append(f"{what} of step {saved.step}: {trouble}")
                self.note(what, {"step": saved.step, "error": trouble})

    def note(self, kind: str, fields: Mapping[str, object]) -> None:
        """Write to ``events.jsonl``, once for all ranks."""
        if self.log is not None:
            self.log.write(kind, fields)

    # --- going on

    def resume(self) -> int:
        """Bring the run to its newest whole checkpoint, where run.resume is set; returns the steps that it has done.

        0, and nothing has changed, where there is none. ConfigError for another run's checkpoint, WeightsError where
        there are checkpoints and none is whole, or one does not hold exactly the state of this model.
        """
        if not self._setup.config.run.resume:
            return 0
        path = self._newest()
        if path is None:
            self._forget(0)
            return 0
        step = self._load(path)
        self.note("resume", {"step": step, "checkpoint": path.name, "plan": str(self._setup.plan)})
        return step

    def back(self) -> int | None:
        """Bring a run that went wrong back to its newest whole checkpoint; the steps done there, None without one."""
        self._hear(self._saver.drain())
        path = self._newest()
        return None if path is None else self._load(path)

    def _newest(self) -> Path | None:
        verify = self._setup.config.checkpoint.verify
        path, passed = agree_latest(self.folder, rank=self._world.rank, group=self._peers, verify=verify)
        for trouble in passed:
            self._warnings.append(trouble)
            self.note("damaged", {"error": trouble})
        replica = self._replicas.newest() if self._replicas is not None else None
        if replica is not None and (path is None or Checkpoint.open(path).scalars["step"] < replica.step):
            return replica.path
        if path is None and passed:
            raise WeightsError(f"{self.folder} holds no checkpoint that is whole: {passed[0]}")
        return path

    def _load(self, path: Path) -> int:
        world, parallel, steps = self._world, self._parallel, self._steps
        opened: list[Checkpoint] = []
        shapes: dict[str, tuple[int, ...]] = {}
        own: dict[str, torch.Tensor] = {}
        counts: dict[str, int] = {}

        def look() -> None:
            opened.append(Checkpoint.open(path))
            check_same(path, opened[0].scalars, self._identity)
            shapes.update(expected(self._setup, opened[0]))

        def read() -> None:
            mine = [row for row in stretches(parallel, steps.optimizer) if row.name in shapes]
            read_stretches(opened[0], mine)
            counts.update(counted_elements(mine, world))
            if same_plan:
                prefix = _own(world.rank)
                names = [name for name in opened[0].names if name.startswith(prefix)]
                own.update({name.removeprefix(prefix): opened[0].read(name).to(world.device) for name in names})

        together(world, look)
        scalars = opened[0].scalars
        done = int(scalars["step"])
        same_plan = scalars["plan"] == str(self._setup.plan) and scalars["ranks"] == world.mesh.world_size
        steps.resume(scalars, same_plan=same_plan)
        begin_moments(parallel, steps.optimizer, steps.updates)
        together(world, read)
        self._all_there(shapes, counts)
        settle(parallel, step=done, previous=any(name.startswith("previous/") for name in shapes))
        set_own_state(parallel, own)
        if not same_plan and any(name.startswith("own/") for name in opened[0].names):
            self._warnings.append(
                f"{path.name} was saved by plan {scalars['plan']!r} on {scalars['ranks']} ranks: what its compression "
                "had kept back of the gradients is left out"
            )
        self._saved = done if path.parent == self.folder else None  # a replica is not on the disk
        self._forget(done)
        return done

    def _forget(self, step: int) -> None:
        """Steps from ``step`` on are taken again: ``metrics.jsonl`` is to have each once."""
        if self.log is not None:
            cut_metrics(self.log.path.with_name("metrics.jsonl"), step)

    def _all_there(self, shapes: Mapping[str, tuple[int, ...]], counts: Mapping[str, int]) -> None:
        """WeightsError where the ranks together have not set every element of every tensor; collective."""
        mine = [float(counts.get(name, 0)) for name in shapes]
        total = torch.tensor(mine, dtype=torch.float64, device=self._world.device)
        found = self._world.group("pp", "dp", "cp", "tp").all_reduce(total).wait().tolist()
        for (name, shape), count in zip(shapes.items(), found, strict=True):
            if int(count) != math.prod(shape):
                raise WeightsError(f"{name}: {int(count)} of its {math.prod(shape)} elements were restored")


def _own(rank: int) -> str:
    return f"own/rank-{rank}/"


def config_of(folder: Path, overrides: tuple[str, ...] = ()) -> Config:
    """The run in ``folder``, to go on with: its own run file, with ``overrides`` as ``section.key=value`` over it."""
    config = load(folder / "config.toml", overrides)
    home = Path(os.path.abspath(folder))
    return dataclasses.replace(config, run=dataclasses.replace(config.run, dir=home, resume=True))


def cut_metrics(path: Path, step: int) -> None:
    """Drop the rows of ``step`` and later from ``metrics.jsonl``: those steps are taken again."""
    if not path.exists():
        return
    rows = read_metrics(path)
    keep = next((place for place, row in enumerate(rows) if cast(int, row["step"]) >= step), len(rows))
    content = path.read_bytes().split(b"\n")
    os.truncate(path, sum(len(line) + 1 for line in content[:keep]))
