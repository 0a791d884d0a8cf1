"""The stage cut for ranks of unequal speed: what layers take, how slow each pipeline rank is, and the cut for both.

A pipeline rank's seconds are its slowness times what the time model says of its layers, its embedding and its head. The
model has to be right about their ratios alone: its scale is part of the slowness, which is measured.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from plait.core.plan import Plan
from plait.parallel.layout import load_schedule, placement
from plait.planner.fast_simulate import makespan
from plait.planner.job import Job
from plait.planner.recomputing import modes_of
from plait.planner.stages import Spent, end_times, layer_times, machine_of, slice_of
from plait.schedule.simulate import Cost, simulate

STATES = 1 << 11
"""Of `levelled`, over all stages and numbers of layers; of larger problems the most level ones are gone on with."""
FEW_STAGES = 8
"""Up to so many, layers move between any two; of more, from the fullest rank's to its own and to the emptiest's."""
PAIRS = 6
"""Up to so many stages, two layers are moved at a time where one alone gains nothing."""
_NEAR = 1.15
"""How many times what each rank would take of layers that could be cut anywhere is tried first."""
_LESS = 1 - 1e-9
"""A time has to be less than this share of another to be less for another reason than rounding."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Seconds of one microbatch on a rank of usual speed: of each layer, the embedding, the head with the loss."""

    layers: tuple[Cost, ...]
    embedding: Cost
    head: Cost

    def stages(self, cut: Sequence[int]) -> list[Cost]:
        """Seconds of each stage of ``cut``, layers by stage."""
        found, first = [], 0
        for stage, count in enumerate(cut):
            held = list(self.layers[first : first + count])
            held += [self.embedding] if stage == 0 else []
            held += [self.head] if stage == len(cut) - 1 else []
            first += count
            found.append(_sum(held))
        return found


@dataclass(frozen=True, kw_only=True)
class Line:
    """A pipeline whose ranks differ in speed."""

    plan: Plan
    parts: Parts
    slow: tuple[float, ...]
    """Of each pipeline rank, what seconds of `Parts` are multiplied with."""
    microbatches: int

    @cached_property
    def homes(self) -> tuple[int, ...]:
        """Rank of each stage."""
        return placement(self.plan)

    def costs(self, cut: Sequence[int]) -> list[Cost]:
        """Seconds of each stage where it lies."""
        stages = self.parts.stages(cut)
        return [_sum([stage], self.slow[home]) for stage, home in zip(stages, self.homes, strict=True)]

    def busy(self, cut: Sequence[int]) -> list[float]:
        """Seconds that each rank computes for one microbatch."""
        found = [0.0] * self.plan.pp
        for home, cost in zip(self.homes, self.costs(cut), strict=True):
            found[home] += _total(cost)
        return found

    def seconds(self, cut: Sequence[int]) -> float:
        """Seconds of a step's forwards and backwards under the plan's schedule, messages left out."""
        plan, m = self.plan, self.microbatches
        if plan.schedule == "2bw":
            return m * max(self.busy(cut))  # windows without a flush
        costs = self.costs(cut)
        if plan.schedule_file is not None:
            schedule = load_schedule(plan, m).compute_only()
            return max(event.end for event in simulate(schedule, costs))
        name = plan.schedule
        if name == "auto":
            name = "zb-h1" if plan.virtual == 1 else "zb-v"  # near what is searched, on the same placement
        elif name == "interleaved" and plan.virtual == 1:
            name = "1f1b"
        return makespan(name, costs, ranks=plan.pp, microbatches=m, virtual=plan.virtual)


def parts_of(job: Job) -> Parts:
    """What the time model says of the job's layers, embedding and head, exposed communication in them."""
    machine, cut, model = machine_of(job.topology), slice_of(job), job.model
    modes = modes_of(job.plan.recompute, model.num_layers)
    return Parts(
        layers=tuple(
            _cost(layer_times(machine, cut, model.moe_of(layer) is not None, model.window_of(layer), modes[layer]))
            for layer in range(model.num_layers)
        ),
        embedding=_cost(end_times(machine, cut, False)),
        head=_cost(end_times(machine, cut, True)),
    )


def slowness(parts: Parts, plan: Plan, cut: Sequence[int], seconds: Sequence[float], microbatches: int) -> list[float]:
    """How many times what ``parts`` say each pipeline rank takes; ``seconds`` are what it computed in a step.

    Of a rank without a layer too little is seen: it is taken to be like the others' median.
    """
    homes = placement(plan)
    expected, layers = [0.0] * plan.pp, [0] * plan.pp
    for home, cost, count in zip(homes, parts.stages(cut), cut, strict=True):
        expected[home] += _total(cost) * microbatches
        layers[home] += count
    found = [spent / said if held else None for spent, said, held in zip(seconds, expected, layers, strict=True)]
    usual = median(value for value in found if value is not None)
    return [usual if value is None else value for value in found]


def best_cut(line: Line, now: Sequence[int], fits: Callable[[tuple[int, ...]], bool]) -> tuple[int, ...]:
    """The cut of layers to stages whose step is the shortest; ``now`` where none is shorter.

    From ``now``, and from the cut whose fullest rank is least full (`levelled`), one layer, or of few stages two, move
    at a time from stage to stage for as long as the simulated step gets shorter. ``fits``: whether a cut's ranks have
    room for it; ``now`` does.
    """
    begins, most = [tuple(now)], max(line.busy(now))
    even = sum(map(_total, line.parts.stages(now))) / sum(1 / slow for slow in line.slow)
    # Most of what is far from even need not be looked at, as a rule.
    level = levelled(line, min(most, _NEAR * even)) or levelled(line, most)
    if level is not None and fits(level):
        begins.append(level)
    ends = [_climbed(line, begin, fits) for begin in begins]
    return min(ends, key=line.seconds)  # the first of equals: that from ``now``


def levelled(line: Line, most: float) -> tuple[int, ...] | None:
    """The cut whose fullest rank computes the least, each stage with a layer; None where all are above ``most`` seconds
    a microbatch.

    Dynamic programming over stages. A state is how many layers are laid out, the fullest of the ranks that have all
    their stages, and the seconds on the others; what another state is no worse than in every respect is left out. With
    one stage a rank that is one state for each number of layers, and the answer exact; so it is with several as long as
    there are no more than `STATES`.
    """
    homes, parts, layers = line.homes, line.parts, len(line.parts.layers)
    sums = [0.0, *itertools.accumulate(_total(cost) for cost in parts.layers)]
    last = {rank: stage for stage, rank in enumerate(homes)}
    head = _total(parts.head)
    width = max(8, STATES // (len(homes) * layers))
    limit = most / _LESS
    reached = {0: [_State(fullest=0.0, open=(0.0,) * line.plan.pp, cut=())]}
    for stage, rank in enumerate(homes):
        left = len(homes) - 1 - stage
        later = set(homes[stage + 1 :])
        ends = _total(parts.embedding) * (stage == 0) + head * (left == 0)
        found: dict[int, list[_State]] = {}
        for at, states in reached.items():
            for stop in range(at + 1, layers - left + 1) if left else [layers] if at < layers else []:
                spent = line.slow[rank] * (sums[stop] - sums[at] + ends)
                room = [state for state in states if state.open[rank] + spent <= limit]
                if not room:
                    break  # more layers take longer still
                added = [state.add(rank, spent, stop - at, closes=last[rank] == stage) for state in room]
                rest = sums[-1] - sums[stop] + head if left else 0.0
                found.setdefault(stop, []).extend(
                    state for state in added if sum((limit - state.open[one]) / line.slow[one] for one in later) >= rest
                )
        reached = {at: _least(states)[:width] for at, states in found.items()}
    ended = reached.get(layers)
    return ended[0].cut if ended else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _State:
    """Stages laid out so far: seconds of the fullest closed rank, of each open one (0: closed, or empty), and how."""

    fullest: float
    open: tuple[float, ...]
    cut: tuple[int, ...]

    def add(self, rank: int, spent: float, layers: int, *, closes: bool) -> _State:
        """With one more stage, on ``rank``; ``closes``: it is the rank's last one."""
        load = self.open[rank] + spent
        before, after = self.open[:rank], self.open[rank + 1 :]
        return _State(
            fullest=max(self.fullest, load) if closes else self.fullest,
            open=(*before, 0.0 if closes else load, *after),
            cut=(*self.cut, layers),
        )

    @property
    def key(self) -> tuple[float, float]:
        return max(self.fullest, *self.open), self.fullest + sum(self.open)

    def covers(self, other: _State) -> bool:
        """Whether it is no worse than ``other`` in every respect."""
        pairs = zip((self.fullest, *self.open), (other.fullest, *other.open), strict=True)
        return all(mine <= theirs for mine, theirs in pairs)


def _least(states: list[_State]) -> list[_State]:
    """Those that no other covers, the most level first."""
    kept: list[_State] = []
    for state in sorted(states, key=lambda one: one.key):
        if not any(one.covers(state) for one in kept):
            kept.append(state)
    return kept


def _climbed(line: Line, cut: tuple[int, ...], fits: Callable[[tuple[int, ...]], bool]) -> tuple[int, ...]:
    """``cut`` with layers moved, each time by the move, or of few stages the two, that shorten the step most."""
    best = line.seconds(cut)
    while True:
        found = _best_of(line, _moved(line, cut), best, fits)
        if found is None and len(cut) <= PAIRS:
            found = _best_of(line, {two for one in _moved(line, cut) for two in _moved(line, one)}, best, fits)
        if found is None:
            return cut
        best, cut = found


def _best_of(
    line: Line, cuts: Iterable[tuple[int, ...]], best: float, fits: Callable[[tuple[int, ...]], bool]
) -> tuple[float, tuple[int, ...]] | None:
    """The one of ``cuts`` that has room and takes the least, with its seconds, where they are less than ``best``."""
    tried = sorted((line.seconds(cut), cut) for cut in cuts)
    return next(((time, cut) for time, cut in tried if time < best * _LESS and fits(cut)), None)


def _moved(line: Line, cut: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """``cut`` with one layer less on a stage and one more on another; none loses its last one."""
    busy, homes, few = line.busy(cut), line.homes, len(cut) <= FEW_STAGES
    fullest, emptiest = busy.index(max(busy)), busy.index(min(busy))
    for giver, count in enumerate(cut):
        if count < 2 or not (few or homes[giver] == fullest):
            continue
        for taker, home in enumerate(homes):
            if taker != giver and (few or home in (fullest, emptiest)):
                yield tuple(held - (at == giver) + (at == taker) for at, held in enumerate(cut))


def _sum(costs: Sequence[Cost], times: float = 1.0) -> Cost:
    return Cost(
        forward=times * sum(cost.forward for cost in costs),
        backward=times * sum(cost.backward for cost in costs),
        weight=times * sum(cost.weight for cost in costs),
    )


def _total(cost: Cost) -> float:
    return cost.forward + cost.backward + cost.weight


def _cost(phases: tuple[Spent, Spent, Spent]) -> Cost:
    forward, backward, weight = phases
    return Cost(forward=forward.total, backward=backward.total, weight=weight.total)
