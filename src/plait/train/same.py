"""Whether a checkpoint is one of this run: what must not have changed, and which tensors it has to hold."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from plait.checkpoint.reader import Checkpoint
from plait.core.errors import ConfigError, WeightsError
from plait.models.config import parameter_shapes
from plait.parallel.state import MOMENTS
from plait.train.data import Samples, TokenFile
from plait.train.run import Setup, trained_shapes
from plait.train.tokens import token_path

_EDGE = 1 << 16
"""Tokens at either end of the data that tell one file from another."""


def identity(setup: Setup, samples: Samples) -> dict[str, Any]:
    """What makes a run this run, as plain JSON: by key of the run file, or what a key leads to."""
    config, file = setup.config, TokenFile.open(token_path(setup.config))
    edges = (file.tokens[:_EDGE], file.tokens[-_EDGE:])
    digest = hashlib.blake2b(b"".join(part.tobytes() for part in edges), digest_size=16).hexdigest()
    found: dict[str, Any] = {
        "train.seed": config.train.seed,
        "train.global_batch": config.train.global_batch,
        "train.freeze": list(config.train.freeze),
        "data.seq": config.data.seq,
        "data.shuffle": config.data.shuffle,
        "data.separator": config.data.separator,
        "data.held_out": samples.held_out,
        "data (its tokens)": [len(file.tokens), digest],
    }
    model = cast("dict[str, Any]", json.loads(json.dumps(setup.model.to_mapping())))
    return found | {f"model.{name}": value for name, value in model.items()}


def check_same(path: Path, scalars: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """ConfigError naming what differs where the checkpoint at ``path`` is not of the run that ``now`` identifies."""
    before = scalars.get("run")
    if not isinstance(before, dict):
        raise ConfigError(f"{path} holds weights alone: set model.hf or start a new run from it, it cannot be resumed")
    wrong = [
        f"{name} was {json.dumps(before.get(name))}, is {json.dumps(now.get(name))}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]
    if wrong:
        raise ConfigError(
            f"{path} is of another run: {'; '.join(wrong)}. What may change: [plan], [optimizer], [run], [checkpoint], "
            "train.steps and what is measured"
        )


def state_shapes(setup: Setup, *, updates: bool = True) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a run's state. ``updates``: whether there was one, so that there are moments."""
    model = setup.model
    shapes = {f"weights/{name}": shape for name, shape in parameter_shapes(model).items()}
    if updates:
        shapes |= {f"{moment}/{name}": shape for moment in MOMENTS for name, shape in trained_shapes(setup).items()}
    for layer in range(model.num_layers):
        moe = model.moe_of(layer)
        if moe is not None:
            shapes[f"router/layers.{layer}.share"] = (moe.num_experts,)
    return shapes


def expected(setup: Setup, checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor to be read; WeightsError where ``checkpoint`` lacks one, or holds what it should not."""
    trained, shapes = trained_shapes(setup), state_shapes(setup, updates=bool(checkpoint.scalars["updates"]))
    previous = {f"previous/{name}": shape for name, shape in trained.items()}
    held = {name for name in checkpoint.names if not name.startswith("own/")}
    both = shapes if held.isdisjoint(previous) else shapes | previous
    for name in sorted(both.keys() ^ held):
        what = f"holds no {name}" if name in both else f"holds {name}, which this model does not have"
        raise WeightsError(f"{checkpoint.path} {what}")
    for name, shape in both.items():
        if checkpoint.shape(name) != shape:
            have = list(checkpoint.shape(name))
            raise WeightsError(f"{checkpoint.path} holds {name} as {have}, this model has it as {list(shape)}")
    # A plan with one version of the weights leaves the other one.
    return both if setup.plan.schedule == "2bw" else shapes
