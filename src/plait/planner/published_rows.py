"""Published measurements of training runs, one JSON object a line; a malformed row is refused with its file and line.

A row says what ran (model, cluster, layout, batch, precision, recomputation), what was measured of it, and which of
these the source does not state (``assumed``). Unknown keys are let be: they carry no number that is read here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from plait.core.errors import ConfigError

GIB: Final = 1024.0**3
PRECISIONS: Final = ("fp32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4")
RECOMPUTE: Final = ("none", "selective", "full", "unknown")

_COUNT, _SIZE, _TEXT, _FLAG = "a whole number of at least 1", "a number above 0", "text", "true or false"
_WHOLE, _MAP = "a whole number of at least 0", "an object"
_FIELDS: Final[Mapping[str, Mapping[str, str]]] = {
    "model": {
        "name": _TEXT,
        **dict.fromkeys(("hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "vocab"), _COUNT),
        "ffn_kind": _TEXT,
        "tied": _FLAG,
        "attention": _TEXT,
        **dict.fromkeys(("max_seq?", "experts?", "top_k?", "moe_ffn?", "moe_every?", "shared_experts?"), _COUNT),
        **dict.fromkeys(("shared_ffn?", "first_dense_layers?", "mtp_layers?"), _WHOLE),
        "mla?": _MAP,
    },
    "cluster": {
        "device": _TEXT,
        "devices": _COUNT,
        "devices_per_node": _COUNT,
        "intra_GBps?": _SIZE,
        "inter_Gbps_per_device?": _SIZE,
    },
    "layout": {
        **dict.fromkeys(("tp", "pp", "dp", "cp", "ep", "vp"), _COUNT),
        "etp?": _COUNT,
        "zero": _WHOLE,
        "hsdp_replicas?": _COUNT,
        "sequence_parallel": _FLAG,
        "schedule": _TEXT,
    },
    "batch": dict.fromkeys(("seq", "global_batch", "micro_batch", "microbatches"), _COUNT),
    "measured": dict.fromkeys(("step_time_s?", "peak_memory_gib?", "tokens_per_s_per_device?"), _SIZE),
}
"""Object -> field -> what its value is; a field with ``?`` may be null or absent."""
_MLA: Final = ("kv_lora", "qk_nope", "qk_rope", "v_head")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published measurement. The mappings hold the file's own fields; seconds, bytes."""

    id: str
    source: str
    cite: str
    quality: str
    model: Mapping[str, Any]
    cluster: Mapping[str, Any]
    layout: Mapping[str, Any]
    batch: Mapping[str, Any]
    precision: str
    recompute: str
    flags: Mapping[str, Any]
    step_time: float | None
    """Seconds of one optimizer step."""
    peak_memory: float | None
    """Bytes, of the kind that ``flags["memory_kind"]`` says."""
    assumed: tuple[str, ...]
    """Fields that the source does not state."""

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return int(self.batch["global_batch"] * self.batch["seq"])

    @property
    def experts(self) -> bool:
        """Whether the model has experts."""
        return bool(self.model.get("experts"))


def rows(path: str | Path) -> list[Row]:
    """The rows of a file; ConfigError names the file, the line and what is wrong there."""
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"published rows {file}: {why}") from error
    found: list[Row] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        row = _row(_object(line, where), where)
        if row.id in seen:
            raise ConfigError(f"{where}: id {row.id!r} is that of line {seen[row.id]} too: ids are unique")
        seen[row.id] = number
        found.append(row)
    if not found:
        raise ConfigError(f"published rows {file}: no rows: expected one JSON object a line")
    return found


def _object(line: str, where: str) -> dict[str, Any]:
    def refuse(word: str) -> float:
        raise ConfigError(f"{where}: {word} is not a number that was measured")

    try:
        value = json.loads(line, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise ConfigError(f"{where}: not a row: nested too deeply") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: a row is a JSON object, this is {type(value).__name__}")
    return value


def _row(raw: Mapping[str, Any], where: str) -> Row:
    for name in ("id", "source"):
        if not isinstance(raw.get(name), str) or not raw[name]:
            raise ConfigError(f"{where}: {name} is missing or no text")
    where = f"{where} ({raw['id']})"
    parts = {part: _part(raw, part, where) for part in _FIELDS}
    for name, known in (("precision", PRECISIONS), ("recompute", RECOMPUTE)):
        if raw.get(name) not in known:
            raise ConfigError(f"{where}: {name}={raw.get(name)!r} is not one of {', '.join(known)}")
    flags, assumed = raw.get("flags") or {}, raw.get("assumed") or []
    if not isinstance(flags, dict):
        raise ConfigError(f"{where}: flags is {type(flags).__name__}, expected an object")
    if not isinstance(assumed, list) or not all(isinstance(name, str) for name in assumed):
        raise ConfigError(f"{where}: assumed is no list of field names")
    time, memory = _measured(parts["measured"], parts["batch"], parts["cluster"], where)
    _fits(parts, where)
    return Row(
        id=raw["id"],
        source=raw["source"],
        cite=str(raw.get("cite", "")),
        quality=str(raw.get("quality", "")),
        model=parts["model"],
        cluster=parts["cluster"],
        layout=parts["layout"],
        batch=parts["batch"],
        precision=raw["precision"],
        recompute=raw["recompute"],
        flags=flags,
        step_time=time,
        peak_memory=memory,
        assumed=tuple(assumed),
    )


def _part(raw: Mapping[str, Any], part: str, where: str) -> dict[str, Any]:
    """The object ``part``, every field of `_FIELDS` in it, those that may be absent as None."""
    values = raw.get(part)
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: {part} is missing or no object")
    found = dict(values)
    for name, kind in _FIELDS[part].items():
        field, optional = name.removesuffix("?"), name.endswith("?")
        value = values.get(field)
        if value is None and optional:
            found[field] = None
        elif not _is(value, kind):
            raise ConfigError(f"{where}: {part}.{field}={value!r}: expected {kind}{' or null' if optional else ''}")
    return found


def _is(value: object, kind: str) -> bool:
    if kind == _TEXT:
        return isinstance(value, str) and bool(value)
    if kind == _FLAG:
        return isinstance(value, bool)
    if kind == _MAP:
        return isinstance(value, dict)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if kind == _SIZE:
        return 0 < value < math.inf
    return isinstance(value, int) and value >= (1 if kind == _COUNT else 0)


def _measured(
    measured: Mapping[str, Any], batch: Mapping[str, Any], cluster: Mapping[str, Any], where: str
) -> tuple[float | None, float | None]:
    """Seconds of a step, and bytes at the peak; a step time follows from tokens/s where only that is there."""
    time, rate, memory = (measured[name] for name in ("step_time_s", "tokens_per_s_per_device", "peak_memory_gib"))
    if time is None and memory is None and rate is None:
        raise ConfigError(f"{where}: nothing is measured: give step_time_s, tokens_per_s_per_device or peak_memory_gib")
    if rate is not None:
        derived = batch["global_batch"] * batch["seq"] / (rate * cluster["devices"])
        # Published figures are rounded, to two digits at worst.
        if time is not None and not 0.9 < derived / time < 1.1:
            raise ConfigError(
                f"{where}: step_time_s={time} and tokens_per_s_per_device={rate} disagree: that is {derived:.4g} s"
            )
        time = derived if time is None else time
    return (None if time is None else float(time)), (None if memory is None else memory * GIB)


def _fits(parts: Mapping[str, Mapping[str, Any]], where: str) -> None:
    """Whether the numbers go together."""
    model, layout, batch, cluster = (parts[name] for name in ("model", "layout", "batch", "cluster"))
    ranks = layout["tp"] * layout["pp"] * layout["cp"] * layout["dp"]
    if ranks != cluster["devices"]:
        raise ConfigError(f"{where}: tp x pp x cp x dp = {ranks}, cluster.devices={cluster['devices']}")
    samples = batch["micro_batch"] * batch["microbatches"] * layout["dp"]
    if samples != batch["global_batch"]:
        raise ConfigError(
            f"{where}: micro_batch x microbatches x dp = {samples}, batch.global_batch={batch['global_batch']}"
        )
    if layout["zero"] > 3:
        raise ConfigError(f"{where}: layout.zero={layout['zero']}: expected 0 to 3")
    if model["experts"] and not (model["top_k"] and model["moe_ffn"]):
        raise ConfigError(f"{where}: model.experts={model['experts']} without model.top_k and model.moe_ffn")
    if model["mla"] is not None and not all(_is(model["mla"].get(name), _COUNT) for name in _MLA):
        raise ConfigError(f"{where}: model.mla needs {', '.join(_MLA)} as whole numbers of at least 1")
