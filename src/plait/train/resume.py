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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast, final

from plait.checkpoint.commit import Saved
from plait.checkpoint.reader import Checkpoint, agree_latest
from plait.checkpoint.saver import Saver
from plait.checkpoint.state import Piece, Snapshot
from plait.checkpoint.steps import committed
from plait.checkpoint.union import Whole
from plait.core.config import Config, dump, load
from plait.core.errors import ConfigError, WeightsError
from plait.core.shard import full
from plait.models.config import parameter_count
from plait.parallel.apply import Parallel
from plait.parallel.state import own_state, stretches
from plait.telemetry.record import read_metrics
from plait.train.data import Samples
from plait.train.events_log import EVENTS, EventLog
from plait.train.exchange import Peers, gather_json, pieces_of, together
from plait.train.folder import CHECKPOINTS
from plait.train.launch import placed
from plait.train.mirror import Replicas, begin
from plait.train.patience import PatientSaver
from plait.train.restore import own_prefix, restore
from plait.train.run import Setup, trained_shapes
from plait.train.same import identity
from plait.train.step import Steps

TRIES = 2
"""How often the state at the end of a run is saved where that fails."""


@final
class Keeper:
    """The checkpoints of one run. Every method but `warnings` is collective over all ranks.

    ``memory``: this host's folder of memory files for replicas, which the launcher of the ranks has made; None: there
    is none, or ranks that another launcher started make their own. A run resumes where any of its ranks was told so:
    of those that torchrun starts again, the ones of a host that is new do not know that it is again.

    ConfigError where checkpoints cannot be written, and where a run that does not resume would mix its own with those
    that are there.
    """

    def __init__(
        self, setup: Setup, parallel: Parallel, samples: Samples, steps: Steps, memory: Path | None = None
    ) -> None:
        self._setup, self._parallel, self._steps, self._world = setup, parallel, steps, parallel.world
        section, run = setup.config.checkpoint, setup.config.run
        assert run.dir is not None, "claim_folder names it"
        self.folder = section.dir or run.dir / CHECKPOINTS
        self.log = EventLog(run.dir / EVENTS) if self._world.rank == 0 else None
        """Of the run; on rank 0 alone."""
        self._identity = identity(setup, samples)
        self._peers = Peers(self._world)
        self._saved: int | None = None
        self._warnings: list[str] = []
        self._replicas: Replicas | None = None
        # What rank 0 writes before a run's first step.
        told = cast(
            "list[tuple[bool, bool]]", gather_json(self._world, [run.resume, (run.dir / "config.toml").exists()])
        )
        self._resumes = any(resumes for resumes, _ in told)
        # fp32 masters, and two moments of what is trained.
        need = 4 * parameter_count(setup.model)
        need += 8 * sum(math.prod(shape) for shape in trained_shapes(setup).values())

        def make() -> str | None:
            if not self._resumes and committed(self.folder):
                raise ConfigError(
                    f"{self.folder} already holds checkpoints: set run.resume=true to go on from them, or another "
                    "run.dir or checkpoint.dir"
                )
            saver = Saver(
                self.folder,
                rank=self._world.rank,
                group=self._peers,
                keep=section.keep,
                keep_every=section.keep_every,
                asynchronous=section.asynchronous,
                need=need,
                going_on=self._resumes,
            )
            self._saver = PatientSaver(saver, self._world, patience=section.timeout, asynchronous=section.asynchronous)
            return saver.lacking

        lacking = next((str(text) for text in together(self._world, make) if text is not None), None)
        if lacking is not None:
            self._warnings.append(f"{lacking}; the run goes on, and each save is tried")
            self.note("checkpoint", {"error": lacking})
        if run.replicas and (memory is not None or placed() is not None):
            self._replicas = begin(setup, self._world, memory, need)
            if not (self._resumes and told[0][1]):  # or the folder was removed since, and they are of what was in it
                self._replicas.forget()

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
            name = f"{own_prefix(world.rank)}{name}"
            pieces.append(Piece(name=name, shape=shape, values=value, boxes=(full(shape),)))
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
        if self._replicas is not None:  # a checkpoint under way may come to nothing
            self._replicas.save_if_due(step, self.snapshot)
            self._tell("replica", self._replicas.poll())

    def finish(self, step: int) -> bool:
        """Save, and wait; whether the state after ``step`` steps is on the disk."""
        # What is under way ends first: ranks hear of a failure at unlike times, and have to try again together.
        self._hear(self._saver.drain())
        for _ in range(TRIES):
            self.save(step)
            self._hear(self._saver.drain())
            if self.stands:  # with the ranks' agreement under way, which a barrier would get between
                return False
            if self._saved == step:
                break
        self._peers.barrier()  # the one that commits ends last: the next wait for it is a step's
        if self._replicas is not None and self._saved == step:
            self._replicas.end(self._peers)
            self._tell("replica", self._replicas.poll())
        return self._saved == step

    @property
    def stands(self) -> str | None:
        """Why the save under way counts as one that stands still, on all ranks; None where none does."""
        return self._saver.stands

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
        if not self._resumes:
            return 0
        found = self._newest()
        if found is None:
            self._forget(0)
            return 0
        step, path = self._go_to(found)
        source = "disk" if path.parent == self.folder else "memory"
        fields = {"step": step, "checkpoint": path.name, "source": source, "plan": str(self._setup.plan)}
        self.note("resume", fields)
        return step

    def back(self) -> int | None:
        """Bring a run that went wrong back to its newest whole checkpoint; the steps done there, None without one."""
        self._hear(self._saver.drain())
        if self.stands:
            return None
        found = self._newest()
        return None if found is None else self._go_to(found)[0]

    def _newest(self) -> Path | Whole | None:
        """The newest of what is in memory and on the disk, of which nothing is read where memory is no older."""
        replica: Whole | None = None
        if self._replicas is not None:
            replica, odd = self._replicas.newest()
            self._tell("replica", self._replicas.poll())
            self._pass_over(odd)
        there = self._peers.gather(max((entry.step for entry in committed(self.folder)), default=-1))
        if replica is not None and replica.step >= max(there):
            return replica
        path, passed = self._on_disk()
        if replica is not None and (path is None or Checkpoint.open(path).scalars["step"] <= replica.step):
            return replica
        if path is None and passed:
            raise WeightsError(f"{self.folder} holds no checkpoint that is whole: {passed[0]}")
        return path

    def _on_disk(self) -> tuple[Path | None, list[str]]:
        verify = self._setup.config.checkpoint.verify
        path, passed = agree_latest(self.folder, rank=self._world.rank, group=self._peers, verify=verify)
        self._pass_over(passed)
        return path, passed

    def _pass_over(self, troubles: Sequence[str]) -> None:
        for trouble in troubles:
            self._warnings.append(trouble)
            self.note("damaged", {"error": trouble})

    def _go_to(self, found: Path | Whole) -> tuple[int, Path]:
        """Load what was found, or what is on the disk where a replica cannot be had; the steps done, and the folder."""
        if isinstance(found, Path):
            return self._load(found), found
        assert self._replicas is not None
        try:
            place = self._replicas.place(found)
            return self._load(place, found), place
        except WeightsError as error:  # on all ranks alike
            self._pass_over([f"the replica of step {found.step} cannot be had: {error}"])
            path, _ = self._on_disk()
            if path is None:
                raise
            return self._load(path), path

    def _load(self, path: Path, replica: Whole | None = None) -> int:
        bring: Callable[[set[str]], None] | None = None
        if replica is not None and self._replicas is not None:
            bring = partial(self._replicas.bring, replica, path)
        done, warning = restore(path, self._setup, self._parallel, self._steps, self._identity, bring)
        if warning is not None:
            self._warnings.append(warning)
        self._saved = done if path.parent == self.folder else None  # a replica is not on the disk
        self._forget(done)
        return done

    def _forget(self, step: int) -> None:
        """Steps from ``step`` on are taken again: ``metrics.jsonl`` is to have each once."""
        if self.log is not None:
            cut_metrics(self.log.path.with_name("metrics.jsonl"), step)


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
