"""The words of the ``plait`` command: what each subcommand takes. Imports nothing heavy."""

from __future__ import annotations

import argparse
from importlib import metadata
from pathlib import Path

_EXIT_CODES = (
    "exit codes: 0 done, 1 verify found a difference, or an unexpected error, 2 bad input, 3 a plan that cannot work, "
    "4 a rank failed, 5 damaged weights or checkpoint, 6 stopped by a signal after saving, 7 diverged, 8 the last "
    "state could not be saved, 130 interrupted, 138 or 143 SIGUSR1 or SIGTERM before it could save, 141 no reader left"
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
    train.add_argument("--resume", type=Path, metavar="DIR", help="go on with the run in DIR, as its config.toml says")

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
    _planning(commands)
    _after(commands)
    return root


def _planning(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The commands that need no devices, and the one that measures them."""
    plan = commands.add_parser("plan", help="the best plans for a model on a cluster, and why others lost")
    _job_arguments(plan, cluster=True, ranks_needed=True)
    plan.add_argument("--precision", default="bf16", help="fp32, bf16 (default), fp16 or fp8")
    plan.add_argument("--fix", nargs="+", default=[], metavar="KEY=VALUE", help="plan keys that are given")
    plan.add_argument("--max-memory", type=float, default=0.9, metavar="SHARE", help="of a device (default: 0.9)")
    plan.add_argument("--top", type=_positive, default=10, metavar="N", help="plans that are shown (default: 10)")
    plan.add_argument("-o", "--output", type=Path, metavar="PLAN.toml", help="write the best plan")

    simulate = commands.add_parser("simulate", help="one plan: seconds and bytes of every pipeline rank, timeline")
    simulate.add_argument("plan", type=Path, metavar="PLAN.toml")
    _job_arguments(simulate, cluster=True)
    simulate.add_argument("--trace", type=Path, metavar="FILE.json", help="write the timeline for ui.perfetto.dev")
    simulate.add_argument("--svg", type=Path, metavar="FILE.svg", help="write it as a picture")

    dry = commands.add_parser("dry-run", help="one rank of a plan, on fake tensors: bytes sent, FLOPs, bytes held")
    dry.add_argument("plan", type=Path, metavar="PLAN.toml")
    _job_arguments(dry)
    dry.add_argument("--rank", type=int, default=0, metavar="R", help="of the plan's ranks (default: 0)")

    measure = commands.add_parser("calibrate", help="measure this machine, or all nodes under torchrun: a cluster file")
    measure.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: the cache, read as cluster local")
    measure.add_argument("--quick", action="store_true", help="fewer sizes, in a quarter of the time")
    measure.add_argument("--processes", type=_positive, nargs="+", metavar="N", help="numbers of ranks to measure")
    measure.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    measure.add_argument("--json", action="store_true", help="JSON on standard output")

    validate = commands.add_parser("validate", help="predictions beside published measurements")
    validate.add_argument("rows", type=Path, metavar="ROWS.jsonl")
    validate.add_argument("--source", action="append", default=[], help="only rows of this source; repeatable")
    validate.add_argument("--json", action="store_true", help="JSON on standard output")


def _after(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The commands that look at what runs left."""
    report = commands.add_parser("report", help="a run: promise beside fact, what happened, why it stopped")
    report.add_argument("run", type=Path, metavar="RUN", help="the run folder")
    report.add_argument("--json", action="store_true", help="JSON on standard output")

    checkpoint = commands.add_parser("checkpoint", help="what checkpoints there are, and whether they are whole")
    doings = checkpoint.add_subparsers(dest="doing", required=True, metavar="list|show|verify|prune")
    for name, does in (
        ("list", "every checkpoint, from old to new"),
        ("show", "the newest one in full; with --for, what a run would load of it"),
        ("verify", "read every byte, and hold it against the hashes"),
        ("prune", "take the oldest away"),
    ):
        doing = doings.add_parser(name, help=does)
        doing.add_argument("dir", type=Path, metavar="DIR", help="a checkpoint, a folder of them, or a run folder")
        doing.add_argument("--json", action="store_true", help="JSON on standard output")
        if name == "show":
            doing.add_argument("--for", dest="run", type=Path, metavar="RUN.toml", help="the run that would load it")
            doing.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="of that run")
        if name == "prune":
            doing.add_argument("--keep", type=_positive, required=True, metavar="N", help="newest that stay")
            doing.add_argument("--keep-every", type=int, default=0, metavar="K", help="steps K divides stay as well")


def _job_arguments(command: argparse.ArgumentParser, *, cluster: bool = False, ranks_needed: bool = False) -> None:
    command.add_argument("--model", required=True, metavar="MODEL", help="preset, Hugging Face folder, or TOML")
    if cluster:
        command.add_argument("--cluster", required=True, metavar="CLUSTER", help="preset, local, or a cluster file")
    ranks = "devices" if ranks_needed else "ranks (default: what the plan needs)"
    command.add_argument("--gpus", type=_positive, required=ranks_needed, metavar="N", help=ranks)
    command.add_argument("--seq", type=_positive, required=True, metavar="S", help="tokens a sample")
    command.add_argument("--global-batch", type=_positive, required=True, metavar="B", help="samples a step")
    command.add_argument("--json", action="store_true", help="JSON on standard output")


def _run_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("run", nargs="?", type=Path, metavar="RUN.toml", help="the run file")
    command.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="set any key of the run; repeatable"
    )
    command.add_argument("--json", action="store_true", help="JSON on standard output, for programs")


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value
