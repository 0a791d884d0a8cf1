"""The ``plait`` command. Nothing heavy is imported before a command needs it: ``plait --help`` answers at once."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from plait.arguments import parser
from plait.checkpoint.phases import SAVING
from plait.core.errors import ConfigError, PlaitError

if TYPE_CHECKING:
    from plait.core.config import Config


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = parser().parse_args(argv)
    try:
        code = _COMMANDS[arguments.command](arguments)
        print(end="", flush=True)  # that nobody reads what is still buffered is to be found here, not at exit
        return code
    except PlaitError as error:
        # A failed rank's own traceback first, then one line of what it means.
        sys.stderr.write(getattr(error, "trace", ""))
        print(f"plait: error: {error}", file=sys.stderr)
        if any(thread.name == SAVING for thread in threading.enumerate()):
            _leave(error.exit_code)
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        ended = "; all ranks were ended" if arguments.command in ("train", "verify", "calibrate") else ""
        print("; ".join([f"plait: interrupted{ended}", *map(str, interrupt.args)]), file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        return _unread()
    except SystemExit as leaving:
        if not isinstance(leaving.__context__, BrokenPipeError):  # which rich makes a failure of
            raise
        return _unread()


def _unread() -> int:
    """Whoever read our output has left: so do we, without a word at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


def _leave(code: int) -> NoReturn:
    """End here and now: a save that stands still on a dead disk would keep the interpreter for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _config(arguments: argparse.Namespace) -> Config:
    """The run that is asked for, with a plan."""
    from plait.core.config import load
    from plait.train.launch import placed

    config = load(arguments.run, arguments.set)
    if config.auto is None:
        return config
    from plait.train.auto import planned

    return planned(config, alone=placed() is None)


def _train(arguments: argparse.Namespace) -> int:
    from plait.train.launch import placed
    from plait.train.run import prepare

    if arguments.resume is not None:
        from plait.train.resume import config_of

        if arguments.run is not None:
            raise ConfigError(f"--resume {arguments.resume} reads that run's own file: leave {arguments.run} out")
        if not (arguments.resume / "config.toml").is_file():
            raise ConfigError(_no_run(arguments.resume))
        config = config_of(arguments.resume, tuple(arguments.set))
    else:
        config = _config(arguments)
    if placed() is not None:
        from plait.train.elastic import rejoined

        config = rejoined(config)
    setup = prepare(config)  # before torch is loaded: bad input is refused at once
    if arguments.dry:
        from plait.train import dry

        print(dry.render(setup, as_json=arguments.json))
        return 0
    from plait.train import trainer

    trainer.start(config, as_json=arguments.json)
    return 0


def _no_run(folder: Path) -> str:
    """What to say where ``folder`` holds no run to go on with: those beside it, if any."""
    from plait.core.fields import nearest_names

    why = "it holds no config.toml" if folder.is_dir() else "there is no such folder"
    beside = sorted(path.parent.name for path in folder.parent.glob("*/config.toml"))
    near = f"; runs in {folder.parent}: {nearest_names(folder.name, beside)}" if beside else ""
    return f"--resume {folder}: {why}, and so no run to go on with{near}"


def _verify(arguments: argparse.Namespace) -> int:
    from plait.train.run import prepare

    config = _config(arguments)
    prepare(config)
    from plait.train import verify

    return verify.run(config, steps=arguments.steps, as_json=arguments.json)


def _convert(arguments: argparse.Namespace) -> int:
    from plait.train import convert

    return convert.run(arguments.src, arguments.dst, tokenizer=arguments.tokenizer, dtype=arguments.dtype)


def _plan(arguments: argparse.Namespace) -> int:
    from plait.planner.commands import plan_command

    return plan_command(
        model=arguments.model,
        cluster_name=arguments.cluster,
        gpus=arguments.gpus,
        seq=arguments.seq,
        global_batch=arguments.global_batch,
        precision=arguments.precision,
        fix=arguments.fix,
        max_memory=arguments.max_memory,
        top=arguments.top,
        as_json=arguments.json,
        output=arguments.output,
    )


def _simulate(arguments: argparse.Namespace) -> int:
    from plait.planner.commands import simulate_command

    return simulate_command(
        arguments.plan,
        model=arguments.model,
        cluster_name=arguments.cluster,
        seq=arguments.seq,
        global_batch=arguments.global_batch,
        gpus=arguments.gpus,
        as_json=arguments.json,
        trace=arguments.trace,
        svg=arguments.svg,
    )


def _dry_run(arguments: argparse.Namespace) -> int:
    from plait.planner.commands import model_named
    from plait.train import dry_run

    return dry_run.run(
        arguments.plan,
        model=model_named(arguments.model),
        seq=arguments.seq,
        global_batch=arguments.global_batch,
        rank=arguments.rank,
        world_size=arguments.gpus,
        as_json=arguments.json,
    )


def _calibrate(arguments: argparse.Namespace) -> int:
    from plait.train import calibrate

    return calibrate.run(
        arguments.output,
        as_json=arguments.json,
        quick=arguments.quick,
        processes=arguments.processes,
        device=arguments.device,
    )


def _validate(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from plait.planner import validate, validate_tables

    found = validate.validate(arguments.rows, sources=arguments.source)
    if arguments.json:
        print(validate.to_json(found))
    else:
        validate_tables.render(found, Console(highlight=False))
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from plait.telemetry import report

    found = report.read(arguments.run)
    print(found.to_json() if arguments.json else report.render(found))
    return 0


def _checkpoint(arguments: argparse.Namespace) -> int:
    from plait.checkpoint import commands

    where, as_json = arguments.dir, arguments.json
    if arguments.doing == "list":
        return commands.list_(where, as_json=as_json)
    if arguments.doing == "verify":
        return commands.verify(where, as_json=as_json)
    if arguments.doing == "prune":
        return commands.prune(where, keep=arguments.keep, keep_every=arguments.keep_every, as_json=as_json)
    wanted = None
    if arguments.run is not None:
        from plait.train.run import prepare
        from plait.train.same import state_shapes

        wanted = state_shapes(prepare(_config(arguments)))
    return commands.show(where, as_json=as_json, wanted=wanted)


_COMMANDS = {
    "train": _train,
    "verify": _verify,
    "convert": _convert,
    "plan": _plan,
    "simulate": _simulate,
    "dry-run": _dry_run,
    "calibrate": _calibrate,
    "validate": _validate,
    "report": _report,
    "checkpoint": _checkpoint,
}
