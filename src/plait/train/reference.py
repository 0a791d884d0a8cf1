"""The one process that ``plait verify`` holds a plan to: torch's autograd and AdamW on whole tensors, in fp32."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from plait.checkpoint.store import WeightFolder
from plait.core.config import Config
from plait.models.batch import Batch
from plait.models.decoder import Decoder
from plait.models.init import WeightSource, initialise
from plait.models.moe import end_step, routers
from plait.models.router import unrecorded
from plait.schedule.windows import version_of
from plait.train.compare import ROUNDOFF, Step, hidden_distance
from plait.train.launch import Place, Worker, placed
from plait.train.run import Setup, frozen_names, open_samples, to_device, trained_shapes, weight_source
from plait.train.step import rate_of

PROJECTIONS = 4
"""Random projections of a layer's activations; their mean square error is within a factor of two of the true one."""


@final
class Probe:
    """Sums over all rows of the activations after the embedding and each layer: what `compare` takes as ``hidden``.

    Row n of sample s (T its length) has weight ``cos(w * (s T + n))``, feature d ``cos(v * (d + 1))``, with irrational
    frequencies: fixed vectors that are as good as random, and the same for every cut.
    """

    def __init__(self, seq: int) -> None:
        self._seq = seq
        self.sums: dict[int, dict[str, list[float]]] = {}
        """By step: where steps overlap, those of two are under way."""

    def watch(self, name: str, module: nn.Module, cut: tuple[int, int]) -> None:
        """Follow a module that gives hidden rows: the ``cut[0]``-th of ``cut[1]`` equal runs of its batch's rows."""

        def seen(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            row = self._project(out.detach(), args[-1], cut)
            sums = self.sums.setdefault(args[-1].step, {})
            sums[name] = [a + b for a, b in zip(sums.get(name, [0.0] * len(row)), row, strict=True)]

        module.register_forward_hook(seen)

    def take(self, step: int) -> dict[str, list[float]]:
        """What has been seen of ``step`` since the last call."""
        return self.sums.pop(step, {})

    def _project(self, h_ND: Tensor, batch: Batch, cut: tuple[int, int]) -> list[float]:
        place = batch.sample_B[:, None] * self._seq + batch.indices_T()
        mine = place.flatten().chunk(cut[1])[cut[0]].double()
        real = batch.real_N()
        if real is not None:
            real = real.chunk(cut[1])[cut[0]]
            h_ND, mine = h_ND[real], mine[real]
        frequencies = torch.tensor([2.0, 3.0, 5.0, 7.0], dtype=torch.float64, device=h_ND.device).sqrt()[:PROJECTIONS]
        rows_NP = (mine[:, None] * frequencies).cos()
        features = torch.arange(1, h_ND.shape[1] + 1, dtype=torch.float64, device=h_ND.device)
        features_DP = (features[:, None] * frequencies.flip(0)).cos()
        h = h_ND.double()
        projected = 2 * ((h @ features_DP) * rows_NP).sum(0)
        return [float(h.square().sum()), *map(float, projected)]


def one_process(setup: Setup, folder: Path, steps: int) -> Iterator[Step]:
    """The reference, on whole tensors: each step from the weights, and its update by the gradients, in ``folder``."""
    config = setup.config
    # As many ranks on this host as the plan has here: the reference then computes on the device they chose.
    place = placed() or Place(rank=0, local_rank=0, world_size=1, local_size=setup.world_size)
    device = Worker(place=place, device=config.run.device, timeout=config.run.timeout).torch_device()
    model = Decoder(setup.model, seed=config.train.seed)
    # The weights after each step: the plan's.
    sources: list[WeightSource] = [weight_source(setup)]
    initialise(model, sources[0])
    model.to(device)
    for name in frozen_names(config, setup.model):
        model.get_parameter(name).requires_grad_(False)
    trained = {name: model.get_parameter(name) for name in trained_shapes(setup)}
    optimizer = _plain_adamw(config, list(trained.values()))
    reference = _Reference(setup, model, trained, device)
    rows = json.loads((folder / "steps.json").read_text(encoding="utf-8"))
    for step in range(steps):
        _set_weights(trained, sources[version_of(step) if setup.plan.schedule == "2bw" else step])
        plain = reference.forward_backward(step)
        _round_weights(trained, ROUNDOFF[setup.plan.precision], step)
        with unrecorded(model):
            rounded = reference.forward_backward(step)
        source = sources[step]
        _set_weights(trained, source)
        _take_step(optimizer, trained, WeightFolder(folder / str(step) / "gradients"), rate_of(config, step))
        for layer, router in routers(model).items():
            # The plan's loads, as its weights: both sides stay at the same point.
            end_step(router, torch.tensor(rows[step]["routers"][str(layer)], dtype=torch.float64, device=device))
        yield Step(
            loss=plain.loss,
            # In fp64: the fp32 norm of a large tensor is off by 1e-4 and more on CPU.
            norm=math.sqrt(sum(float(gradient.double().square().sum()) for gradient in plain.gradients.values())),
            hidden=plain.hidden,
            gradient=_on_cpu(plain.gradients),
            weight=source.read,
            update=_difference(trained, source),
            rounding=_distances(plain, rounded),
        )
        sources.append(WeightFolder(folder / str(step) / "weights"))


@final
class _Reference:
    """Forward and backward of whole global batches on one device."""

    def __init__(self, setup: Setup, model: Decoder, trained: Mapping[str, nn.Parameter], device: torch.device) -> None:
        self._setup = setup
        self._model = model
        self._trained = trained
        self._device = device
        self._samples = open_samples(setup)
        self._probe = Probe(setup.config.data.seq)
        watch(self._probe, model, (0, 1))

    def forward_backward(self, step: int) -> _Pass:
        """The step's loss, gradients and activations at the model's weights, in the plan's microbatches."""
        setup, model, samples = self._setup, self._model, self._samples
        size, micro = setup.config.train.global_batch, setup.plan.micro
        count, loss = max(samples.target_count(step), 1), 0.0
        for at in range(0, size, micro):
            batch = to_device(samples.batch(step, range(at, at + micro)), self._device)
            batch = dataclasses.replace(batch, total=size * setup.config.data.seq)
            part = model.loss(model(None, batch), batch.targets_BT.flatten()) / count
            part.backward()
            loss += float(part.detach())
        found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in self._trained.items()}
        model.zero_grad()
        return _Pass(loss=loss, gradients=found, hidden=self._probe.take(step))


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """One forward and backward of a global batch."""

    loss: float
    gradients: dict[str, Tensor]
    hidden: dict[str, list[float]]


def _distances(plain: _Pass, rounded: _Pass) -> dict[str, float]:
    """What `Step` calls ``rounding``."""
    gradients = {name: float((rounded.gradients[name] - one).double().norm()) for name, one in plain.gradients.items()}
    return gradients | {place: hidden_distance(rounded.hidden[place], one) for place, one in plain.hidden.items()}


@torch.no_grad()
def _round_weights(trained: Mapping[str, nn.Parameter], roundoff: float, step: int) -> None:
    """Every weight off by a share of up to ``roundoff``."""
    generator = torch.Generator().manual_seed(step)
    for parameter in trained.values():
        share = torch.rand(parameter.shape, generator=generator).mul_(2).sub_(1)
        parameter.addcmul_(parameter, share.to(parameter.device), value=roundoff)


@torch.no_grad()
def _set_weights(trained: Mapping[str, nn.Parameter], source: WeightSource) -> None:
    for name, parameter in trained.items():
        parameter.copy_(source.read(name))


def _take_step(
    optimizer: torch.optim.AdamW, trained: Mapping[str, nn.Parameter], gradients: WeightSource, lr: float
) -> None:
    """AdamW with the given gradients, which are clipped already."""
    for name, parameter in trained.items():
        parameter.grad = gradients.read(name).to(parameter.device)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()


def _on_cpu(gradients: Mapping[str, Tensor]) -> Callable[[str], Tensor]:
    return lambda name: gradients[name].cpu()


def _difference(trained: Mapping[str, nn.Parameter], before: WeightSource) -> Callable[[str], Tensor]:
    return lambda name: trained[name].detach().cpu() - before.read(name).float()


def watch(probe: Probe, model: Decoder, cut: tuple[int, int]) -> None:
    if model.embed is not None:
        probe.watch("embed", model.embed, cut)
    for index, block in model.layers.items():
        probe.watch(f"layers.{index}", block, cut)


def _plain_adamw(config: Config, trained: Sequence[nn.Parameter]) -> torch.optim.AdamW:
    section = config.optimizer
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=section.lr, betas=section.betas, eps=section.eps
    )
