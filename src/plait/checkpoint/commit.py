"""The commit protocol: how the files of several ranks become one checkpoint, or none.

1. *begin*: rank 0 removes what dead saves left and makes ``step-N.tmp-ID``; all agree on step, scalars, ID and room.
2. *write*: every rank writes its file there, syncs it, and sums it up meanwhile; all agree that all have.
3. *end*: rank 0 writes the manifest, syncs it and the folder, gives the folder its name in one rename and syncs that;
   all agree that it has. The rename is the instant: before it the save never was, after it the checkpoint is whole.
4. *tidy*: rank 0 points ``latest.json`` at it, syncs that, and only then takes away what is superseded.

Whatever fails on a rank before the rename fails the save on all of them with one message, and leaves what was
committed before as it is.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, final

from plait.checkpoint import disk, steps, writer
from plait.checkpoint.manifest import MANIFEST, encode
from plait.checkpoint.state import Agreement
from plait.core.errors import PlaitError, WeightsError

Probe = Callable[[str], None]
EVERYWHERE = (
    "begin.enter",
    "begin.agree",
    "begin.agreed",
    "write.enter",
    "file.opened",
    "file.half",
    "file.written",
    "file.synced",
    "write.done",
    "write.agree",
    "write.agreed",
    "end.enter",
    "end.agree",
    "end.agreed",
    "tidy.enter",
)
"""The boundaries that every rank passes in a commit, in order."""
COMMITTER = (
    "begin.cleaned",
    "begin.folder",
    "manifest.encoded",
    "manifest.opened",
    "manifest.written",
    "manifest.synced",
    "commit.checked",
    "commit.synced",
    "commit.renamed",
    "commit.durable",
    "latest.written",
    "latest.replaced",
    "latest.durable",
    "prune.renamed",
    "prune.removed",
    "prune.end",
)
"""The boundaries that rank 0 alone passes (``prune.renamed`` and ``.removed`` for each checkpoint that goes)."""


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
    """Where checkpoints go, as one rank sees it, and how many stay."""

    folder: Path
    rank: int
    group: Agreement
    keep: int
    keep_every: int
    probe: Probe


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
        bytes=0 if isinstance(copied, Exception) else copied.record["bytes"],
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
        self._probe, self._leads = place.probe, place.rank == 0
        self._draft = place.folder

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
        # Every rank sees the same rows, and so comes to the same judgement.
        need, free = sum(row["bytes"] for row in rows), min(row["free"] for row in rows)
        trouble = None
        for key in ("step", "scalars"):
            odd = next((rank for rank, row in enumerate(rows) if row[key] != rows[0][key]), None)
            if odd is not None and trouble is None:
                trouble = f"rank {odd} saves other {key} than rank 0" + (
                    f": {rows[odd][key]}, not {rows[0][key]}" if key == "step" else ""
                )
        if trouble is None and need > free:
            trouble = f"it takes {need / 1e9:,.3f} GB, and {self._place.folder} has room for {free / 1e9:,.3f} GB"
        if trouble is not None:
            self._drop()
            raise _FailedError(trouble)

    def _prepare(self) -> dict[str, Any]:
        folder, copied, draft = self._place.folder, self._copied, ""
        if self._leads:
            folder.mkdir(parents=True, exist_ok=True)
            steps.clean(folder)
            self._probe("begin.cleaned")
            draft = f"step-{self._step:08d}.tmp-{secrets.token_hex(4)}"
            self._draft = folder / draft
            self._draft.mkdir()
            self._probe("begin.folder")
        return {
            "step": self._step,
            "scalars": hashlib.sha256(copied.scalars.encode()).hexdigest(),
            "bytes": copied.record["bytes"],
            "free": steps.free_bytes(folder),
            "draft": draft,
        }

    def _write(self) -> list[writer.ShardRecord]:
        def work() -> writer.ShardRecord:
            if not self._draft.is_dir():
                raise WeightsError(
                    f"{self._draft} is not there, and rank 0 has made it: checkpoints must go to storage that every "
                    "node sees"
                )
            file = f"rank-{self._place.rank:05d}.safetensors"
            record = writer.write_file(self._copied, self._draft, file, lambda what: self._probe(f"file.{what}"))
            self._probe("write.done")
            return record

        return self._agree("write", work)

    def _end(self, records: list[writer.ShardRecord]) -> Path:
        return self._place.folder / str(self._agree("end", lambda: self._commit(records) if self._leads else None)[0])

    def _commit(self, records: list[writer.ShardRecord]) -> str:
        """Rank 0's: manifest and rename."""
        folder, probe = self._place.folder, self._probe
        manifest = writer.gather(
            records,
            step=self._step,
            created=datetime.now(UTC).isoformat(timespec="milliseconds"),
            scalars=json.loads(self._copied.scalars),
        )
        text = encode(manifest)
        probe("manifest.encoded")
        disk.write_small(self._draft / MANIFEST, text, lambda what: probe(f"manifest.{what}"))
        steps.check(self._draft)
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
        """After the commit, rank 0's: the pointer, then pruning. What fails here is told, and harms nothing."""
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
            gone = steps.superseded(folder, self._place.keep, self._place.keep_every)
            steps.take_away(gone, lambda what: probe(f"prune.{what}"))
            probe("prune.end")
        except OSError as error:
            return f"step {self._step} is saved, but what follows failed: {_words(error)}"
        return None
