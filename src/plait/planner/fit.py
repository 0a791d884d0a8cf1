"""Fit the time model's constants on published rows: ``python -m plait.planner.fit PUBLISHED.jsonl [NAME ...]``.

Coordinate descent on the median and mean absolute log error of step times, over the sources of
`constants.FIT_SOURCES` alone; a source's rows on one node weigh as much as those on several, and as any other
source's. Prints what it found; `constants.py` is edited by hand, so that every value keeps its reason. NAMES narrow
the constants that move.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from plait.core.errors import PlaitError
from plait.core.topology import Topology
from plait.planner.constants import CONSTANTS, DEFAULT, FIT_SOURCES
from plait.planner.cost import kind_of, predict
from plait.planner.job import Job
from plait.planner.published import job_of, rows

MOST_ROWS = 40
"""Rows of a source that are looked at: every so many of a larger one."""
FIXED = ("definition", "data sheet")
"""Sources of constants that are not fitted."""
COVERED = 0.8
"""Share of the rows of an unknown source that an interval is to cover."""
CAP = 0.5
"""A log error counts no more than this: a straggler in a source does not steer the fit."""

Rows = Mapping[str, Sequence[tuple[Job, float]]]


def measured(path: str, sources: Sequence[str] | None = FIT_SOURCES) -> Rows:
    """Source and kind of cluster -> jobs and their step times in seconds; identical jobs once, at their mean time.

    ``sources`` None: all of the file's.
    """
    found: dict[str, dict[str, list[tuple[Job, float]]]] = defaultdict(lambda: defaultdict(list))
    clusters: dict[str, Topology] = {}
    for row in rows(path):
        if row.step_time is None or (sources is not None and row.source not in sources):
            continue
        try:
            job = job_of(row)
        except PlaitError:
            continue
        # One object a cluster, so that its jobs share what is cached for it.
        job = replace(job, topology=clusters.setdefault(repr(job.topology), job.topology))
        key = repr((job.model, job.plan, job.topology, job.seq, job.global_batch, job.practice))
        nodes = "one node" if row.cluster["devices"] <= row.cluster["devices_per_node"] else "several"
        found[f"{row.source}, {nodes}"][key].append((job, row.step_time))
    result = {}
    for source, alike in found.items():
        means = [(same[0][0], sum(time for _, time in same) / len(same)) for same in alike.values()]
        result[source] = means[:: max(1, len(means) // MOST_ROWS)]
    return result


def loss(data: Rows, values: Mapping[str, float]) -> float:
    """Mean over the sources of half the median and half the mean absolute log error, the latter capped."""
    table = DEFAULT.replace(values)
    total = 0.0
    for pairs in data.values():
        errors = sorted(min(CAP, abs(math.log(predict(job, table).step_time / time))) for job, time in pairs)
        total += (errors[len(errors) // 2] + sum(errors) / len(errors)) / 2
    return total / len(data)


def descend(data: Rows, names: Sequence[str], rounds: int) -> tuple[float, dict[str, float]]:
    """The least loss found and the values of ``names`` there."""
    values = {name: CONSTANTS[name].value for name in names}
    best = loss(data, values)
    steps = dict.fromkeys(names, 1 / 4)
    for _ in range(rounds):
        for name in names:
            for factor in (1 + steps[name], 1 / (1 + steps[name])):
                tried = {**values, name: values[name] * factor}
                if (found := loss(data, tried)) < best:
                    best, values = found, tried
                    break
            else:
                steps[name] /= 2
        print(f"loss {best:.4f}", flush=True)
    return best, values


def spreads(data: Rows, values: Mapping[str, float]) -> dict[str, float]:
    """Kind of job -> the log error that 80% of the rows of a source stay within that it was not learnt on.

    Cross-validated: of quantiles, the lowest at which widths learnt on all sources but one cover, in the mean over the
    sources left out, 80% of their rows; its width on all sources. Sources weigh alike.
    """
    table = DEFAULT.replace(values)
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for key, pairs in data.items():
        source = key.partition(",")[0]
        for job, time in pairs:
            found[kind_of(job)][source].append(abs(math.log(predict(job, table).step_time / time)))
    return {kind: _crossed(sources) for kind, sources in found.items()}


def _crossed(sources: Mapping[str, Sequence[float]]) -> float:
    """The width of `spreads` from the log errors of each source."""
    for percent in range(80, 101):
        level = percent / 100
        covered = []
        for left_out, errors in sources.items():
            others = [other for name, other in sources.items() if name != left_out]
            if others:
                width = _quantile(others, level)
                covered.append(sum(error <= width for error in errors) / len(errors))
        if not covered or sum(covered) / len(covered) >= COVERED:
            break
    return _quantile(list(sources.values()), level)


def _quantile(sources: Sequence[Sequence[float]], level: float) -> float:
    """Of the errors of all sources, each of which weighs as much as any other."""
    weighed = sorted((error, 1 / len(errors)) for errors in sources for error in errors)
    left = level * len(sources)
    for error, weight in weighed:
        left -= weight
        if left <= 1e-9:
            return error
    return weighed[-1][0]


def main(arguments: Sequence[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m plait.planner.fit", description=__doc__)
    parser.add_argument("published")
    parser.add_argument("names", nargs="*", help="constants to fit; none: all that are fitted")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--sources", default=",".join(FIT_SOURCES))
    given = parser.parse_args(arguments)
    names = given.names or [
        name for name, constant in CONSTANTS.items() if constant.source not in FIXED and constant.value > 0
    ]
    if unknown := [name for name in names if name not in CONSTANTS]:
        print(f"no constant {unknown[0]!r}: they are {', '.join(CONSTANTS)}", file=sys.stderr)
        return 2
    data = measured(given.published, given.sources.split(","))
    best, values = descend(data, names, given.rounds)
    for name, value in values.items():
        if value != CONSTANTS[name].value:
            print(f"{name}: {CONSTANTS[name].value:.4g} -> {value:.4g}")
    print(f"loss {best:.4f}")
    # Intervals are for what was not fitted on, too.
    for kind, spread in sorted(spreads(measured(given.published, None), values).items()):
        print(f"spread.{kind}: {spread:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
