"""``plait verify``: a few steps under the plan and on one process, from the same weights and batches, side by side.

The one process is what `plait.models` alone makes: torch's autograd, clipping and AdamW on whole tensors, in fp32; it
knows nothing of plans. The ranks do the trainer's own steps; after each they write the gradients and weights that they
own to folders of plait weights. The one process takes each step from the plan's weights, and its optimizer gets the
plan's gradients: so every step is compared at the same point. (Two free runs drift apart by more than any bug: Adam's
first updates are ``lr * sign(gradient)``, and the sign of a gradient smaller than its rounding error is anyone's.)
`plait.train.compare` says what of the difference rounding explains.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from plait.checkpoint.store import WeightFolder
from plait.core.compression import Compression
from plait.core.config import Config, dump, loads
from plait.core.errors import PlanError
from plait.models.decoder import Decoder
from plait.models.init import WeightSource
from plait.train.compare import WIRE, Step, compare
from plait.train.exchange import gather_json, make_tokens, shared_folder, write_stretches
from plait.train.folder import private
from plait.train.launch import Worker, launch, placed
from plait.train.reference import Probe, one_process, watch
from plait.train.run import Setup, build, open_samples, prepare, trained_shapes, weight_source
from plait.train.step import Steps
from plait.train.trainer import check_device
from plait.train.verify_table import document, show

PROJECTIONS = 4
"""Random projections of a layer's activations; their mean square error is within a factor of two of the true one."""


def run(config: Config, *, steps: int = 3, as_json: bool = False) -> int:
    """Compare the plan with one process over ``steps``, print the report, and return 0 when all is within tolerance.

    Else returns 1. Starts the plan's workers, or is one of them under a launcher, where rank 0 reports. Errors are
    those of a training run: ConfigError and PlanError before anything starts, RankError when a rank fails.
    """
    setup = prepare(config)
    if Compression.parse(setup.plan.compress).feedback:
        raise PlanError(
            f"compress={setup.plan.compress} leaves out parts of gradients on purpose: there is nothing to hold them "
            "to; what works: verify the plan with compress=none or compress=half"
        )
    place = placed()
    if place is None:
        check_device(config.run.device, setup.world_size, setup.plan.precision)
        open_samples(setup)  # text becomes tokens once, and data that cannot serve is refused here
    reports = place is None or place.rank == 0
    if reports and not as_json:
        Console(highlight=False).print(f"[bold]{setup.plan}[/], {setup.world_size} ranks, {steps} steps ...")
    with private("plait-verify-") as folder:
        launch(
            "plait.train.verify:run_rank",
            processes=setup.world_size,
            args=[dump(config), steps, str(folder)],
            device=config.run.device,
            timeout=config.run.timeout,
            threads=config.run.threads,
        )
        if not reports:
            return 0
        report = compare(
            one_process(setup, folder, steps),
            stored_steps(setup, folder),
            trained_shapes(setup),
            precision=setup.plan.precision,
            wire=WIRE if setup.plan.compress == "half" else 0.0,
            layers=setup.model.num_layers,
        )
    if as_json:
        print(json.dumps(document(report, setup.plan), allow_nan=False))
    else:
        show(report, Console(highlight=False))
    return 0 if report.passed else 1


def run_rank(worker: Worker, text: str, steps: int, folder: str) -> None:
    """One rank: the trainer's steps. Step k leaves ``k/gradients`` and ``k/weights`` in rank 0's ``folder``."""
    config = loads(text)
    setup = prepare(config, world_size=worker.place.world_size)
    world = worker.connect(setup.plan.mesh(setup.world_size))
    # Ranks that another launcher started have each their own folder.
    home = shared_folder(world, Path(folder), "TMPDIR")
    make_tokens(setup, world, worker.place.local_rank)
    parallel, samples, probe = build(setup, world), open_samples(setup), Probe(setup.config.data.seq)
    taking = Steps(setup, parallel, samples, steps)
    tp, zero, names = world.at["tp"], parallel.zero, trained_shapes(setup)
    if setup.plan.sp or tp == 0:
        for stage in parallel.stages:
            watch(probe, cast(Decoder, stage.module), (tp, setup.plan.tp) if setup.plan.sp else (0, 1))
    rows = []
    for step in range(steps):
        taken = taking.take(step)
        while taken.skipped:  # fp16's scale finds its size; no weight has changed
            probe.take(step)
            taken = taking.take(step)
        seen = {str(layer): stats.tolist() for layer, stats in taken.routers.items()}
        hidden = _sum(gather_json(world, probe.take(step)))
        rows.append({"loss": taken.loss, "norm": taken.norm, "hidden": hidden, "routers": seen})
        for kind, stretches in (("gradients", zero.gradients()), ("weights", zero.masters())):
            write_stretches(home / str(step) / kind, world, setup.model, setup.plan.zero, stretches, names)
    if world.rank == 0:
        (home / "steps.json").write_text(json.dumps(rows), encoding="utf-8")
    world.close()


def stored_steps(setup: Setup, folder: Path) -> Iterator[Step]:
    """What `run_rank` left in ``folder``, its clipping undone."""
    before = weight_source(setup)
    for number, row in enumerate(json.loads((folder / "steps.json").read_text(encoding="utf-8"))):
        gradients, after = (WeightFolder(folder / str(number) / kind) for kind in ("gradients", "weights"))
        yield _stored_step(row, gradients, before, after, clip_factor(row["norm"], setup.config.optimizer.clip))
        before = after


def _stored_step(
    row: Mapping[str, Any], gradients: WeightFolder, before: WeightSource, after: WeightFolder, clipped: float
) -> Step:
    return Step(
        loss=row["loss"],
        norm=row["norm"],
        hidden=row["hidden"],
        gradient=lambda name: gradients.read(name) / clipped,
        weight=before.read,
        update=lambda name: after.read(name) - before.read(name).float(),
        rounding={},
    )


def clip_factor(norm: float, clip: float) -> float:
    """What the trainer multiplied the gradients with."""
    return clip / (norm + 1e-6) if clip and norm > clip else 1.0


def _sum(ranks: Sequence[object]) -> dict[str, list[float]]:
    """The ranks' sums, added, in forward order."""
    total: dict[str, list[float]] = {}
    for sums in cast("list[Mapping[str, list[float]]]", ranks):
        for name, row in sums.items():
            total[name] = [a + b for a, b in zip(total.get(name, [0.0] * len(row)), row, strict=True)]
    return total
