"""Checkpoints whose files lie on several hosts: which is whole over those that are there, and how a host gets what it
lacks.

A host has a folder with the manifest and some of the files. Folders of one save have the same manifest, byte for byte,
and its SHA-256 tells saves apart: files of two saves are never taken together, whatever their step. A file counts where
its every byte holds. What is found is the same on every rank.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.checkpoint import disk, steps
from plait.checkpoint.manifest import LIMIT, MANIFEST, decode
from plait.checkpoint.reader import Checkpoint
from plait.checkpoint.relay import CHUNK, Arrival, Stream, relay
from plait.checkpoint.spread import Hosts, Spread
from plait.checkpoint.state import Agreement
from plait.core.errors import WeightsError


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A save that is whole over the hosts.

    ``folders``: the name of its folder by host, "" where there is none. ``holders``: file -> hosts on which its every
    byte holds. ``manifest``: bytes of the manifest, on every host with a folder the same.
    """

    step: int
    created: str
    digest: str
    manifest: int
    folders: tuple[str, ...]
    holders: Mapping[str, tuple[int, ...]]


def agree_whole(folder: Path, rank: int, hosts: Hosts, group: Agreement) -> tuple[Whole | None, list[str]]:
    """The newest save that is whole over the hosts, each of which has its own ``folder``; collective.

    And why newer ones were passed over, or some of their files. The ranks of a host each read a share of its files.
    """
    rows = group.gather(_listing(folder) if hosts.leads(rank) else [])
    passed = [
        f"host {hosts.of[one]}: {entry['error']}" for one, row in enumerate(rows) for entry in row if entry["error"]
    ]
    saves: dict[str, dict[str, Any]] = {}
    for one, row in enumerate(rows):
        for entry in row:
            if not entry["error"]:
                saves.setdefault(entry["digest"], {**entry, "folders": {}})["folders"][hosts.of[one]] = entry["name"]
    order = sorted(saves.values(), key=lambda save: (save["step"], save["created"], save["digest"]), reverse=True)
    for save in order:
        folders = tuple(save["folders"].get(host, "") for host in range(hosts.count))
        holders, troubles = _holders(folder, folders, rank, hosts, group)
        lost = sorted(file for file, where in holders.items() if not where)
        passed += [f"{trouble}; another copy is taken" if not lost else trouble for trouble in troubles]
        if not lost:
            facts = {key: save[key] for key in ("step", "created", "digest", "manifest")}
            return Whole(**facts, folders=folders, holders=holders), passed
        name = next(name for name in folders if name)
        passed.append(f"{name} in memory is not whole: {lost[0]} is on none of the {hosts.count} hosts")
    return None, passed


def _listing(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    try:
        entries = steps.committed(folder)
    except WeightsError as error:
        return [{"name": "", "error": str(error)}]
    for entry in entries:
        row: dict[str, Any] = {"name": entry.path.name, "error": ""}
        try:
            text = disk.read_plain(entry.path / MANIFEST, LIMIT)
            manifest = decode(text, str(entry.path / MANIFEST))
            row |= {"step": entry.step, "created": manifest.created, "manifest": len(text)}
            row["digest"] = hashlib.sha256(text).hexdigest()
        except (OSError, WeightsError) as error:
            row["error"] = str(error)
        found.append(row)
    return found


def _holders(
    folder: Path, folders: Sequence[str], rank: int, hosts: Hosts, group: Agreement
) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """Of one save: file -> hosts that have it, every byte; and what is wrong with files that are there."""
    host = hosts.of[rank]
    said: dict[str, Any] = {"files": [], "good": [], "bad": []}
    if folders[host]:
        here = hosts.ranks(host)
        try:
            opened = Checkpoint.open(folder / folders[host], only=())
            said["files"] = sorted(opened.manifest.files) if hosts.leads(rank) else []
            there = [file for file in sorted(opened.manifest.files) if (opened.path / file).is_file()]
            mine = there[here.index(rank) :: len(here)]
            bad = opened.damage_by_file(mine)
            said["good"], said["bad"] = [file for file in mine if file not in bad], list(bad.values())
        except (OSError, WeightsError) as error:
            said["bad"] = [str(error)]
    rows = group.gather(said)
    files = sorted({file for row in rows for file in row["files"]})
    held: dict[str, set[int]] = {file: set() for file in files}
    for one, row in enumerate(rows):
        for file in row["good"]:
            held[file].add(hosts.of[one])
    troubles = [f"host {hosts.of[one]}: {trouble}" for one, row in enumerate(rows) for trouble in row["bad"]]
    return {file: tuple(sorted(where)) for file, where in held.items()}, troubles


def bring_manifest(whole: Whole, folder: Path, rank: int, spread: Spread | None, group: Agreement) -> Path:
    """This host's folder of ``whole``; the first rank of a host without one makes it, with the manifest that another
    sends. Collective; WeightsError on all ranks where it fails on one."""
    if spread is None:
        return folder / whole.folders[0]
    hosts, host = spread.hosts, spread.hosts.of[rank]
    having = [one for one, name in enumerate(whole.folders) if name]
    streams = [
        Stream(file=f"{MANIFEST}.{one}", bytes=whole.manifest, source=hosts.lead(having[0]), target=hosts.lead(one))
        for one, name in enumerate(whole.folders)
        if not name
    ]
    name, error = whole.folders[host], ""
    draft = folder / f"step-{whole.step:08d}.tmp-{secrets.token_hex(4)}"
    give, arrive = (lambda _: _file(folder / name / MANIFEST)), (lambda _: Arrival(draft / MANIFEST))
    for arrival in relay(streams, rank, spread.link, give, arrive).values():
        try:
            arrival.end()
            text = disk.read_plain(draft / MANIFEST, LIMIT)
            if hashlib.sha256(text).hexdigest() != whole.digest:
                raise WeightsError(f"{draft / MANIFEST} came damaged from another host")
            name = steps.free_name(folder, whole.step)
            draft.rename(folder / name)
        except (OSError, WeightsError) as trouble:
            steps.remove(draft)
            error = str(trouble)
    rows = group.gather([name, error])
    _all_well([row[1] for row in rows])
    return folder / str(rows[hosts.lead(host)][0])


def bring(whole: Whole, path: Path, wanted: Iterable[str], rank: int, spread: Spread | None, group: Agreement) -> None:
    """Get the files ``wanted`` on this rank into this host's folder ``path`` of ``whole``, those that it lacks from
    hosts that have them, every byte checked. Collective; WeightsError on all ranks where it fails on one."""
    if spread is None:
        return  # there is nobody else, and `whole` is whole
    hosts, manifest = spread.hosts, Checkpoint.open(path, only=()).manifest
    rows = group.gather(sorted(file for file in wanted if hosts.of[rank] not in whole.holders[file]))
    sizes = {file: stored.bytes for file, stored in manifest.files.items()}
    streams = routes(rows, whole.holders, sizes, hosts)
    give, arrive = (lambda one: _file(path / one.file)), (lambda one: Arrival(path / f"{one.file}.tmp"))
    came = relay(streams, rank, spread.link, give, arrive)
    error = ""
    for file, arrival in came.items():
        draft = path / f"{file}.tmp"
        try:
            if arrival.end() != manifest.files[file].sums:
                raise WeightsError(f"{path / file} came damaged from another host")
            draft.rename(path / file)  # over one that is damaged, too
        except (OSError, WeightsError) as trouble:
            steps.remove(draft)
            error = error or str(trouble)
    _all_well(group.gather(error))


def routes(
    wanted: Sequence[Sequence[str]], holders: Mapping[str, Sequence[int]], sizes: Mapping[str, int], hosts: Hosts
) -> list[Stream]:
    """Who sends which file to whom. ``wanted``: rank by rank, the files that its host lacks.

    A host gets a file once; it comes from the rank that has the fewest bytes to send so far, of hosts that have it.
    """
    load = dict.fromkeys(range(len(hosts.of)), 0)
    given: set[tuple[int, str]] = set()
    found: list[Stream] = []
    for target, files in enumerate(wanted):
        for file in files:
            if (hosts.of[target], file) in given:
                continue
            given.add((hosts.of[target], file))
            source = min((one for host in holders[file] for one in hosts.ranks(host)), key=lambda one: (load[one], one))
            load[source] += sizes[file]
            found.append(Stream(file=file, bytes=sizes[file], source=source, target=target))
    return found


def _all_well(errors: Sequence[str]) -> None:
    for rank, error in enumerate(errors):
        if error:
            raise WeightsError(f"rank {rank}: {error}")


def _file(path: Path) -> disk.Source:
    """The bytes of a file, by chunks in one buffer. What cannot be read is sent as zeros, which no sum takes for it."""
    buffer = memoryview(bytearray(CHUNK))

    def give(start: int, stop: int) -> memoryview:
        part = buffer[: stop - start]
        with suppress(OSError):
            descriptor = disk.open_plain(path)
            try:
                disk.read_into(descriptor, part, start)
            finally:
                os.close(descriptor)
            return part
        part[:] = bytes(len(part))
        return part

    return give
