"""The ``plait`` command. Nothing heavy is imported before a command needs it: ``plait --help`` answers at once."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from plait.core.errors import PlaitError

_EXIT_CODES = (
    "exit codes: 0 done, 1 verify found a difference, or an unexpected error, 2 bad input, 3 a plan that cannot work, "
    "4 a rank failed, 5 damaged weights, 130 interrupted"
)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    root = argparse.ArgumentParser(
        prog="plait",
        description="Plans, runs, proves and explains the model-parallel training of transformers.",
        epilog=_EXIT_CODES,
    )
    root.add_argument("--version", action="version", version=f"plait {metadata.version('plait')}")
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a model; without a run file, a small one on Python's own sources")
    _run_arguments(train)
    train.add_argument("--dry", action="store_true", help="show mesh, memory, stage cut and schedule; start nothing")

    verify = commands.add_parser("verify", help="hold a plan's losses and gradients against one process")
    _run_arguments(verify)
    verify.add_argument("--steps", type=_positive, default=3, metavar="N", help="optimizer steps (default: 3)")

    convert = commands.add_parser(
        "convert", help="run folder or plait weights <-> Hugging Face folder; text -> token file"
    )
    convert.add_argument("src", nargs="+", type=Path, metavar="SRC", help="folder, or text files")
    convert.add_argument("dst", type=Path, metavar="DST", help="folder, or NAME.bin for tokens")
    convert.add_argument(
        "--tokenizer", default="bytes", metavar="T", help="bytes (default), or a tokenizer.json; for text"
    )
    convert.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="of written weights (default: as stored)")
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = parser().parse_args(argv)
    try:
        return _COMMANDS[arguments.command](arguments)
    except PlaitError as error:
        # A failed rank's own traceback first, then one line of what it means.
        sys.stderr.write(getattr(error, "trace", ""))
        print(f"plait: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("plait: interrupted; all ranks were ended", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Whoever read our output has left: so do we, without a word at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _train(arguments: argparse.Namespace) -> int:
    from plait.core.config import load
    from plait.train.run import prepare

    config = load(arguments.run, arguments.set)
    setup = prepare(config)  # before torch is loaded: bad input is refused at once
    if arguments.dry:
        from plait.train import dry

        print(dry.render(setup, as_json=arguments.json))
        return 0
    from plait.train import trainer

    trainer.start(config, as_json=arguments.json)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from plait.core.config import load
    from plait.train.run import prepare

    config = load(arguments.run, arguments.set)
    prepare(config)
    from plait.train import verify

    return verify.run(config, steps=arguments.steps, as_json=arguments.json)


def _convert(arguments: argparse.Namespace) -> int:
    from plait.train import convert

    return convert.run(arguments.src, arguments.dst, tokenizer=arguments.tokenizer, dtype=arguments.dtype)


_COMMANDS = {"train": _train, "verify": _verify, "convert": _convert}


def _run_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", nargs="?", type=Path, metavar="RUN.toml", help="the run file")
    command.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="set any key of the run; repeatable"
    )
    command.add_argument("--json", action="store_true", help="JSON on standard output, for programs")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value
