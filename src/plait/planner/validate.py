"""Predictions against published measurements: errors of step time and peak memory, ranking, and the plans chosen.

Configurations count, not rows: those that come to the same `Job` (a table that is printed again with each release) are
one, measured at their median. Error: predicted / measured - 1.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median

import numpy as np

from plait.core.errors import PlaitError
from plait.planner.constants import FIT_SOURCES
from plait.planner.cost import kind_of, predict
from plait.planner.job import Job
from plait.planner.memory import memory as predict_memory
from plait.planner.published import Row, job_of, memory_rank, notes, rows

WORST = 15
"""Configurations that are named."""


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Of ``n`` configurations: of the absolute relative error, and its mean with sign."""

    n: int
    median: float
    p90: float
    most: float
    bias: float


@dataclass(frozen=True, kw_only=True)
class Miss:
    """One configuration; seconds, or bytes."""

    id: str
    source: str
    measured: float
    predicted: float
    error: float
    inside: bool | None
    """Whether the measurement lies in the prediction's interval; None: there is none."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """Errors of one quantity."""

    all: Errors
    by: Mapping[str, Mapping[str, Errors]]
    """Source, whether it was fitted on, device, model, schedule, nodes -> its values -> errors."""
    worst: tuple[Miss, ...]
    inside: float | None
    """Share of measurements within the predicted interval."""
    covered: Mapping[str, tuple[int, float]]
    """Kind of job, and whether its source was fitted on -> (configurations, the same share)."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Configurations of one source that differ in the plan alone, and which of them the prediction would take."""

    source: str
    model: str
    plans: int
    best: str
    chosen: str
    regret: float
    """How much slower the chosen plan was measured than the best."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What `validate` found."""

    path: str
    rows: int
    configurations: int
    time: Section | None
    memory: Section | None
    spearman: Mapping[str, tuple[int, float, float]]
    """Source -> (configurations, rank correlation of step time, of tokens a second and device)."""
    choices: tuple[Choice, ...]
    refused: tuple[tuple[str, str], ...]
    """Rows that could not be predicted, and why."""
    approximated: Mapping[str, int]
    """What rows were expressed by something near -> how many."""


@dataclass(frozen=True, kw_only=True)
class _Case:
    """One configuration."""

    rows: tuple[Row, ...]
    job: Job

    @property
    def row(self) -> Row:
        return self.rows[0]

    def measured(self, value: Callable[[Row], float | None]) -> float | None:
        found = [number for row in self.rows if (number := value(row)) is not None]
        return median(found) if found else None


def validate(path: str | Path, *, memory: bool = True, sources: Sequence[str] = ()) -> Report:
    """Predict every row of the file (of ``sources`` alone, where some are given) and compare. ConfigError: bad file."""
    found = [row for row in rows(path) if not sources or row.source in sources]
    cases, refused = _cases(found)
    timed: list[tuple[_Case, Miss]] = []
    held: list[tuple[_Case, Miss]] = []
    for case in cases:
        try:
            time, peak = case.measured(lambda row: row.step_time), case.measured(lambda row: row.peak_memory)
            if time is not None:
                timed.append((case, _time(case, time)))
            if peak is not None and memory:
                held.append((case, _miss(case, peak, _peak(case), None)))
        except PlaitError as error:
            refused.append((case.row.id, str(error)))
    said: dict[str, int] = {}
    for row in found:
        for note in notes(row):
            said[note] = said.get(note, 0) + 1
    return Report(
        path=str(path),
        rows=len(found),
        configurations=len(cases),
        time=_section(timed),
        memory=_section(held),
        spearman=_rankings(timed),
        choices=_choices(timed),
        refused=tuple(refused),
        approximated=said,
    )


def _cases(found: Iterable[Row]) -> tuple[list[_Case], list[tuple[str, str]]]:
    same: dict[str, tuple[Job, list[Row]]] = {}
    refused = []
    for row in found:
        try:
            job = job_of(row)
        except PlaitError as error:
            refused.append((row.id, str(error)))
            continue
        same.setdefault(f"{row.source} {job!r}", (job, []))[1].append(row)
    return [_Case(rows=tuple(members), job=job) for job, members in same.values()], refused


def _peak(case: _Case) -> float:
    report, rank = predict_memory(case.job), memory_rank(case.row)
    return report.fullest.peak if rank is None else report.ranks[rank].peak


def _time(case: _Case, measured: float) -> Miss:
    found = predict(case.job)
    return _miss(case, measured, found.step_time, found.low <= measured <= found.high)


def _miss(case: _Case, measured: float, predicted: float, inside: bool | None) -> Miss:
    return Miss(
        id=case.row.id,
        source=case.row.source,
        measured=measured,
        predicted=predicted,
        error=predicted / measured - 1,
        inside=inside,
    )


def errors_of(values: Sequence[float]) -> Errors:
    """Statistics of relative errors; p90 is the nearest rank."""
    sizes = sorted(abs(value) for value in values)
    return Errors(
        n=len(values),
        median=median(sizes),
        p90=sizes[math.ceil(0.9 * len(sizes)) - 1],
        most=sizes[-1],
        bias=fmean(values),
    )


def _section(found: Sequence[tuple[_Case, Miss]]) -> Section | None:
    if not found:
        return None
    kinds: dict[str, Callable[[_Case], str]] = {
        "source": lambda case: case.row.source,
        "device": lambda case: case.job.topology.device.name,
        "model": lambda case: "MoE" if case.row.experts else "dense",
        "schedule": lambda case: "none" if case.job.plan.pp == 1 else str(case.row.layout["schedule"]),
        "nodes": lambda case: "one" if len(case.job.topology.tiers) == 1 else "several",
    }
    if any(miss.inside is not None for _, miss in found):
        kinds["fit"] = _fitted  # of constants of the time model
    by: dict[str, dict[str, Errors]] = {}
    for kind, name_of in kinds.items():
        groups: dict[str, list[float]] = {}
        for case, miss in found:
            groups.setdefault(name_of(case), []).append(miss.error)
        by[kind] = {name: errors_of(values) for name, values in sorted(groups.items())}
    inside = [miss.inside for _, miss in found if miss.inside is not None]
    covered: dict[str, list[bool]] = {}
    for case, miss in found:
        if miss.inside is not None:
            for name in (_fitted(case), kind_of(case.job)):
                covered.setdefault(name, []).append(miss.inside)
    return Section(
        all=errors_of([miss.error for _, miss in found]),
        by=by,
        worst=tuple(sorted((miss for _, miss in found), key=lambda miss: -abs(miss.error))[:WORST]),
        inside=fmean(inside) if inside else None,
        covered={name: (len(hits), fmean(hits)) for name, hits in sorted(covered.items())},
    )


def _fitted(case: _Case) -> str:
    return "fitted on" if case.row.source in FIT_SOURCES else "held out"


def _rankings(timed: Sequence[tuple[_Case, Miss]]) -> dict[str, tuple[int, float, float]]:
    groups: dict[str, list[tuple[_Case, Miss]]] = {}
    for case, miss in timed:
        groups.setdefault(miss.source, []).append((case, miss))
    found = {}
    for source, members in sorted(groups.items()):
        if len(members) < 3:
            continue
        work = [case.row.tokens / case.row.cluster["devices"] for case, _ in members]
        measured, predicted = ([getattr(miss, name) for _, miss in members] for name in ("measured", "predicted"))
        rates = ([w / t for w, t in zip(work, times, strict=True)] for times in (measured, predicted))
        found[source] = (len(members), spearman(measured, predicted), spearman(*rates))
    return found


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Rank correlation, equal values sharing their mean rank; nan where one side is constant."""
    one, other = _ranks(left), _ranks(right)
    one, other = one - one.mean(), other - other.mean()
    scale = math.sqrt(float(one @ one) * float(other @ other))
    return float(one @ other) / scale if scale else math.nan


def _ranks(values: Sequence[float]) -> np.ndarray:
    _, place, counts = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2)[place], dtype=np.float64)


def _choices(timed: Sequence[tuple[_Case, Miss]]) -> tuple[Choice, ...]:
    groups: dict[str, list[tuple[_Case, Miss]]] = {}
    for case, miss in timed:
        job = case.job
        practice = replace(job.practice, recompute_parts=())
        same = (miss.source, job.model, job.topology, job.seq, job.global_batch, job.plan.precision, practice)
        groups.setdefault(repr(same), []).append((case, miss))
    found = []
    for members in groups.values():
        if len(members) < 2:
            continue
        best = min(members, key=lambda pair: pair[1].measured)
        chosen = min(members, key=lambda pair: pair[1].predicted)
        found.append(
            Choice(
                source=best[1].source,
                model=str(best[0].row.model["name"]),
                plans=len(members),
                best=str(best[0].job.plan),
                chosen=str(chosen[0].job.plan),
                regret=chosen[1].measured / best[1].measured - 1,
            )
        )
    return tuple(sorted(found, key=lambda choice: -choice.regret))


def to_json(report: Report) -> str:
    """One JSON object; what is not a number is null."""
    return json.dumps(_plain(asdict(report)), indent=1, allow_nan=False)


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
