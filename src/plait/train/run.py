"""What a run is made of: a `Config`, checked against the world it runs in, and the objects that follow from it.

Nothing here imports torch before it is asked for samples, weights or the cut model: bad input is refused, and a plan
shown, without it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.core.compression import Compression
from plait.core.config import Config, check_paths
from plait.core.errors import ConfigError, PlanError
from plait.core.fields import nearest_names
from plait.core.legal import check
from plait.core.plan import Plan
from plait.core.sections import MoESection
from plait.models.config import PRESETS, ModelConfig, parameter_shapes
from plait.models.families import from_hf
from plait.parallel.layout import build_schedule, model_shape
from plait.train.launch import placed
from plait.train.tokens import token_path

if TYPE_CHECKING:
    import torch

    from plait.comm.world import World
    from plait.models.batch import Batch
    from plait.models.init import WeightSource
    from plait.parallel.apply import Parallel
    from plait.train.data import Samples


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A run that can work: ``plan`` has its dp, and was checked for ``model``, batch, sequence and world size."""

    config: Config
    model: ModelConfig
    plan: Plan
    world_size: int

    @property
    def dp(self) -> int:
        """Copies of the model."""
        assert self.plan.dp is not None
        return self.plan.dp

    @property
    def share(self) -> int:
        """Samples of a step that each copy of the model sees."""
        return self.config.train.global_batch // self.dp

    @property
    def microbatches(self) -> int:
        """Microbatches of a step on each copy."""
        return self.share // self.plan.micro

    def rows(self, dp_index: int) -> list[range]:
        """Rows of the global batch in each microbatch of copy ``dp_index``."""
        first, micro = dp_index * self.share, self.plan.micro
        return [range(at, at + micro) for at in range(first, first + self.share, micro)]


def prepare(config: Config, *, world_size: int | None = None) -> Setup:
    """Everything about ``config`` that can be checked before a process starts.

    ``world_size``: None is the launcher's, or else run.processes, or else what the plan needs. ConfigError for files
    and model keys that do not fit, PlanError for a plan that cannot work.
    """
    check_paths(config)
    if config.auto is not None:
        raise ConfigError("[plan] auto = true: the plan is not made yet; plait.train.auto.planned(config) makes it")
    model = model_config(config)
    size = world_size if world_size is not None else _world_size(config)
    seq = config.data.seq
    check(config.plan, model_shape(model), world_size=size, global_batch=config.train.global_batch, seq=seq)
    _check_kept_back(config)
    _check_vocabulary(config, model)
    _check_frozen(config, model)
    setup = Setup(config=config, model=model, plan=config.plan.resolve(size), world_size=size)
    if config.plan.schedule_file is not None:
        build_schedule(setup.plan, setup.microbatches)
    return setup


def model_config(config: Config) -> ModelConfig:
    """The model that ``[model]`` describes: preset or Hugging Face folder, with the section's own keys over it."""
    section = config.model
    base: dict[str, Any] = {}
    try:
        if section.hf is not None:
            base = from_hf(json.loads((section.hf / "config.json").read_text(encoding="utf-8"))).to_mapping()
        elif section.preset is not None:
            if section.preset not in PRESETS:
                known = nearest_names(section.preset, PRESETS)
                raise ConfigError(f"[model] preset = {section.preset!r}: no such preset; {known}")
            base = PRESETS[section.preset].to_mapping()
        if base and "head_dim" not in section.fields and {"hidden_size", "num_heads"} & set(section.fields):
            base["head_dim"] = 0  # follows from the sizes that were given
        return _with_choices(ModelConfig.from_mapping({**base, **section.fields}), config.moe)
    except ConfigError:
        raise
    except (OSError, KeyError, TypeError, ValueError) as error:
        source = f"{section.hf / 'config.json'}: " if section.hf is not None else ""
        raise ConfigError(f"[model] {source}{error}") from error


def _with_choices(model: ModelConfig, section: MoESection) -> ModelConfig:
    """``model`` trained as ``[moe]`` says."""
    if model.moe is None:
        if section != MoESection():
            raise ConfigError("[moe] is for models with experts, and this one has none: leave the section out")
        return model
    chosen = dataclasses.replace(
        model.moe,
        capacity_factor=section.capacity_factor,
        drop=section.drop,
        aux_loss=section.aux_loss,
        z_loss=section.z_loss,
        bias=model.moe.bias or section.bias_balance,
        bias_balance=section.bias_balance,
        bias_rate=section.bias_rate,
    )
    return dataclasses.replace(model, moe=chosen)


def claim_folder(config: Config) -> Config:
    """``config`` with its run folder made, absolute, and this run's alone; ConfigError says what stands in the way.

    A run that resumes takes the folder as it is.
    """
    if config.run.resume and config.run.dir is None:
        raise ConfigError("run.resume=true needs run.dir: the folder of the run to go on with")
    folder = config.run.dir or Path.cwd() / "runs" / time.strftime("%Y-%m-%d-%H%M%S")
    taken = [name for name in ("config.toml", "metrics.jsonl", "weights") if (folder / name).exists()]
    if config.run.dir is not None and taken and not config.run.resume:
        raise ConfigError(
            f"run.dir = {folder} already holds a run ({taken[0]}): plait train --resume {folder} goes on with it; "
            "else name another folder, or remove it"
        )
    try:
        folder = _new_folder(folder) if config.run.dir is None else folder
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{os.getpid()}.tmp"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"run.dir = {folder} cannot be written: {error.strerror}") from error
    return dataclasses.replace(config, run=dataclasses.replace(config.run, dir=Path(os.path.abspath(folder))))


def _new_folder(wanted: Path) -> Path:
    """Make ``wanted``, or else ``wanted-2`` and so on: the first that no run before, or at the same time, has made."""
    folder, number = wanted, 1
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
            folder = wanted.with_name(f"{wanted.name}-{number}")


def open_samples(setup: Setup) -> Samples:
    """The samples of the run. Text is made into tokens once and kept in the cache folder."""
    from plait.train.data import Samples, TokenFile

    config, model = setup.config, setup.model
    file = TokenFile.open(token_path(config))
    if file.vocab_size > model.vocab_size:
        raise ConfigError(
            f"{file.path} has a vocabulary of {file.vocab_size}, the model one of {model.vocab_size}: "
            f"set model.vocab_size={file.vocab_size}, or take tokens made for this model"
        )
    return Samples(
        file,
        seq=config.data.seq,
        global_batch=config.train.global_batch,
        seed=config.train.seed,
        shuffle=config.data.shuffle,
        held_out=config.data.held_out,
        separator=config.data.separator,
        vocab_size=model.vocab_size,
    )


def weight_source(setup: Setup) -> WeightSource:
    """Where the first weights come from: the Hugging Face folder, or drawn by (seed, name)."""
    from plait.checkpoint.hf import HFFolder
    from plait.models.init import InitSource

    hf = setup.config.model.hf
    if hf is None:
        return InitSource(setup.model, setup.config.train.seed)
    folder = HFFolder(hf)
    have, want = parameter_shapes(folder.config), parameter_shapes(setup.model)
    wrong = [name for name in want if have.get(name) != want[name]]
    if wrong:
        raise ConfigError(
            f"[model] its keys make {wrong[0]} {list(want[wrong[0]])}, {hf} holds {list(have.get(wrong[0], ()))}: "
            "leave the sizes to the folder"
        )
    return folder


def build(setup: Setup, world: World) -> Parallel:
    """The model on this rank, cut and filled."""
    import torch

    from plait.models.decoder import Decoder
    from plait.parallel.apply import parallelize

    with torch.device("meta"):
        model = Decoder(setup.model, seed=setup.config.train.seed)
    for name in frozen_names(setup.config, setup.model):
        model.get_parameter(name).requires_grad_(False)
    movable = setup.config.moe.placement == "load"
    return parallelize(model, setup.plan, world, weights=weight_source(setup), movable_experts=movable)


def frozen_names(config: Config, model: ModelConfig) -> list[str]:
    """Parameters that ``train.freeze`` names."""
    patterns = config.train.freeze
    return [name for name in parameter_shapes(model) if any(fnmatchcase(name, pattern) for pattern in patterns)]


def trained_shapes(setup: Setup) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters that have a gradient, in forward order. A router's bias is moved, and has none."""
    frozen = set(frozen_names(setup.config, setup.model))
    shapes = parameter_shapes(setup.model)
    return {name: shape for name, shape in shapes.items() if name not in frozen and not name.endswith(".router.bias")}


def microbatches(setup: Setup, samples: Samples, step: int, dp_index: int, device: torch.device) -> list[Batch]:
    """The microbatches of ``step`` on copy ``dp_index``, in order."""
    return [to_device(samples.batch(step, rows), device) for rows in setup.rows(dp_index)]


def to_device(batch: Batch, device: torch.device) -> Batch:
    """``batch`` with its tensors on ``device``."""
    return dataclasses.replace(
        batch,
        tokens_BT=batch.tokens_BT.to(device),
        targets_BT=batch.targets_BT.to(device),
        sample_B=batch.sample_B.to(device),
        positions_BT=None if batch.positions_BT is None else batch.positions_BT.to(device),
        documents_BT=None if batch.documents_BT is None else batch.documents_BT.to(device),
    )


def _world_size(config: Config) -> int:
    place = placed()
    if place is not None:
        return place.world_size
    plan = config.plan
    # A plan with a size below 1 is refused by name afterwards, whatever stands here.
    return config.run.processes or max(1, plan.tp * plan.pp * plan.cp * (plan.dp or 1))


def _check_vocabulary(config: Config, model: ModelConfig) -> None:
    """What can be known of the data's vocabulary without reading it."""
    data, size = config.data, 256
    if data.tokens is not None:
        try:
            size = int(json.loads(data.tokens.with_suffix(".json").read_text(encoding="utf-8"))["vocab_size"])
        except (OSError, ValueError, KeyError, TypeError):
            return  # `open_samples` says what is wrong with the file
    elif data.text is not None and data.tokenizer != "bytes":
        return
    if size > model.vocab_size:
        source = data.tokens or f"text as {data.tokenizer}"
        raise ConfigError(
            f"[data] {source} has a vocabulary of {size}, the model one of {model.vocab_size}: "
            f"set model.vocab_size={size}, or take data made for this model"
        )
    if data.separator is not None and data.separator >= model.vocab_size:
        raise ConfigError(f"[data] separator = {data.separator}: the model's tokens are 0 .. {model.vocab_size - 1}")


def _check_kept_back(config: Config) -> None:
    """What compression keeps back of gradients stays on its rank: what they are of must stay there too."""
    plan, every = config.plan, config.run.rebalance
    if not Compression.parse(plan.compress).feedback:
        return
    for moves, key, what, works in (
        (config.moe.placement == "load" and plan.ep > 1, "[moe] placement=load", "experts", "placement=static"),
        (every > 0 and plan.pp > 1, f"[run] rebalance={every}", "layers", "rebalance=0"),
    ):
        if moves:
            raise PlanError(
                f"{key} with compress={plan.compress}: what it keeps back does not move with the {what}; what works: "
                f"{works}, or compress=half"
            )


def _check_frozen(config: Config, model: ModelConfig) -> None:
    names = list(parameter_shapes(model))
    for pattern in config.train.freeze:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"[train] freeze: {pattern!r} names no parameter; {nearest_names(pattern, names)}")
    if len(frozen_names(config, model)) == len(names):
        raise ConfigError("[train] freeze leaves nothing to train")
