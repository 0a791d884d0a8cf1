"""What lies in a folder of checkpoints: listed, shown, verified, pruned, and held against what a run would load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plait.checkpoint import steps
from plait.checkpoint.manifest import DTYPES, MANIFEST, Manifest
from plait.checkpoint.reshard import volume
from plait.core.errors import ConfigError, WeightsError
from plait.core.shard import full


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A checkpoint at a glance. ``trouble``: why it cannot be opened, None where it can; its bytes were not read."""

    name: str
    step: int
    created: str
    bytes: int
    files: int
    tensors: int
    trouble: str | None


@dataclass(frozen=True, kw_only=True)
class Group:
    """The tensors of one kind (``weights``, ``exp_avg``): ``elements`` and ``bytes`` of them, in ``dtypes``."""

    kind: str
    tensors: int
    elements: int
    bytes: int
    dtypes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A checkpoint in full. ``files``: bytes by name; ``scalars``: what was saved beside the tensors."""

    path: str
    step: int | None
    created: str
    groups: tuple[Group, ...]
    files: Mapping[str, int]
    scalars: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Verified:
    """Whether every byte of a checkpoint holds: ``damage`` names what does not, a line a file."""

    name: str
    bytes: int
    damage: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What would happen if tensors of given shapes were loaded from a checkpoint.

    ``found``: those that would load, with their bytes; ``missing``: wanted, not stored; ``other``: stored in another
    shape, (stored, wanted); ``left``: stored, not wanted.
    """

    found: Mapping[str, int]
    missing: tuple[str, ...]
    other: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    left: tuple[str, ...]

    @property
    def loads(self) -> bool:
        """Whether everything that is wanted is there."""
        return not self.missing and not self.other


def paths(where: Path) -> list[Path]:
    """The checkpoints that ``where`` means, from old to new: itself, those in it, or those in its ``checkpoints``.

    ConfigError where there is no such folder.
    """
    if not where.is_dir():
        raise ConfigError(f"{where}: there is no such folder")
    if (where / MANIFEST).exists():
        return [where]
    found = steps.committed(where)
    if not found and (where / "checkpoints").is_dir():
        found = steps.committed(where / "checkpoints")
    return [entry.path for entry in found]


def newest(where: Path) -> Path:
    """The last of `paths`; ConfigError where there is none."""
    found = paths(where)
    if not found:
        raise ConfigError(f"{where} holds no checkpoint: neither {MANIFEST} nor folders step-00000001 and so on")
    return found[-1]


def list_(where: Path) -> list[Listed]:
    """Every checkpoint that ``where`` means, from old to new, damaged ones among them."""
    return [_listed(path) for path in paths(where)]


def _listed(path: Path) -> Listed:
    try:
        manifest = steps.check(path)
    except WeightsError as error:
        step = next((entry.step for entry in steps.committed(path.parent) if entry.path == path), 0)
        return Listed(name=path.name, step=step, created="", bytes=0, files=0, tensors=0, trouble=str(error))
    return Listed(
        name=path.name,
        step=manifest.step or 0,
        created=manifest.created,
        bytes=manifest.bytes,
        files=len(manifest.files),
        tensors=len(manifest.tensors),
        trouble=None,
    )


def show(where: Path) -> Shown:
    """The newest checkpoint that ``where`` means. WeightsError where it cannot be opened."""
    path = newest(where)
    manifest = steps.check(path)
    return Shown(
        path=str(path),
        step=manifest.step,
        created=manifest.created,
        groups=_groups(manifest),
        files={name: file.bytes for name, file in manifest.files.items()},
        scalars=manifest.scalars,
    )


def _groups(manifest: Manifest) -> tuple[Group, ...]:
    by_kind: dict[str, list[tuple[int, str]]] = {}
    for name, tensor in manifest.tensors.items():
        kind = name.split("/", 1)[0] if "/" in name else "weights"
        by_kind.setdefault(kind, []).append((volume(full(tensor.shape)), tensor.dtype))
    return tuple(
        Group(
            kind=kind,
            tensors=len(rows),
            elements=sum(count for count, _ in rows),
            bytes=sum(count * DTYPES[dtype][1] for count, dtype in rows),
            dtypes=tuple(sorted({dtype for _, dtype in rows})),
        )
        for kind, rows in by_kind.items()
    )


def verify(where: Path) -> list[Verified]:
    """Read every byte of every checkpoint that ``where`` means, and hold it against its manifest."""
    from plait.checkpoint.reader import Checkpoint  # it needs torch, and the other commands do not

    found: list[Verified] = []
    for path in paths(where):
        try:
            opened = Checkpoint.open(path)
            damage = opened.damage()
            size = opened.manifest.bytes
        except WeightsError as error:
            damage, size = [str(error)], 0
        found.append(Verified(name=path.name, bytes=size, damage=tuple(damage)))
    return found


def prune(where: Path, *, keep: int, keep_every: int = 0) -> list[str]:
    """Take away all checkpoints in ``where`` but the newest ``keep`` good ones and steps that ``keep_every`` divides.

    Returns the names that went. What dead saves left is the next save's to remove: a run may be saving here.
    ConfigError where one cannot be taken away.
    """
    found = paths(where)
    if found and found[-1] == where:
        raise ConfigError(f"{where} is one checkpoint: name the folder that holds it")
    folder = found[-1].parent if found else where
    try:
        gone = steps.superseded(folder, keep, keep_every)
        steps.take_away(gone, lambda _: None)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be pruned: {error.strerror}") from error
    return [entry.path.name for entry in gone]


def fit(path: Path, wanted: Mapping[str, tuple[int, ...]]) -> Fit:
    """Hold the tensors that a run wants (name -> shape of the whole tensor) against the checkpoint in ``path``."""
    stored = steps.check(path).tensors
    have = {name: stored[name].shape for name in wanted if name in stored}
    return Fit(
        found={
            name: volume(full(shape)) * DTYPES[stored[name].dtype][1]
            for name, shape in have.items()
            if shape == tuple(wanted[name])
        },
        missing=tuple(name for name in wanted if name not in stored),
        other={name: (shape, tuple(wanted[name])) for name, shape in have.items() if shape != tuple(wanted[name])},
        left=tuple(name for name in stored if name not in wanted),
    )


def as_json(value: Listed | Shown | Verified | Fit) -> dict[str, Any]:
    """``value`` as plain JSON."""
    return asdict(value)
