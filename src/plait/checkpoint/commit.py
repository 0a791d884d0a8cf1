"""The commit protocol: how the files of several ranks become one checkpoint, or none.

1. *begin*: rank 0 removes what dead saves left and makes ``step-N.tmp-ID``; all agree on step, scalars, ID and room.
2. *write*: every rank writes its file there, syncs it, and sums it up meanwhile; all agree that all have.
3. *end*: rank 0 writes the manifest, syncs it and the folder, gives the folder its name in one rename and syncs that;
   all agree that it has. The rename is the instant: before it the save never was, after it the checkpoint is whole.
4. *tidy*: rank 0 points ``latest.json`` at it, syncs that, and only then takes away what is superseded.

Whatever fails on a rank before the rename fails the save on all of them with one message, and leaves what was
committed before as it is.

A save that is *spread* (`plait.checkpoint.spread`) lies in one folder a host, each with the same manifest and some of
its files: the first rank of each host does there what rank 0 does else, *write* ends with sending, and what was
committed before is taken away when all hosts have committed.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, final

from plait.checkpoint import disk, steps, writer
from plait.checkpoint.manifest import MANIFEST, encode
from plait.checkpoint.phases import Probe
from plait.checkpoint.relay import Arrival, Stream, ended, relay
from plait.checkpoint.spread import Spread, unlike
from plait.checkpoint.state import Agreement
from plait.core.errors import PlaitError, WeightsError


@dataclass(frozen=True, kw_only=True)
class Saved:
    """How a save went. ``path``: the checkpoint, None where it failed, and ``error`` says why.

    ``bytes``: what this rank wrote. Seconds: ``copy`` is what the run waited for, ``write`` until all was committed.
    ``warning``: what went wrong on rank 0 after the commit, which the checkpoint does not suffer from.
    """

    step: int
    path: Path | None
    error: str | None
    warning: str | None
    bytes: int
    copy: float
    write: float


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where checkpoints go, as one rank sees it, and how many stay: of those that are ``spread``, the last."""

    folder: Path
    rank: int
    group: Agreement
    keep: int
    keep_every: int
    probe: Probe
    spread: Spread | None = None

    @property
    def host(self) -> int:
        """The host of this rank, of those that have a folder each."""
        return self.spread.hosts.of[self.rank] if self.spread is not None else 0

    @property
    def lead(self) -> int:
        """The rank that makes, names and prunes what is in this rank's folder."""
        return self.spread.hosts.lead(self.host) if self.spread is not None else 0


def commit(step: int, copied: writer.Copied | Exception, place: Place, copy_seconds: float) -> Saved:
    """Save ``copied``, with all ranks, or tell them why it could not be copied.

    Never raises: what goes wrong is told in the `Saved`, an error on every rank.
    """
    start = time.perf_counter()
    path: Path | None = None
    error = warning = None
    seconds: float | None = None
    under_way = _Commit(step, copied, place)
    try:
        path = under_way.run()
        seconds = time.perf_counter() - start
        warning = under_way.tidy(path)
    except _FailedError as failed:
        error = str(failed)
    except Exception as lost:  # of the agreement itself: a rank is gone, and this one cannot know what became of it
        error = f"the ranks could not agree: {_words(lost)}"
    return Saved(
        step=step,
        path=path,
        error=error,
        warning=warning,
        bytes=0 if isinstance(copied, Exception) else copied.bytes,
        copy=copy_seconds,
        write=time.perf_counter() - start if seconds is None else seconds,
    )


class _FailedError(Exception):
    """The save failed, and every rank knows it."""


def _words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error) if isinstance(error, PlaitError) else f"{type(error).__name__}: {error}"


@final
class _Commit:
    """One save on one rank, in the steps of the protocol."""

    def __init__(self, step: int, copied: writer.Copied | Exception, place: Place) -> None:
        self._step, self._given, self._place = step, copied, place
        self._probe, self._leads = place.probe, place.rank == place.lead
        self._draft = place.folder
        self._created = ""
        self._streams: list[Stream] = []

    @property
    def _copied(self) -> writer.Copied:
        if isinstance(self._given, Exception):
            raise self._given
        return self._given

    def run(self) -> Path:
        """The committed folder; `_FailedError` where there is none."""
        self._begin()
        return self._end(self._write())

    def _agree(self, phase: str, work: Callable[[], Any]) -> list[Any]:
        """Do ``work``; what it gave on every rank, in rank order, or `_FailedError` on all where it failed on any."""
        said: dict[str, Any] = {"error": None, "value": None}
        self._probe(f"{phase}.enter")
        try:
            said["value"] = work()
        except Exception as error:  # of whatever kind: the others wait for this rank's word
            said["error"] = _words(error)
        self._probe(f"{phase}.agree")
        rows = self._place.group.gather(said)
        self._probe(f"{phase}.agreed")
        failed = [f"rank {rank}: {row['error']}" for rank, row in enumerate(rows) if row["error"] is not None]
        if failed:
            self._drop()
            more = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
            raise _FailedError(failed[0] + more)
        return [row["value"] for row in rows]

    def _drop(self) -> None:
        if self._leads and self._draft != self._place.folder:
            steps.remove(self._draft)

    def _begin(self) -> None:
        rows = self._agree("begin", self._prepare)
        self._draft = self._place.folder / str(rows[0]["draft"])
        self._created = str(rows[0]["created"])
        self._streams = [
            Stream(file=file, bytes=size, source=rank, target=to)
            for rank, row in enumerate(rows)
            for file, size, to in row["sends"]
        ]
        # Every rank sees the same rows, and so comes to the same judgement.
        trouble = None
        for key in ("step", "scalars"):
            odd = next((rank for rank, row in enumerate(rows) if row[key] != rows[0][key]), None)
            if odd is not None and trouble is None:
                trouble = f"rank {odd} saves other {key} than rank 0" + (
                    f": {rows[odd][key]}, not {rows[0][key]}" if key == "step" else ""
                )
        for host in sorted({row["host"] for row in rows}):
            here = [rank for rank, row in enumerate(rows) if row["host"] == host]
            need = sum(rows[rank]["bytes"] for rank in here)
            need += sum(stream.bytes for stream in self._streams if stream.target in here)
            free = min(rows[rank]["free"] for rank in here)
            where = f"{rows[here[0]]['folder']}" + (f" of host {host}" if self._place.spread is not None else "")
            trouble = trouble or steps.no_room(need, free, where)
        if trouble is not None:
            self._drop()
            raise _FailedError(trouble)

    def _prepare(self) -> dict[str, Any]:
        folder, copied, draft = self._place.folder, self._copied, ""
        if self._leads:
            folder.mkdir(parents=True, exist_ok=True)
            steps.clean(folder)
            self._probe("begin.cleaned")
        if self._place.rank == 0:
            draft = f"step-{self._step:08d}.tmp-{secrets.token_hex(4)}"
            self._draft = folder / draft
            self._draft.mkdir()
            self._probe("begin.folder")
        return {
            "step": self._step,
            "scalars": hashlib.sha256(copied.scalars.encode()).hexdigest(),
            "bytes": copied.bytes,
            "free": steps.free_bytes(folder),
            "folder": str(folder),
            "host": self._place.host,
            "draft": draft,
            "created": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "sends": [
                (shard.file, shard.record["bytes"], shard.to)
                for shard in copied.shards
                if shard.to is not None and shard.record["bytes"]
            ],
        }

    def _write(self) -> list[writer.ShardRecord]:
        """The records of all files, of which each is written; `_FailedError` where one is not, or not twice alike."""
        rows = self._agree("write", self._files)
        records = [record for row in rows for record in row["records"]]
        if self._place.spread is not None:
            odd = unlike(records, [row["copies"] for row in rows])
            if odd is not None:
                self._drop()
                raise _FailedError(odd)
        return records

    def _files(self) -> dict[str, Any]:
        """Write what is this rank's; its records, and the sums of what it keeps for others."""
        spread, draft, copied = self._place.spread, self._draft, self._copied
        written: writer.Written | None = None
        trouble: Exception | None = None
        try:
            if spread is not None:
                draft.mkdir(exist_ok=True)
            if not draft.is_dir():
                raise WeightsError(
                    f"{draft} is not there, and rank 0 has made it: checkpoints must go to storage that every node sees"
                )
            written = writer.write_files(copied, draft, lambda what: self._probe(f"file.{what}"))
        except Exception as error:  # of whatever kind: what others wait for is sent first
            trouble = error
        sums: dict[str, str] = {}
        if spread is not None and self._streams:
            gives = {shard.file: shard.give for shard in copied.shards}
            give, arrive = (lambda one: gives[one.file]), (lambda one: Arrival(draft / one.file))
            sums = ended(relay(self._streams, self._place.rank, spread.link, give, arrive))
        if trouble is not None or written is None:
            raise trouble or AssertionError
        self._probe("write.done")
        return {"records": written.records, "copies": {**written.copies, **sums}}

    def _end(self, records: list[writer.ShardRecord]) -> Path:
        rows = self._agree("end", lambda: self._commit(records) if self._leads else None)
        return self._place.folder / str(rows[self._place.lead])

    def _commit(self, records: list[writer.ShardRecord]) -> str:
        """The lead's: manifest and rename."""
        folder, probe = self._place.folder, self._probe
        scalars = json.loads(self._copied.scalars)
        text = encode(writer.gather(records, step=self._step, created=self._created, scalars=scalars))
        probe("manifest.encoded")
        disk.write_small(self._draft / MANIFEST, text, lambda what: probe(f"manifest.{what}"))
        spread = self._place.spread
        steps.check(self._draft, only=None if spread is None else set(os.listdir(self._draft)))
        probe("commit.checked")
        disk.sync_folder(self._draft)
        probe("commit.synced")
        name = steps.free_name(folder, self._step)
        self._draft.rename(folder / name)
        self._draft = folder  # nothing to drop any more
        probe("commit.renamed")
        disk.sync_folder(folder)
        probe("commit.durable")
        return name

    def tidy(self, path: Path) -> str | None:
        """After the commit, the lead's: the pointer, then pruning. What fails here is told, and harms nothing."""
        self._probe("tidy.enter")
        if not self._leads:
            return None
        folder, probe = self._place.folder, self._probe
        try:
            pointer = {"format": "plait-latest", "step": self._step, "folder": path.name}
            content = (json.dumps(pointer) + "\n").encode()
            disk.replace(folder / steps.LATEST, content, lambda what: probe(f"latest.{what}"))
            disk.sync_folder(folder)
            probe("latest.durable")
            if self._place.spread is None:
                found = steps.superseded(folder, self._place.keep, self._place.keep_every)
                # A newer one may be there, which nobody could read: then this is all that the run has.
                gone = [entry for entry in found if entry.path != path]
            else:  # every host has its part of this one
                gone = [entry for entry in steps.committed(folder) if entry.path != path]
            steps.take_away(gone, lambda what: probe(f"prune.{what}"))
            probe("prune.end")
        except OSError as error:
            return f"step {self._step} is saved, but what follows failed: {_words(error)}"
        return None
