"""The training loop: what every rank does, step by step. `start` is what ``plait train`` calls."""

from __future__ import annotations

import dataclasses
import gc
import json
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import cast

import torch
from rich.console import Console

from plait.comm.world import World
from plait.core.config import Config, dump, loads
from plait.core.errors import ConfigError, PlanError, RankError, SaveError, WeightsError
from plait.core.fields import counted
from plait.models.config import ModelConfig
from plait.parallel.apply import Parallel
from plait.parallel.precision import fp8_reason
from plait.telemetry.record import EVAL_KEY, Metrics, Recorder, write_trace
from plait.train.data import Samples
from plait.train.elastic import rejoined
from plait.train.exchange import make_tokens, shared_folder, write_weights
from plait.train.folder import claimed, write_whole
from plait.train.heartbeat import Heartbeat
from plait.train.launch import Place, Worker, launch, placed
from plait.train.measure import Meter, device_facts, process_bytes
from plait.train.nan import NaNPolicy, hopeless
from plait.train.progress import Progress, heading
from plait.train.promise import write_promise
from plait.train.recut import REBALANCED, Change, Recut, agreed, recalled, watches
from plait.train.restart import FLIGHT, RANK, supervise
from plait.train.resume import Keeper
from plait.train.run import Setup, build, claim_folder, open_samples, prepare, to_device
from plait.train.step import Steps
from plait.train.supervise import Stop, StoppedError, Stragglers, looked_after


def start(config: Config, *, as_json: bool = False) -> None:
    """Check ``config``, claim its run folder, start the ranks (or join them), and train.

    ConfigError and PlanError for what cannot work, before a process starts; RankError, with the failing rank's own
    traceback and exit code, for what fails later.
    """
    config, place = rejoined(config), placed()
    setup = recalled(prepare(config))
    config = setup.config
    if place is None:
        check_device(config.run.device, setup.world_size, setup.plan.precision)
    with ExitStack() as leaving:
        if place is None or place.rank == 0:
            config = claim_folder(config)
            assert config.run.dir is not None, "claim_folder names it"
            leaving.enter_context(claimed(config))
            setup = dataclasses.replace(setup, config=config)
            if not as_json:
                Console(highlight=False).print(heading(setup), soft_wrap=True)
            if place is None:
                open_samples(setup)  # text becomes tokens once, and data that cannot serve is refused here
            write_promise(setup)
        if place is None and looked_after(config, setup.world_size):
            supervise(config, setup.world_size, as_json=as_json)
            return
        launch(
            RANK,
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
    if watches(setup):
        setup = agreed(setup, world)
    make_tokens(setup, world, worker.place.local_rank)
    try:
        train(setup, world, as_json=as_json, worker=worker)
    except RankError:
        if worker.watch is None:  # else the supervisor reads it, of ranks too that can say nothing any more
            world.book.flight.dump(folder / FLIGHT)
        raise
    world.close()


def train(setup: Setup, world: World, *, as_json: bool = False, worker: Worker | None = None) -> None:
    """Train as ``setup`` says on the ranks of ``world``, and leave the run folder ``setup.config.run.dir``.

    ``worker``: who this rank is to its launcher, which watches it; None: nobody does. StoppedError, once the state is
    saved, where a signal asked for it. The stage cut may change on the way (`plait.train.recut`).
    """
    worker = worker or Worker(
        place=Place(rank=world.rank, local_rank=world.rank, world_size=1), device="cpu", timeout=0
    )
    samples = open_samples(setup)
    process = process_bytes(world.device)
    show = Progress(setup, shown=world.rank == 0, as_json=as_json)
    with Stop(worker) as stop:
        now: Setup | None = setup
        while now is not None:
            now = train_cut(now, world, samples, show, worker=worker, stop=stop, process=process)
            gc.collect()  # the old weights are gone before there are new ones


def train_cut(
    setup: Setup, world: World, samples: Samples, show: Progress, *, worker: Worker, stop: Stop, process: int
) -> Setup | None:
    """`train` under one stage cut: to the end of the run, or None before it: what the run, all saved, goes on with."""
    config, folder, chief = setup.config, setup.config.run.dir, world.rank == 0
    assert folder is not None, "claim_folder names it"
    parallel = build(setup, world)
    recorder = Recorder(world.rank)
    world.book.sink = recorder.add
    facts = device_facts(setup, world.device) | {"process_bytes": process}
    peak = facts["peak_flops"]
    meter = Meter(setup, parallel, recorder, peak if isinstance(peak, float) else None)
    steps = Steps(setup, parallel, samples, config.train.steps)
    keeper = Keeper(setup, parallel, samples, steps, worker.memory)
    heart, policy = Heartbeat(worker), NaNPolicy(config, keeper, steps)
    stragglers = Stragglers(world.mesh.groups(("dp", "cp", "tp")), slow=config.run.straggler, log=keeper.log)
    trace_step = min(config.train.trace_step, config.train.steps - 1)
    lines = folder / "metrics.jsonl" if chief else None
    heart.beat(0, "load", bounded=False)
    step = keeper.resume()
    if chief:
        write_facts(setup, folder, facts)
    recut = Recut(setup, world) if watches(setup) else None
    row: dict[str, object] = {}
    with Metrics(lines) as metrics, show:
        while step < config.train.steps:
            heart.beat(step, "step", compute=meter.computes[world.rank] if meter.computes else None)
            meter.start()
            taken = steps.take(step)
            row = meter.finish(step, taken, asked=stop.requested())
            lost = hopeless(taken, steps.scale)
            if step == trace_step:
                trace(folder, meter, chief)
            if config.train.eval_every and (step + 1) % config.train.eval_every == 0 and not lost:
                heart.beat(step, "evaluate")
                row[EVAL_KEY] = evaluate(setup, parallel, samples)
            record(metrics, row)
            step = policy.after(step, taken) if lost else policy.passed(step)
            if not lost:
                show.update(row)
            warn(chief, stragglers.observe(step, meter.parts))
            heart.beat(step, "save", bounded=False)
            save(keeper, step, asked=meter.asked, chief=chief)
            change = recut.observe(step, cast(float, row["step_time_s"]), meter.computes) if recut is not None else None
            if change is not None and keeper.finish(step):
                return switch(keeper, change, chief)
        heart.beat(step, "save", bounded=False)
        saved = keep_all(keeper, parallel, world, setup.model, folder / "weights", step)
        if row:
            show.done(folder)
        else:
            warn(chief, f"{step} steps were done already, of train.steps={config.train.steps}: no step was taken")
        if not saved:
            raise SaveError(f"{unsaved(step)}; {folder / 'weights'} holds its weights alone")
    return None


def keep_all(keeper: Keeper, parallel: Parallel, world: World, model: ModelConfig, weights: Path, step: int) -> bool:
    """Save the run's last state and its weights; whether the state could be saved. SaveError where neither could."""
    saved = keeper.finish(step)
    warn(world.rank == 0, *keeper.warnings())
    if keeper.stands:  # the weights' folder may well be on the same disk
        raise SaveError(unsaved(step))
    try:
        write_weights(weights, world, model, parallel.zero)
    except WeightsError as error:
        if saved:
            raise
        raise SaveError(f"{unsaved(step)}; its weights could not be written either: {error}") from error
    return saved


def switch(keeper: Keeper, change: Change, chief: bool) -> Setup:
    """Tell of ``change``, which all ranks make now, and what the planner says of what follows."""
    keeper.note(REBALANCED, change.fields)
    warn(chief, *keeper.warnings(), str(change))
    if chief:
        write_promise(change.setup)
    return change.setup


def save(keeper: Keeper, step: int, *, asked: int, chief: bool) -> None:
    """Between two steps: save what is due. StoppedError, with all on the disk, where a signal ``asked`` for an end."""
    if not asked:
        keeper.save_if_due(step)
        warn(chief, *keeper.warnings())
        return
    saved = keeper.finish(step)
    warn(chief, *keeper.warnings())
    if not saved:
        raise SaveError(f"{signal.Signals(asked).name} asked the run to end: {unsaved(step)}")
    raise StoppedError(Stop.message(asked, step))


def unsaved(step: int) -> str:
    """What a run ends with whose last state is not on the disk; warnings before it have said why."""
    done = counted(step, "step")
    return f"the state after {done} could not be saved, plait train --resume goes on from the checkpoint before"


def record(metrics: Metrics, row: dict[str, object]) -> None:
    """Add ``row`` to ``metrics.jsonl``. A full disk ends no run for the sake of its log: it is said instead, and what
    is still in memory goes there with the next row that does."""
    try:
        metrics.write(row)
    except OSError as error:
        warn(True, f"metrics.jsonl, step {row['step']}: {error.strerror}")


def trace(folder: Path, meter: Meter, chief: bool) -> None:
    """Write the last step's spans of all ranks to ``trace.json``; collective."""
    events = meter.events()
    if chief:
        try:
            write_trace(folder / "trace.json", events)
        except ConfigError as error:  # no reason to end a run
            warn(True, str(error))


def warn(chief: bool, *lines: str | None) -> None:
    """Tell the person at the terminal, once for all ranks, what does not stop the run."""
    for line in lines:
        if chief and line:
            print(f"plait: warning: {line}", file=sys.stderr)


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


def write_facts(setup: Setup, folder: Path, facts: dict[str, object]) -> None:
    """``config.toml``, ``plan.toml`` (with its dp) and ``device.json`` of a run."""
    texts = {
        "config.toml": dump(setup.config),
        "plan.toml": setup.plan.to_toml(),
        "device.json": json.dumps({"ranks": setup.world_size, **facts}, indent=1) + "\n",
    }
    for name, text in texts.items():
        try:
            write_whole(folder / name, text)
        except OSError as error:
            if not (setup.config.run.resume and (folder / name).exists()):
                raise ConfigError(f"run.dir = {folder} cannot be written: {error}") from error
            warn(True, f"{folder / name} stays as it was: {error.strerror}")
