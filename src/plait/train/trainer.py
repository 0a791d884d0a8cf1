"""The training loop: what every rank does, step by step. `start` is what ``plait train`` calls."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import torch
from rich.console import Console

from plait.comm.world import World
from plait.core.config import Config, dump, loads
from plait.core.errors import ConfigError, PlanError, RankError
from plait.parallel.apply import Parallel
from plait.parallel.precision import LEAST_SCALE, LossScale, fp8_reason
from plait.telemetry.record import EVAL_KEY, Metrics, Recorder, write_trace
from plait.train.data import Samples
from plait.train.exchange import make_tokens, shared_folder, write_weights
from plait.train.launch import Place, Worker, launch, placed
from plait.train.measure import Meter, device_facts
from plait.train.progress import Progress, heading
from plait.train.run import Setup, build, claim_folder, open_samples, prepare, to_device
from plait.train.step import Steps, Taken


def start(config: Config, *, as_json: bool = False) -> None:
    """Check ``config``, claim its run folder, start the ranks (or join them), and train.

    ConfigError and PlanError for what cannot work, before a process starts; RankError, with the failing rank's own
    traceback and exit code, for what fails later.
    """
    setup = prepare(config)
    place = placed()
    if place is None:
        check_device(config.run.device, setup.world_size, setup.plan.precision)
    if place is None or place.rank == 0:
        config = claim_folder(config)
        setup = dataclasses.replace(setup, config=config)
        if not as_json:
            Console(highlight=False).print(heading(setup), soft_wrap=True)
        if place is None:
            open_samples(setup)  # text becomes tokens once, and data that cannot serve is refused here
    launch(
        "plait.train.trainer:run_rank",
        processes=setup.world_size,
        args=[dump(config), as_json],
        device=config.run.device,
        timeout=config.run.timeout,
        threads=config.run.threads,
    )


def check_device(device: str, ranks: int, precision: str) -> None:
    """ConfigError or PlanError, before a process starts, where ``ranks`` local ranks cannot each have the device asked
    for, or cannot compute on it in ``precision``."""
    place = Place(rank=0, local_rank=0, world_size=ranks, local_size=ranks)
    found = Worker(place=place, device=device, timeout=0.0).torch_device()
    reason = fp8_reason(found) if precision == "fp8" else None
    if reason is not None:
        raise PlanError(reason)


def run_rank(worker: Worker, text: str, as_json: bool) -> None:
    """One rank of a run: join the others, train, leave."""
    config = loads(text)
    setup = prepare(config, world_size=worker.place.world_size)
    world = worker.connect(setup.plan.mesh(setup.world_size))
    # Ranks that another launcher started had no common way to name the folder: it is rank 0's.
    folder = shared_folder(world, config.run.dir, "run.dir")
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, dir=folder))
    setup = dataclasses.replace(setup, config=config)
    make_tokens(setup, world, worker.place.local_rank)
    train(setup, world, as_json=as_json)
    world.close()


def train(setup: Setup, world: World, *, as_json: bool = False) -> None:
    """Train as ``setup`` says on the ranks of ``world``, and leave the run folder ``setup.config.run.dir``."""
    config, folder = setup.config, setup.config.run.dir
    assert folder is not None, "claim_folder names it"
    samples = open_samples(setup)
    parallel = build(setup, world)
    recorder = Recorder(world.rank)
    world.book.sink = recorder.add
    facts = device_facts(setup, world.device)
    peak = facts["peak_flops"]
    meter = Meter(setup, parallel, recorder, peak if isinstance(peak, float) else None)
    chief = world.rank == 0
    if chief:
        write_facts(setup, folder, facts)
    trace_step = min(config.train.trace_step, config.train.steps - 1)
    lines = folder / "metrics.jsonl" if chief else None
    with Metrics(lines) as metrics, Progress(setup, shown=chief, as_json=as_json) as show:
        steps = Steps(setup, parallel, samples, config.train.steps)
        for step in range(config.train.steps):
            meter.start()
            taken = steps.take(step)
            row = meter.finish(step, taken)
            if hopeless(taken, steps.scale):
                metrics.write(row)
                raise diverged(step, taken)
            if step == trace_step:
                events = meter.events()
                if chief:
                    write_trace(folder / "trace.json", events)
            if config.train.eval_every and (step + 1) % config.train.eval_every == 0:
                row[EVAL_KEY] = evaluate(setup, parallel, samples)
            metrics.write(row)
            show.update(row)
        write_weights(folder / "weights", world, setup.model, parallel.zero)
        show.done(folder)


@torch.no_grad()
def evaluate(setup: Setup, parallel: Parallel, samples: Samples) -> float:
    """Mean loss of the held-out samples: sum of token losses / number of targets, whatever the cut."""
    world = parallel.world
    number = min(setup.config.train.eval_batches, samples.eval_steps)
    schedule = parallel.schedule(setup.microbatches, evaluation=True)
    total = torch.zeros((), device=world.device)
    parallel.prepare()
    loaders = [samples.eval_batches(number, rows) for rows in setup.rows(world.at["dp"])]
    for batches in zip(*loaders, strict=True):
        local = [parallel.local(to_device(batch, world.device)) for batch in batches]
        total += parallel.executor.run(schedule, local.__getitem__, count=1, sink=world.book.sink)
    targets = sum(samples.eval_target_count(index) for index in range(number))
    return float(parallel.share_loss(total)[0]) / max(targets, 1)


def hopeless(taken: Taken, scale: LossScale | None) -> bool:
    """Whether to stop: loss or norm are not finite, and no loss scale can be to blame."""
    if math.isfinite(taken.loss) and math.isfinite(taken.norm):
        return False
    return scale is None or not math.isfinite(taken.loss) or (taken.skipped and taken.loss_scale == LEAST_SCALE)


def diverged(step: int, taken: Taken) -> RankError:
    """What every rank raises then: all see the same numbers, so all stop."""
    return RankError(
        f"step {step}: the loss is {taken.loss}, the gradient norm {taken.norm}: training has diverged. "
        "What helps: a lower optimizer.lr, a longer optimizer.warmup, optimizer.clip=1, plan.precision=fp32"
    )


def write_facts(setup: Setup, folder: Path, facts: dict[str, object]) -> None:
    """``config.toml``, ``plan.toml`` (with its dp) and ``device.json`` of a run."""
    texts = {
        "config.toml": dump(setup.config),
        "plan.toml": setup.plan.to_toml(),
        "device.json": json.dumps({"ranks": setup.world_size, **facts}, indent=1) + "\n",
    }
    try:
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"run.dir = {folder} cannot be written: {error}") from error
