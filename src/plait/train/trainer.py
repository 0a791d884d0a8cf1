"""The training loop: what every rank does, step by step. `start` is what ``plait train`` calls."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from time import perf_counter

import torch
from rich.console import Console

from plait.comm.world import World
from plait.core.config import Config, dump, loads
from plait.core.errors import ConfigError, RankError
from plait.parallel.apply import Parallel
from plait.telemetry.record import EVAL_KEY, Metrics, Recorder, write_trace
from plait.train.data import Samples
from plait.train.exchange import make_tokens, shared_folder, write_weights
from plait.train.launch import Place, Worker, launch, placed
from plait.train.measure import Meter, device_facts
from plait.train.optimizer import learning_rate
from plait.train.progress import Progress, heading
from plait.train.run import Setup, build, claim_folder, microbatches, open_samples, prepare, to_device


def start(config: Config, *, as_json: bool = False) -> None:
    """Check ``config``, claim its run folder, start the ranks (or join them), and train.

    ConfigError and PlanError for what cannot work, before a process starts; RankError, with the failing rank's own
    traceback and exit code, for what fails later.
    """
    setup = prepare(config)
    place = placed()
    if place is None:
        check_device(config.run.device, setup.world_size)
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


def check_device(device: str, ranks: int) -> None:
    """ConfigError, before a process starts, where ``ranks`` local ranks cannot each have the device asked for."""
    place = Place(rank=0, local_rank=0, world_size=ranks, local_size=ranks)
    Worker(place=place, device=device, timeout=0.0).torch_device()


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
    optimizer = make_optimizer(config, parallel)
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
        for step in range(config.train.steps):
            meter.start()
            lr = rate_of(config, step)
            loss, norm = train_step(setup, parallel, samples, optimizer, step, lr)
            row = meter.finish(step=step, loss=loss, grad_norm=norm, lr=lr)
            if not (math.isfinite(loss) and math.isfinite(norm)):
                metrics.write(row)
                raise diverged(step, loss, norm)
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


def train_step(
    setup: Setup, parallel: Parallel, samples: Samples, optimizer: torch.optim.AdamW | None, step: int, lr: float
) -> tuple[float, float]:
    """One step: forward and backward of all microbatches, clip, update; (loss, gradient norm before clipping)."""
    world, zero = parallel.world, parallel.zero
    batches = microbatches(setup, samples, step, world.at["dp"], world.device)
    count = samples.target_count(step)
    schedule = parallel.schedule(len(batches))
    loss_sum = parallel.executor.run(schedule, batches.__getitem__, count=count, sink=world.book.sink)
    zero.finish()
    # One collective for both: every rank then knows the same loss and norm.
    total, square = parallel.share_loss(loss_sum, zero.square_norm()).tolist()
    norm = math.sqrt(square)
    begin = perf_counter()
    clip = setup.config.optimizer.clip
    if clip and norm > clip:
        zero.scale_gradients(clip / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_ has it
    if optimizer is not None:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    zero.publish()
    world.book.sink("update", "optimizer", "clip, AdamW, publish", begin, perf_counter())
    return total / max(count, 1), norm


@torch.no_grad()
def evaluate(setup: Setup, parallel: Parallel, samples: Samples) -> float:
    """Mean loss of the held-out samples: sum of token losses / number of targets, whatever the cut."""
    world = parallel.world
    number = min(setup.config.train.eval_batches, samples.eval_steps)
    schedule = parallel.schedule(setup.microbatches, evaluation=True)
    total = torch.zeros((), device=world.device)
    loaders = [samples.eval_batches(number, rows) for rows in setup.rows(world.at["dp"])]
    for batches in zip(*loaders, strict=True):
        local = [to_device(batch, world.device) for batch in batches]
        total += parallel.executor.run(schedule, local.__getitem__, count=1, sink=world.book.sink)
    targets = sum(samples.eval_target_count(index) for index in range(number))
    return float(parallel.share_loss(total)[0]) / max(targets, 1)


def make_optimizer(config: Config, parallel: Parallel) -> torch.optim.AdamW | None:
    """AdamW over this rank's flat shards, decay on tensors of two or more dims only. None: nothing trains here."""
    decay, rest = parallel.zero.optimizer_groups()
    kinds = [(decay, config.optimizer.weight_decay), (rest, 0.0)]
    groups = [{"params": parameters, "weight_decay": share} for parameters, share in kinds if parameters]
    if not groups:
        return None
    settings = config.optimizer
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)


def rate_of(config: Config, step: int) -> float:
    """The learning rate of ``step``."""
    settings = config.optimizer
    return learning_rate(
        step,
        schedule=settings.schedule,
        lr=settings.lr,
        warmup=settings.warmup,
        steps=config.train.steps,
        min_lr_ratio=settings.min_lr_ratio,
        decay=settings.decay,
    )


def diverged(step: int, loss: float, norm: float) -> RankError:
    """What every rank raises then: all see the same numbers, so all stop."""
    return RankError(
        f"step {step}: the loss is {loss}, the gradient norm {norm}: training has diverged. "
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
