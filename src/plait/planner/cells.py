"""Every cell that some legal plan has, those that are alike together; and how many plans they have."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from plait.core import fitting
from plait.core.legal import RULES, SIZE_RULES, divisors
from plait.core.plan import Plan
from plait.planner.space import MODES, Cell, Request, meshes, pipeline_sizes, pipelines, values, zeros

_LATER: Final = (fitting.rows, fitting.batch, fitting.depth, fitting.stages)
"""Rules on what a cell leaves open, and on its microbatch."""
WIDE: Final = 16384
"""Cells up to which all are looked at."""
_LIKELY: Final[tuple[tuple[frozenset[str], str, Callable[[Request, Cell], bool]], ...]] = (
    (
        frozenset({"sequence_parallel"}),
        "tp without sequence parallelism",
        lambda request, cell: cell.sp or cell.tp == 1,
    ),
    (frozenset({"expert_tp"}), "experts on some of tp", lambda request, cell: cell.etp in (1, cell.tp)),
    (
        frozenset({"tp", "cp"}),
        "tp x cp beyond the fastest domain for every 4,096 tokens of a sample",
        lambda request, cell: cell.tp * cell.cp <= request.topology.tiers[0].size * -(-request.seq // 4096),
    ),
)
"""Keys that keep it, what is left out in words, and what stays."""


def cells(request: Request) -> Iterator[Cell]:
    """Every cell that some legal plan has."""
    fix, shape, world = request.fix, request.shape, request.world_size
    rules = [rule for rule in RULES if rule not in SIZE_RULES and rule.test not in _LATER]
    rows = _Rows(request)
    for tp in values(fix, "tp", divisors(world)):
        for cp in values(fix, "cp", divisors(world // tp) if world % tp == 0 else []):
            if world % (tp * cp) or cp > request.seq:
                continue
            dps = [dp for _, dp in meshes(request, tp, cp)]
            micros = sorted({micro for dp in dps for micro in divisors(request.global_batch // dp)})
            each = list(rows.of(tp, cp, values(fix, "micro", micros) if dps else []))
            if not each:
                continue
            contexts = values(fix, "context", list(fitting.CONTEXTS) if cp > 1 else ["ring"])
            eps = values(fix, "ep", divisors(shape.num_experts) if shape.num_experts else [1])
            for context in contexts:
                for ep in eps:
                    for etp in _expert_tps(request, tp, ep):
                        keys = {**request.base(), "tp": tp, "cp": cp, "context": context, "ep": ep, "expert_tp": etp}
                        # The smallest pipeline has the most ranks a stage: experts fold out of it if out of any.
                        plan = Plan(**{**keys, "pp": 1, "dp": None, "micro": 1, "virtual": 1, "schedule": "1f1b"})
                        facts = request.facts(_mild(plan))
                        if not any(rule.test(facts) for rule in rules):
                            for sp, micro in each:
                                yield Cell(tp=tp, sp=sp, cp=cp, context=context, ep=ep, etp=etp, micro=micro)


def likely(request: Request, among: Sequence[Cell]) -> tuple[list[Cell], tuple[str, ...]]:
    """Of more than `WIDE` cells, those that are worth their time, and in words what was left out: a rule of thumb, not
    a bound. What ``fix`` gives stays."""
    found, words = list(among), []
    for keys, what, stays in _LIKELY:
        rest = [cell for cell in found if stays(request, cell)]
        if len(found) > WIDE and rest and not keys & request.fix.keys():
            found = rest
            words.append(what)
    return found, tuple(words)


def grouped(among: Iterable[Cell]) -> list[tuple[Cell, ...]]:
    """Cells whose ranks cut layers alike and have as many tokens of a microbatch, together."""
    found: dict[tuple[object, ...], list[Cell]] = {}
    for cell in among:
        found.setdefault((cell.tp, cell.sp, cell.ep, cell.etp, cell.micro / cell.cp), []).append(cell)
    return [tuple(group) for group in found.values()]


def _mild(plan: Plan) -> Plan:
    """``plan`` with what other levels decide at values that break no rule."""
    return dataclasses.replace(plan, live=None, zero_group=None, node=None, gather="use", compress="none", zero=0)


def _expert_tps(request: Request, tp: int, ep: int) -> list[int]:
    ranks = request.world_size
    if not request.shape.num_experts:
        return [tp] if ep == 1 else []
    width = request.shape.expert_ffn
    # Whole experts on a rank, or each on all of tp, or on some of it.
    found = values(request.fix, "expert_tp", divisors(tp))
    return [etp for etp in found if ranks % (ep * etp) == 0 and width % etp == 0]


class _Rows:
    """Sequence parallelism and microbatches whose rows divide."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._known: dict[tuple[int, bool, int, bool], bool] = {}

    def of(self, tp: int, cp: int, micros: Sequence[int]) -> Iterator[tuple[bool, int]]:
        given = self._request.fix.get("sequence_parallel")
        sps = ([True, False] if given is None else [bool(given)]) if tp > 1 else [False]
        for micro in micros:
            for sp in sps:
                key = (tp, cp > 1, micro, sp)
                if key not in self._known:
                    plan = Plan(tp=tp, cp=cp, micro=micro, sequence_parallel=sp if tp > 1 else None)
                    self._known[key] = fitting.rows(self._request.facts(plan)) is None
                if self._known[key]:
                    yield sp, micro


def plan_count(request: Request, among: Sequence[Cell]) -> int:
    """Forms of cells, stage cuts and layer-wise recomputation not counted."""
    modes = len(values(request.fix, "recompute", list(MODES)))
    pipes = {pp: len(pipelines(request.fix, pp, request.shape.num_layers)) for pp in pipeline_sizes(request)}
    known: dict[tuple[int, int], list[tuple[int, int]]] = {}
    alike = Counter((cell.tp, cell.cp, cell.micro, cell.ep * cell.etp) for cell in among)
    found = 0
    for (tp, cp, micro, folded), count in alike.items():
        if (tp, cp) not in known:
            known[tp, cp] = meshes(request, tp, cp)
        for pp, dp in known[tp, cp]:
            if request.global_batch % (micro * dp) == 0 and dp * cp * tp % folded == 0:
                found += count * pipes[pp] * modes * len(zeros(request.fix, dp * cp))
    return found
