"""Typed fields of frozen dataclasses: documented, checked, read from TOML or one-line text, and written back.

`Plan` and the sections of `Config` share these, so that a wrong key or type reads the same everywhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from plait.core.errors import ConfigError


@dataclass(frozen=True)
class Interval:
    """Numbers from ``low`` to ``high`` (None: unbounded); ``open_low`` and ``open_high`` leave the ends out."""

    low: float
    high: float | None = None
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        below = self.high is None or (value < self.high if self.open_high else value <= self.high)
        return above and below

    def __str__(self) -> str:
        low = f"{'above' if self.open_low else 'at least'} {self.low:g}"
        if self.high is None:
            return low
        return f"{low} and {'below' if self.open_high else 'at most'} {self.high:g}"


class Key(NamedTuple):
    """One key of the run file: ``section.name``, its type in words, its default as TOML or "unset", and its meaning."""

    key: str
    type: str
    default: str
    doc: str


def key(default: object, doc: str, *, within: Interval | None = None, choices: tuple[str, ...] = ()) -> Any:
    """A dataclass field with its documentation, and the values it may take; see `check_values`."""
    return dataclasses.field(default=default, metadata={"doc": doc, "within": within, "choices": choices})


def without_none(kind: Any) -> tuple[Any, bool]:
    """``int | None`` -> ``(int, True)``; any other type -> ``(kind, False)``."""
    if get_origin(kind) is UnionType and NoneType in get_args(kind):
        (rest,) = (each for each in get_args(kind) if each is not NoneType)
        return rest, True
    return kind, False


def type_words(kind: Any) -> str:
    """What a person calls the type: ``tuple[int, ...]`` is "list of int"."""
    base, _ = without_none(kind)
    if get_origin(base) is tuple:
        kinds = get_args(base)
        return f"list of {kinds[0].__name__}" if kinds[-1] is Ellipsis else f"list of {len(kinds)} {kinds[0].__name__}"
    return {str: "string", Path: "path", dict: "table"}.get(base) or str(base.__name__)


def counted(count: int, what: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def typed(kind: Any, value: object, where: str) -> Any:
    """``value`` (as tomllib gives it) as ``kind``: lists become tuples, strings paths, integers floats where asked.

    ``where`` names the key in the error. Raises ConfigError naming key, value and expected type.
    """
    base, optional = without_none(kind)
    if value is None and optional:
        return None
    if get_origin(base) is tuple and isinstance(value, list | tuple):
        kinds = get_args(base)
        if kinds[-1] is Ellipsis:
            return tuple(typed(kinds[0], item, where) for item in value)
        if len(kinds) == len(value):
            return tuple(typed(each, item, where) for each, item in zip(kinds, value, strict=True))
    elif base is float and isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            if math.isfinite(float(value)):
                return float(value)
    elif base is Path and isinstance(value, str | Path) and str(value):
        return Path(value)
    elif base is dict and isinstance(value, Mapping):
        return dict(value)
    elif base in (int, str, bool) and type(value) is base:
        return value
    found = type(value).__name__ if not isinstance(value, float) or math.isfinite(value) else "no finite number"
    raise ConfigError(f"{where} = {value!r}: expected {type_words(kind)}, found {found}")


def from_text(kind: Any, text: str) -> object:
    """One value as a person types it: a TOML value, ``8,7`` for a list, and bare words where a string is expected.

    What is no value of the kind comes back as text, for `typed` to refuse by name.
    """
    base, _ = without_none(kind)
    if base in (str, Path) and text[:1] not in ('"', "'"):
        return text
    forms = (f"value = {text}", f"value = [{text}]") if get_origin(base) is tuple else (f"value = {text}",)
    for form in forms:
        with contextlib.suppress(tomllib.TOMLDecodeError):
            table = tomllib.loads(form)
            value = table["value"]
            if len(table) == 1 and (get_origin(base) is not tuple or isinstance(value, list)):
                return value
    return text


def toml_value(value: object) -> str:
    """``value`` as TOML. Strings, paths, numbers, booleans, lists or tuples, and flat tables of these."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | Path):
        # JSON's escapes are TOML's, but for DEL, which TOML wants escaped and JSON leaves.
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml_value(str(name))} = {toml_value(item)}" for name, item in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    raise TypeError(f"{type(value).__name__} has no TOML form here")


def toml_lines(instance: Any) -> list[str]:
    """``name = value`` for every field of a dataclass instance that is not None (TOML has no null)."""
    pairs = ((field.name, getattr(instance, field.name)) for field in dataclasses.fields(instance))
    return [f"{name} = {toml_value(value)}" for name, value in pairs if value is not None]


def nearest_names(name: str, known: Iterable[str]) -> str:
    """The known names closest to ``name`` in words, or all of them when none is close."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"nearest: {', '.join(close)}" if close else f"known: {', '.join(names)}"


def check_values(instance: Any, section: str) -> None:
    """Hold every field to its ``within`` and ``choices``; ConfigError names section, key, value and what is allowed."""
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        interval, choices = field.metadata.get("within"), field.metadata.get("choices")
        for item in value if isinstance(value, tuple) else (value,):
            if item is None:
                continue
            if interval is not None and item not in interval:
                raise ConfigError(f"[{section}] {field.name} = {value!r}: must be {interval}")
            if choices and item not in choices:
                raise ConfigError(f"[{section}] {field.name} = {value!r}: must be one of {', '.join(choices)}")


def describe(kind: type, section: str) -> list[Key]:
    """The keys of a dataclass, in order."""
    hints = get_type_hints(kind)
    rows = []
    for field in dataclasses.fields(kind):
        if "doc" in field.metadata:
            default = "unset" if field.default is None else toml_value(field.default)
            row = Key(f"{section}.{field.name}", type_words(hints[field.name]), default, field.metadata["doc"])
            rows.append(row)
    return rows
