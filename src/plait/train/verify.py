"""``plait verify``: a few steps under the plan and on one process, from the same weights and batches, side by side.

The one process is what `plait.models` alone makes: torch's autograd, clipping and AdamW on whole tensors, in fp32; it
knows nothing of plans. The ranks do the trainer's own steps; each writes the reduced gradients it owns to a folder of
plait weights. `plait.train.compare` says what of the difference rounding explains.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, final

import torch
from rich.console import Console
from torch import Tensor, nn

from plait.checkpoint.store import WeightFolder
from plait.core.config import Config, dump, loads
from plait.models.batch import Batch
from plait.models.config import parameter_shapes
from plait.models.decoder import Decoder
from plait.models.init import initialise
from plait.train.compare import Step, compare
from plait.train.exchange import gather_json, write_stretches
from plait.train.launch import Place, Worker, launch, placed
from plait.train.run import Setup, build, frozen_names, open_samples, prepare, to_device, weight_source
from plait.train.trainer import make_optimizer, rate_of, train_step
from plait.train.verify_table import document, show

PROJECTIONS = 4
"""Random projections of a layer's activations; their mean square error is within a factor of two of the true one."""


@final
class Probe:
    """Sums over all rows of the activations after the embedding and each layer: what `compare` takes as ``hidden``.

    Row n of sample s has weight ``cos(w * (s T + n))``, feature d ``cos(v * (d + 1))``, with irrational frequencies:
    fixed vectors that are as good as random, and the same for every cut.
    """

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = {}

    def watch(self, name: str, module: nn.Module, cut: tuple[int, int]) -> None:
        """Follow a module that gives hidden rows: the ``cut[0]``-th of ``cut[1]`` equal runs of its batch's rows."""

        def seen(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            row = self._project(out.detach(), args[-1], cut)
            old = self.sums.get(name, [0.0] * len(row))
            self.sums[name] = [a + b for a, b in zip(old, row, strict=True)]

        module.register_forward_hook(seen)

    def take(self) -> dict[str, list[float]]:
        """What has been seen since the last call."""
        sums, self.sums = self.sums, {}
        return sums

    def _project(self, h_ND: Tensor, batch: Batch, cut: tuple[int, int]) -> list[float]:
        seq = batch.tokens_BT.shape[1]
        place = batch.sample_B[:, None] * seq + torch.arange(seq, device=h_ND.device)
        mine = place.flatten().chunk(cut[1])[cut[0]].double()
        frequencies = torch.tensor([2.0, 3.0, 5.0, 7.0], dtype=torch.float64, device=h_ND.device).sqrt()[:PROJECTIONS]
        rows_NP = (mine[:, None] * frequencies).cos()
        features = torch.arange(1, h_ND.shape[1] + 1, dtype=torch.float64, device=h_ND.device)
        features_DP = (features[:, None] * frequencies.flip(0)).cos()
        h = h_ND.double()
        projected = 2 * ((h @ features_DP) * rows_NP).sum(0)
        return [float(h.square().sum()), *map(float, projected)]


def run(config: Config, *, steps: int = 3, as_json: bool = False) -> int:
    """Compare the plan with one process over ``steps``, print the report, and return 0 when all is within tolerance.

    Else returns 1. Starts the plan's workers, or is one of them under a launcher, where rank 0 reports. Errors are
    those of a training run: ConfigError and PlanError before anything starts, RankError when a rank fails.
    """
    setup = prepare(config)
    open_samples(setup)  # text becomes tokens here once, not in every rank
    place = placed()
    reports = place is None or place.rank == 0
    if reports and not as_json:
        Console(highlight=False).print(f"[bold]{setup.plan}[/], {setup.world_size} ranks, {steps} steps ...")
    with tempfile.TemporaryDirectory(prefix="plait-verify-") as folder:
        launch(
            "plait.train.verify:run_rank",
            processes=setup.world_size,
            args=[dump(config), steps, folder],
            device=config.run.device,
            timeout=config.run.timeout,
            threads=config.run.threads,
        )
        if not reports:
            return 0
        report = compare(
            one_process(setup, steps),
            stored_steps(setup, Path(folder)),
            trained_shapes(setup),
            precision=setup.plan.precision,
            layers=setup.model.num_layers,
        )
    if as_json:
        print(json.dumps(document(report, setup.plan), allow_nan=False))
    else:
        show(report, Console(highlight=False))
    return 0 if report.passed else 1


def trained_shapes(setup: Setup) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters that have a gradient, in forward order."""
    frozen = set(frozen_names(setup.config, setup.model))
    return {name: shape for name, shape in parameter_shapes(setup.model).items() if name not in frozen}


def run_rank(worker: Worker, text: str, steps: int, folder: str) -> None:
    """One rank: the trainer's steps. Gradients of step k go to ``k/`` of rank 0's ``folder``, numbers to steps.json."""
    config = loads(text)
    setup = prepare(config, world_size=worker.place.world_size)
    world = worker.connect(setup.plan.mesh(setup.world_size))
    # Ranks that another launcher started have each their own folder.
    home = Path(str(gather_json(world, folder)[0]))
    parallel, samples, probe = build(setup, world), open_samples(setup), Probe()
    optimizer = make_optimizer(config, parallel)
    tp = world.at["tp"]
    if setup.plan.sp or tp == 0:
        for stage in parallel.stages:
            _watch(probe, cast(Decoder, stage.module), (tp, setup.plan.tp) if setup.plan.sp else (0, 1))
    rows = []
    for step in range(steps):
        loss, norm = train_step(setup, parallel, samples, optimizer, step, rate_of(config, step))
        rows.append({"loss": loss, "norm": norm, "hidden": _sum(gather_json(world, probe.take()))})
        gradients = parallel.zero.gradients()
        write_stretches(home / str(step), world, setup.model, setup.plan.zero, gradients, trained_shapes(setup))
    if world.rank == 0:
        (home / "steps.json").write_text(json.dumps(rows), encoding="utf-8")
    world.close()


def stored_steps(setup: Setup, folder: Path) -> Iterator[Step]:
    """What `run_rank` left in ``folder``, its clipping undone."""
    for number, row in enumerate(json.loads((folder / "steps.json").read_text(encoding="utf-8"))):
        weights, factor = WeightFolder(folder / str(number)), clip_factor(row["norm"], setup.config.optimizer.clip)
        yield Step(
            loss=row["loss"],
            norm=row["norm"],
            hidden=row["hidden"],
            gradient=lambda name, weights=weights, factor=factor: weights.read(name) / factor,  # type: ignore[misc]
        )


def one_process(setup: Setup, steps: int) -> Iterator[Step]:
    """The reference: the same steps on whole tensors. A step's gradients are there until the next one is asked for."""
    config = setup.config
    place = Place(rank=0, local_rank=0, world_size=1)
    device = Worker(place=place, device=config.run.device, timeout=config.run.timeout).torch_device()
    model = Decoder(setup.model, seed=config.train.seed)
    initialise(model, weight_source(setup))
    model.to(device)
    for name in frozen_names(config, setup.model):
        model.get_parameter(name).requires_grad_(False)
    trained = {name: model.get_parameter(name) for name in trained_shapes(setup)}
    optimizer = _plain_adamw(config, list(trained.values()))
    samples, probe = open_samples(setup), Probe()
    _watch(probe, model, (0, 1))

    def gradient(name: str) -> Tensor:
        grad = trained[name].grad
        return torch.zeros(trained[name].shape) if grad is None else grad.cpu()

    for step in range(steps):
        optimizer.zero_grad()
        total, count = 0.0, max(samples.target_count(step), 1)
        for first in range(0, config.train.global_batch, setup.plan.micro):
            batch = to_device(samples.batch(step, range(first, first + setup.plan.micro)), device)
            loss = model.loss(model(None, batch), batch.targets_BT.flatten()) / count
            loss.backward()
            total += float(loss.detach())
        # In fp64: the fp32 norm of a large tensor is off by 1e-4 and more on CPU.
        norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in trained.values() if p.grad is not None))
        yield Step(loss=total, norm=norm, hidden=probe.take(), gradient=gradient)
        if config.optimizer.clip:
            whole = torch.tensor(norm, device=device)
            torch.nn.utils.clip_grads_with_norm_(trained.values(), config.optimizer.clip, whole)
        for group in optimizer.param_groups:
            group["lr"] = rate_of(config, step)
        optimizer.step()


def clip_factor(norm: float, clip: float) -> float:
    """What the trainer multiplied the gradients with."""
    return clip / (norm + 1e-6) if clip and norm > clip else 1.0


def _watch(probe: Probe, model: Decoder, cut: tuple[int, int]) -> None:
    if model.embed is not None:
        probe.watch("embed", model.embed, cut)
    for index, block in model.layers.items():
        probe.watch(f"layers.{index}", block, cut)


def _sum(ranks: Sequence[object]) -> dict[str, list[float]]:
    """The ranks' sums, added, in forward order."""
    total: dict[str, list[float]] = {}
    for sums in cast("list[Mapping[str, list[float]]]", ranks):
        for name, row in sums.items():
            total[name] = [a + b for a, b in zip(total.get(name, [0.0] * len(row)), row, strict=True)]
    return total


def _plain_adamw(config: Config, trained: Sequence[nn.Parameter]) -> torch.optim.AdamW:
    section = config.optimizer
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=section.lr, betas=section.betas, eps=section.eps
    )
