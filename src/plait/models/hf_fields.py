"""Reading and writing single fields of a Hugging Face ``config.json``. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.models.parts import RopeScaling

_KINDS = ("default", "linear", "llama3", "yarn")


def need(mapping: Mapping[str, Any], key: str) -> Any:
    """The value of ``key``, which a config.json of this family must have."""
    if mapping.get(key) is None:
        raise ValueError(f"config.json of a {mapping['model_type']} model has no {key!r}")
    return mapping[key]


def only(mapping: Mapping[str, Any], key: str, works: object) -> None:
    """Refuses a switch that changes the mathematics in a way this decoder does not have."""
    if mapping.get(key, works) != works:
        raise ValueError(f"config.json has {key}={mapping[key]!r}: only {works!r} is supported")


def rope(mapping: Mapping[str, Any], default_theta: float) -> tuple[float, RopeScaling | None]:
    """Base and scaling; transformers 5 keeps both in ``rope_parameters``, earlier ones in two keys."""
    given: dict[str, Any] = {**(mapping.get("rope_scaling") or {}), **(mapping.get("rope_parameters") or {})}
    if any(isinstance(value, Mapping) for value in given.values()):
        raise ValueError("config.json has rope_parameters for each layer type: only one set is supported")
    only(given, "partial_rotary_factor", 1.0)
    theta = float(given.get("rope_theta") or mapping.get("rope_theta") or default_theta)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in _KINDS:
        raise ValueError(f"config.json has rope_type={kind!r}: {', '.join(_KINDS)} are supported")
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling(kind="linear", factor=float(given["factor"]))
    trained = int(given.get("original_max_position_embeddings") or need(mapping, "max_position_embeddings"))
    if kind == "yarn":
        return theta, _yarn(given, trained, mapping)
    return theta, RopeScaling(
        kind="llama3",
        factor=float(given["factor"]),
        low_freq_factor=float(given["low_freq_factor"]),
        high_freq_factor=float(given["high_freq_factor"]),
        original_max_positions=trained,
    )


def _yarn(given: Mapping[str, Any], trained: int, mapping: Mapping[str, Any]) -> RopeScaling:
    only(given, "truncate", True)
    factor = given.get("factor") or need(mapping, "max_position_embeddings") / trained
    attention = given.get("attention_factor")
    return RopeScaling(
        kind="yarn",
        factor=float(factor),
        original_max_positions=trained,
        beta_fast=float(given.get("beta_fast") or 32),
        beta_slow=float(given.get("beta_slow") or 1),
        mscale=float(given.get("mscale") or 0),
        mscale_all_dim=float(given.get("mscale_all_dim") or 0),
        attention_factor=None if attention is None else float(attention),
    )


def scaling_to_hf(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """The value of ``rope_scaling``; inverse of `rope`."""
    if scaling is None:
        return None
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    common = {
        "rope_type": scaling.kind,
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_max_positions,
    }
    if scaling.kind == "yarn":
        given = {
            "mscale": scaling.mscale or None,
            "mscale_all_dim": scaling.mscale_all_dim or None,
            "attention_factor": scaling.attention_factor,
        }
        betas = {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
        return {**common, **betas, **{name: value for name, value in given.items() if value is not None}}
    return {**common, "low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
