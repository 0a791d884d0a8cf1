"""The comparisons of ``peers.py``: a plan of plait and the settings of its peer, one `Row` each."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from bench_model import BenchConfig
from engine import Engine
from peers_deepspeed import DeepSpeed
from peers_megatron import Megatron
from peers_pipeline import Pipeline
from peers_torch import DataParallel, FullyShard, Linear, TensorParallel
from plait_engine import PlaitAlone

CONFIG = BenchConfig()
Factory = Callable[[], Engine]
EVEN = (2, 2, 2, 2)
"""Layers of the four stages of a V whose head is not counted as layers: a peer's second setting."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison: a plan of plait and the settings of its peer."""

    name: str
    plan: str
    ranks: int
    peers: tuple[Factory, ...]
    ideal: float | None = None
    """For rows against one process with as many threads: the share of it that the schedule itself allows."""


def _rows() -> tuple[Row, ...]:
    c = CONFIG

    def row(name: str, plan: str, *peers: Factory, ranks: int = 2) -> Row:
        return Row(name=name, plan=plan, ranks=ranks, peers=peers)

    def against(name: str, plan: str, ranks: int, ideal: float) -> Row:
        return Row(name=name, plan=plan, ranks=ranks, peers=_one_process(ranks), ideal=ideal)

    return (
        row("ddp", "dp=2 zero=1 micro=2", partial(DataParallel, c), partial(DataParallel, c, microbatches=2)),
        row(
            "fsdp2",
            "dp=2 zero=1 micro=2",
            partial(FullyShard, c),
            partial(FullyShard, c, microbatches=2),
            partial(FullyShard, c, reshard_after_forward=True),
        ),
        row(
            "dtensor-tp",
            "tp=2 sequence_parallel=false micro=4",
            partial(TensorParallel, c),
            partial(TensorParallel, c, microbatches=2),
        ),
        row(
            "dtensor-tp-sp",
            "tp=2 micro=4",
            partial(TensorParallel, c, sequence_parallel=True),
            partial(TensorParallel, c, sequence_parallel=True, microbatches=2),
        ),
        row("pipelining-1f1b-4", "pp=2 micro=2", partial(Pipeline, c, "1f1b", 4)),
        row("pipelining-1f1b-8", "pp=2 micro=1", partial(Pipeline, c, "1f1b", 8)),
        row(
            "dtensor-tp2-pp2",
            "tp=2 pp=2 micro=2",
            partial(Pipeline, c, "1f1b", 4, tp=2),
            partial(Pipeline, c, "1f1b", 8, tp=2),
            ranks=4,
        ),
        *_zero_rows(c),
        *_zero_bubble_rows(c),
        against("threads-dp2", "dp=2 zero=1 micro=2", 2, 1.0),
        against("threads-tp2", "tp=2 micro=4", 2, 1.0),
        against("threads-pp2", "pp=2 micro=1", 2, 8 / 9),
        row("one-thread", "micro=2", partial(Linear, c), partial(Linear, c, microbatches=4), ranks=1),
        *_other_rows(),
    )


def _zero_rows(c: BenchConfig) -> list[Row]:
    """FSDP2 that keeps gathered weights until backward (ZeRO-2's weights and traffic), and FSDP2 that does not."""
    kept = tuple(partial(FullyShard, c, microbatches=count) for count in (1, 2))
    freed = (
        partial(FullyShard, c, reshard_after_forward=True),
        partial(FullyShard, c, reshard_after_forward=True, prefetch=True),
        partial(FullyShard, c, reshard_after_forward=True, microbatches=2),
    )
    four = tuple(partial(FullyShard, c, reshard_after_forward=True, prefetch=early, ranks=4) for early in (False, True))
    return [
        Row(name="fsdp2-zero2", plan="dp=2 zero=2 micro=2", ranks=2, peers=kept),
        Row(name="fsdp2-zero3", plan="dp=2 zero=3 micro=4", ranks=2, peers=freed),
        Row(name="fsdp2-zero3-4", plan="dp=4 zero=3 micro=2", ranks=4, peers=four),
    ]


def _zero_bubble_rows(c: BenchConfig) -> list[Row]:
    """torch's ZBV and DualPipe-V, each with a cut balanced for the head and an even one."""
    rows = []
    for name, schedule, plan in (("zbv", "zbv", "zb-v"), ("dualpipev", "dualpipev", "dualpipe-v")):
        for count in (4, 8):
            peers = tuple(partial(Pipeline, c, schedule, count, stage_layers=cut) for cut in (None, EVEN))
            text = f"pp=2 schedule={plan} virtual=2 micro={c.batch // count}"
            rows.append(Row(name=f"{name}-{count}", plan=text, ranks=2, peers=peers))
        text = f"pp=4 schedule={plan} virtual=2 micro=1"
        rows.append(Row(name=f"{name}-8-4", plan=text, ranks=4, peers=(partial(Pipeline, c, schedule, 8, pp=4),)))
    return rows


def _other_rows() -> list[Row]:
    """DeepSpeed and Megatron-core, where they are installed."""
    rows = []
    if importlib.util.find_spec("deepspeed"):
        for stage, plan in ((1, "zero=1 micro=2"), (2, "zero=2 micro=2"), (3, "zero=3 micro=4")):
            peers = [partial(DeepSpeed, CONFIG, stage, microbatches=count) for count in (1, 2)]
            if stage == 3:
                peers.append(partial(DeepSpeed, CONFIG, stage, lean=True))
            rows.append(Row(name=f"deepspeed-zero{stage}", plan=f"dp=2 {plan}", ranks=2, peers=tuple(peers)))
        four = tuple(partial(DeepSpeed, CONFIG, 3, lean=lean, ranks=4) for lean in (False, True))
        rows.append(Row(name="deepspeed-zero3-4", plan="dp=4 zero=3 micro=2", ranks=4, peers=four))
    if importlib.util.find_spec("megatron"):
        # One Megatron engine a process: its groups are global. So one setting each, no trial.
        for name, plan, ranks, sizes in (
            ("megatron-tp", "tp=2 sequence_parallel=false micro=4", 2, {"tp": 2}),
            ("megatron-pp-8", "pp=2 micro=1", 2, {"pp": 2, "microbatches": 8}),
            ("megatron-tp2-pp2", "tp=2 pp=2 micro=2", 4, {"tp": 2, "pp": 2, "microbatches": 4}),
        ):
            rows.append(Row(name=name, plan=plan, ranks=ranks, peers=(partial(Megatron, CONFIG, **sizes),)))
    return rows


def _one_process(threads: int) -> tuple[Factory, ...]:
    return (
        partial(Linear, CONFIG, threads=threads),
        partial(PlaitAlone, CONFIG, "micro=8", threads),
        partial(PlaitAlone, CONFIG, "micro=2", threads),
    )


ROWS = _rows()
