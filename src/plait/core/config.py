"""`Config`: what a run is, read from a TOML run file. Nested frozen dataclasses; `load` checks, `dump` writes back."""

# ruff: noqa: RUF009 - key() gives dataclasses.field, and sections are immutable

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from plait.core.errors import ConfigError
from plait.core.fields import (
    Interval,
    Key,
    check_values,
    describe,
    from_text,
    key,
    nearest_names,
    toml_lines,
    toml_value,
    type_words,
    typed,
    without_none,
)
from plait.core.plan import Plan

NATURAL = Interval(0)
POSITIVE = Interval(1)
SHARE = Interval(0, 1)
PART = Interval(0, 1, open_high=True)

MODEL_FIELDS: Mapping[str, tuple[type, str]] = {
    "family": (str, "llama, mistral, qwen2, qwen3 or gpt2: the layout for Hugging Face."),
    "vocab_size": (int, "Tokens in the vocabulary."),
    "hidden_size": (int, "Width of the residual stream."),
    "num_layers": (int, "Decoder layers."),
    "num_heads": (int, "Query heads."),
    "num_kv_heads": (int, "Key and value heads; fewer than num_heads: grouped-query attention."),
    "head_dim": (int, "Width of a head."),
    "ffn_size": (int, "Width inside the feed-forward layer."),
    "max_positions": (
        int,
        "Longest sequence the model is made for; learned positions end there, rotary ones may go on.",
    ),
    "norm": (str, "rmsnorm or layernorm."),
    "norm_eps": (float, "Added to the variance in norms."),
    "activation": (str, "swiglu, gelu or gelu_tanh."),
    "positions": (str, "rope or learned."),
    "rope_theta": (float, "Base of the rotary frequencies."),
    "rope_scaling": (dict, "Table of the scaling of rotary frequencies."),
    "qkv_bias": (bool, "Bias on the query, key and value projections."),
    "out_bias": (bool, "Bias on the attention output projection."),
    "mlp_bias": (bool, "Bias on the feed-forward projections."),
    "qk_norm": (bool, "Norm on queries and keys."),
    "tied": (bool, "The head shares the embedding's weight."),
    "dropout": (float, "Share of activations dropped in training."),
    "sliding_window": (int, "Tokens that attention looks back."),
    "window_from": (int, "First layer that has the sliding window."),
    "init_std": (float, "Standard deviation of initial weights."),
}
"""Keys of ``[model]`` beside preset and hf: the fields of the model's own configuration, which checks their values."""


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The model: a preset, a Hugging Face folder, or its own keys, which go over what preset or hf says."""

    preset: str | None = key(None, 'Name of a built-in model; "tiny" when neither hf nor any size is given.')
    hf: Path | None = key(None, "Hugging Face folder: its configuration and weights.")
    fields: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.preset is not None and self.hf is not None:
            raise ConfigError("[model] preset and hf are both given: keep one")
        for name in self.fields:
            if name not in MODEL_FIELDS:
                raise ConfigError(f"[model] has no size {name!r}; {nearest_names(name, MODEL_FIELDS)}")
        if self.preset is None and self.hf is None and not self.fields:
            object.__setattr__(self, "preset", "tiny")


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """The tokens, and how samples are taken from them. Without tokens and text: Python's own standard library."""

    tokens: Path | None = key(None, "Token file NAME.bin, with NAME.json beside it.")
    text: Path | None = key(None, "Text file, made into tokens once.")
    tokenizer: str = key("bytes", "bytes, or the path of a tokenizer.json, for text.")
    seq: int = key(128, "Tokens in a sample.", within=POSITIVE)
    shuffle: bool = key(True, "Order samples by a permutation of (seed, epoch); false: in the file's order.")
    held_out: float = key(0.02, "Share of the samples, at the end, kept for evaluation.", within=PART)
    separator: int | None = key(
        None,
        "Token that ends a document: positions restart after it, attention does not cross it, "
        "the target that follows it is masked.",
        within=NATURAL,
    )

    def __post_init__(self) -> None:
        check_values(self, "data")
        if self.tokens is not None and self.text is not None:
            raise ConfigError("[data] tokens and text are both given: keep one")


@dataclass(frozen=True, kw_only=True)
class TrainSection:
    """How long, on how much, and what is measured on the way."""

    steps: int = key(100, "Optimizer steps.", within=POSITIVE)
    global_batch: int = key(16, "Samples a step, over all ranks.", within=POSITIVE)
    seed: int = key(0, "Seed of weights, data order and dropout.", within=NATURAL)
    eval_every: int = key(0, "Steps between evaluations on the held-out samples; 0: never.", within=NATURAL)
    eval_batches: int = key(4, "Global batches in an evaluation.", within=POSITIVE)
    freeze: tuple[str, ...] = key((), 'Parameters that are not trained, as name patterns like "layers.0.*".')
    trace_step: int = key(3, "Step whose spans go to trace.json.", within=NATURAL)

    def __post_init__(self) -> None:
        check_values(self, "train")


@dataclass(frozen=True, kw_only=True)
class OptimizerSection:
    """AdamW and its learning rate."""

    lr: float = key(3e-4, "Peak learning rate.", within=NATURAL)
    betas: tuple[float, float] = key((0.9, 0.95), "Decay of Adam's two moments.", within=PART)
    eps: float = key(1e-8, "Added to the root of the second moment.", within=Interval(0, open_low=True))
    weight_decay: float = key(0.1, "Decoupled decay, on tensors of two or more dims.", within=NATURAL)
    clip: float = key(1.0, "Largest global gradient norm; 0: no clipping.", within=NATURAL)
    schedule: str = key("cosine", "Course of the learning rate.", choices=("constant", "cosine", "wsd"))
    warmup: int = key(0, "Steps of linear warm-up.", within=NATURAL)
    min_lr_ratio: float = key(0.1, "Last learning rate as a share of lr (cosine, wsd).", within=SHARE)
    decay: float = key(0.2, "Share of the steps in which wsd decays.", within=SHARE)

    def __post_init__(self) -> None:
        check_values(self, "optimizer")


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """Where the run happens and what it leaves."""

    dir: Path | None = key(None, "Run folder; unset: runs/ and the time.")
    processes: int | None = key(None, "Local workers; unset: as many as the plan needs.", within=POSITIVE)
    device: str = key("auto", "Where ranks compute.", choices=("auto", "cpu", "cuda"))
    timeout: float = key(
        60.0,
        "Seconds any wait for another rank may take; text to encode and weights to write take what they need.",
        within=Interval(0, open_low=True),
    )
    threads: int | None = key(None, "Threads a rank on CPU; unset: the cores shared evenly.", within=POSITIVE)

    def __post_init__(self) -> None:
        check_values(self, "run")


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    optimizer: OptimizerSection = OptimizerSection()
    plan: Plan = Plan()
    run: RunSection = RunSection()

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
    "plan": Plan,
    "run": RunSection,
}

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
    for section, table in tables.items():
        _known_section(section, f"{path}: ")
        if not isinstance(table, Mapping):
            raise ConfigError(f"{path}: {section} = {table!r}: expected a section [{section}]")
        for name, value in table.items():
            where = f"{path}: [{section}] "
            values[section][name] = _value(section, name, value, folder, where)
    overridden = set()
    for override in overrides:
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
        plan=Plan(**values["plan"]),
        run=RunSection(**values["run"]),
    )


def dump(config: Config) -> str:
    """TOML of every key that is set; `loads` reads it back equal."""
    blocks = []
    for section in SECTIONS:
        lines = _model_lines(config.model) if section == "model" else toml_lines(getattr(config, section))
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
