"""`Config`: what a run is, read from a TOML run file. Nested frozen dataclasses; `load` checks, `dump` writes back."""

# ruff: noqa: RUF009 - sections are immutable

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from plait.core.errors import ConfigError
from plait.core.fields import (
    Key,
    describe,
    from_text,
    nearest_names,
    toml_lines,
    toml_value,
    type_words,
    typed,
    without_none,
)
from plait.core.plan import Plan
from plait.core.sections import (
    MODEL_FIELDS,
    CheckpointSection,
    DataSection,
    ModelSection,
    MoESection,
    OptimizerSection,
    RunSection,
    TrainSection,
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    optimizer: OptimizerSection = OptimizerSection()
    moe: MoESection = MoESection()
    plan: Plan = Plan()
    auto: tuple[str, ...] | None = None
    """None: ``plan`` is the plan. Else plait makes one, and these keys of ``plan`` are given."""
    run: RunSection = RunSection()
    checkpoint: CheckpointSection = CheckpointSection()

    def __post_init__(self) -> None:
        if self.train.eval_every and not self.data.held_out:
            raise ConfigError("[train] eval_every needs held-out samples: set [data] held_out above 0")


DEFAULT: Mapping[str, Mapping[str, object]] = {
    "model": {"preset": "tiny"},
    "train": {"steps": 80, "global_batch": 16, "eval_every": 40},
    "optimizer": {"lr": 3e-3, "warmup": 10},
    "plan": {"tp": 2, "pp": 2, "micro": 4},
}
"""The run without a run file: a small model on the standard library's own sources."""

SECTIONS: Mapping[str, type] = {
    "model": ModelSection,
    "data": DataSection,
    "train": TrainSection,
    "optimizer": OptimizerSection,
    "moe": MoESection,
    "plan": Plan,
    "run": RunSection,
    "checkpoint": CheckpointSection,
}

_AUTO = Key("plan.auto", "bool", "false", 'plait makes the plan; keys beside it are kept. Also `plan = "auto"`.')

KINDS: Mapping[str, Mapping[str, Any]] = {
    section: {name: kind for name, kind in get_type_hints(cls).items() if name != "fields"}
    | ({name: kind for name, (kind, _) in MODEL_FIELDS.items()} if section == "model" else {})
    for section, cls in SECTIONS.items()
}
"""Type of every key, by section."""


def load(path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """The run of a TOML file (None: `DEFAULT`), with ``section.key=value`` overrides; ``=none`` unsets an optional key.

    Relative paths in the file start at the file's folder, those in overrides at the current one; both become absolute.
    Raises ConfigError for a file that cannot be read, bad TOML (with its line), unknown sections and keys, wrong types
    and values out of range.
    """
    here = Path.cwd()
    tables, folder = (DEFAULT, here) if path is None else (_read(path), Path(os.path.abspath(path)).parent)
    return _config(tables, overrides, path, folder, here)


def loads(text: str) -> Config:
    """Inverse of `dump`; raises as `load` does."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"not valid TOML: {error}") from error
    here = Path.cwd()
    return _config(tables, (), None, here, here)


def _config(
    tables: Mapping[str, Mapping[str, object]], overrides: Sequence[str], path: Path | None, folder: Path, here: Path
) -> Config:
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    auto = False
    for section, table in tables.items():
        _known_section(section, f"{path}: ")
        if section == "plan":
            auto, table = _auto(table, f"{path}: ")
        if not isinstance(table, Mapping):
            raise ConfigError(f"{path}: {section} = {table!r}: expected a section [{section}]")
        for name, value in table.items():
            where = f"{path}: [{section}] "
            values[section][name] = _value(section, name, value, folder, where)
    overridden = set()
    for override in overrides:
        if override.replace(" ", "") in ("plan=auto", "plan.auto=true", "plan.auto=false"):
            auto = not override.endswith("false")
            if auto and tables is DEFAULT:
                values["plan"].clear()  # nobody asked for its keys
            continue
        section, name, text = _split(override)
        overridden.add(f"{section}.{name}")
        kind = _kind(section, name, f"--set {override}: ")
        if text == "none" and without_none(kind)[1]:
            values[section].pop(name, None)
        else:
            values[section][name] = _value(section, name, from_text(kind, text), here, f"--set {section}.")
    model = values["model"]
    if tables is DEFAULT and "hf" in model and "model.preset" not in overridden:
        del model["preset"]  # nobody asked for it
    chosen = {name: model.pop(name) for name in ("preset", "hf") if name in model}
    return Config(
        model=ModelSection(**chosen, fields=model),
        data=DataSection(**values["data"]),
        train=TrainSection(**values["train"]),
        optimizer=OptimizerSection(**values["optimizer"]),
        moe=MoESection(**values["moe"]),
        plan=Plan(**values["plan"]),
        auto=tuple(sorted(values["plan"])) if auto else None,
        run=RunSection(**values["run"]),
        checkpoint=CheckpointSection(**values["checkpoint"]),
    )


def dump(config: Config) -> str:
    """TOML of every key that is set; `loads` reads it back equal."""
    blocks = []
    for section in SECTIONS:
        lines = _model_lines(config.model) if section == "model" else toml_lines(getattr(config, section))
        if section == "plan" and config.auto is not None:
            given = [line for line in lines if line.partition(" = ")[0] in config.auto]
            lines = ["auto = true", *given]
        blocks.append("\n".join([f"[{section}]", *lines]))
    return "\n\n".join(blocks) + "\n"


def check_paths(config: Config) -> None:
    """Raise ConfigError naming every file and folder that the run reads and that is not there."""
    tokens, schedule = config.data.tokens, config.plan.schedule_file
    wanted = [
        ("model.hf", config.model.hf and config.model.hf / "config.json"),
        ("data.tokens", tokens),
        ("data.tokens", tokens and tokens.with_suffix(".json")),
        ("data.text", config.data.text),
        ("data.tokenizer", None if config.data.tokenizer == "bytes" else Path(config.data.tokenizer)),
        ("plan.schedule", None if schedule is None else Path(schedule)),
    ]
    missing = [f"{name}: no file {path}" for name, path in wanted if path is not None and not path.is_file()]
    if missing:
        raise ConfigError("\n".join(missing))


def keys() -> list[Key]:
    """Every key that a run file may hold, in order."""
    rows = []
    for section, cls in SECTIONS.items():
        rows += describe(cls, section)
        if section == "model":
            rows += [Key(f"model.{name}", type_words(kind), "unset", doc) for name, (kind, doc) in MODEL_FIELDS.items()]
        if section == "plan":
            rows.append(_AUTO)
    return rows


def markdown() -> str:
    """The tables of ``docs/configuration.md``, a section each."""
    lines: list[str] = []
    for section, cls in SECTIONS.items():
        lines += [f"## [{section}]", "", (cls.__doc__ or "").strip().partition("\n")[0], ""]
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for row in keys():
            owner, _, name = row.key.partition(".")
            if owner == section:
                default = row.default if row.default == "unset" else f"`{row.default}`"
                lines.append(f"| `{name}` | {row.type} | {default} | {row.doc} |")
        lines.append("")
    return "\n".join(lines)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise ConfigError(f"run file {path}: {error.strerror}") from error


def _auto(table: Any, where: str) -> tuple[bool, Any]:
    """Whether plait makes the plan (``plan = "auto"``, or ``auto = true`` in [plan]), and the keys that are given."""
    if table == "auto":
        return True, {}
    if not isinstance(table, Mapping) or "auto" not in table:
        return False, table
    if not isinstance(table["auto"], bool):
        raise ConfigError(f"{where}[plan] auto = {table['auto']!r}: expected true or false")
    return table["auto"], {name: value for name, value in table.items() if name != "auto"}


def _known_section(section: str, where: str) -> None:
    if section not in SECTIONS:
        homes = [f"{home}.{section}" for home, kinds in KINDS.items() if section in kinds]
        hint = f"it is a key: {' or '.join(homes)}" if homes else nearest_names(section, SECTIONS)
        raise ConfigError(f"{where}unknown section {section!r}; {hint}")


def _kind(section: str, name: str, where: str) -> Any:
    """Type of a key, or ConfigError with the sections that have it, or the nearest keys of this one."""
    _known_section(section, where)
    if name not in KINDS[section]:
        homes = [home for home, kinds in KINDS.items() if name in kinds]
        hint = f"it belongs to [{'] or ['.join(homes)}]" if homes else nearest_names(name, KINDS[section])
        raise ConfigError(f"{where}unknown key {name!r} in [{section}]; {hint}")
    return KINDS[section][name]


def _split(override: str) -> tuple[str, str, str]:
    target, equals, text = override.partition("=")
    section, dot, name = target.strip().partition(".")
    if not equals or not dot:
        homes = [f"{home}.{section}" for home, kinds in KINDS.items() if section in kinds]
        hint = f"; did you mean {' or '.join(homes)}?" if homes else ""
        raise ConfigError(f"--set {override}: expected section.key=value{hint}")
    return section, name, text.strip()


def _value(section: str, name: str, value: object, folder: Path, where: str) -> Any:
    """A checked value, its path made absolute from ``folder``."""
    found = typed(_kind(section, name, where), value, f"{where}{name}")
    tokenizer_file = (section, name) == ("data", "tokenizer") and found != "bytes"
    schedule_file = (section, name) == ("plan", "schedule") and Plan(schedule=found).schedule_file is not None
    if not (isinstance(found, Path) or tokenizer_file or schedule_file):
        return found
    absolute = os.path.abspath(folder / os.path.expanduser(found))
    return Path(absolute) if isinstance(found, Path) else absolute


def _model_lines(model: ModelSection) -> list[str]:
    chosen = [(each.name, getattr(model, each.name)) for each in fields(model) if each.name != "fields"]
    return [f"{name} = {toml_value(value)}" for name, value in [*chosen, *model.fields.items()] if value is not None]
