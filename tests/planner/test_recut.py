"""The cut for ranks of unequal speed, held against all cuts where they can be listed."""

from __future__ import annotations

import dataclasses
import itertools
import random
import shlex
from pathlib import Path

import pytest

from plait.core.legal import check
from plait.core.plan import Plan
from plait.models.config import PRESETS
from plait.parallel.layout import model_shape, stage_layers
from plait.planner.clusters import cluster
from plait.planner.cost import stage_costs
from plait.planner.job import Job
from plait.planner.recut import Line, Parts, best_cut, levelled, parts_of, slowness
from plait.schedule.generate import generate
from plait.schedule.simulate import Cost
from tests.planner.jobs import job

KINDS = {"1f1b": 1, "gpipe": 1, "zb-h1": 1, "2bw": 1, "interleaved": 2, "zb-v": 2, "dualpipe-v": 2}
"""Schedule -> stages a rank."""


def seconds(x: float) -> Cost:
    return Cost(forward=x, backward=1.1 * x, weight=0.9 * x)


def drawn(schedule: str, seed: int) -> tuple[Line, list[tuple[int, ...]]]:
    """A small pipeline of ranks of unequal speed, and all its cuts."""
    dice = random.Random(seed)
    ranks = dice.choice([2, 3] if KINDS[schedule] == 2 else [2, 3, 4])
    stages = ranks * KINDS[schedule]
    layers = stages + dice.randrange(6)
    alike = dice.random() < 0.5
    line = Line(
        plan=Plan(pp=ranks, virtual=KINDS[schedule], schedule=schedule),
        parts=Parts(
            layers=tuple(seconds(1.0 if alike else dice.choice([0.5, 1.0, 2.0])) for _ in range(layers)),
            embedding=seconds(0.1),
            head=seconds(dice.choice([0.3, 1.5])),
        ),
        slow=tuple(dice.choice([1.0, 1.0, 1.5, 2.0, 3.0]) for _ in range(ranks)),
        microbatches=ranks * dice.choice([2, 4]),
    )
    bounds = ((0, *inner, layers) for inner in itertools.combinations(range(1, layers), stages - 1))
    return line, [tuple(stop - start for start, stop in itertools.pairwise(one)) for one in bounds]


def anywhere(cut: tuple[int, ...]) -> bool:
    return True


@pytest.mark.parametrize("schedule", KINDS)
def test_no_cut_is_better(schedule: str) -> None:
    """Neither is the fullest rank of another cut less full, nor is its simulated step shorter."""
    for seed in range(6):
        line, cuts = drawn(schedule, seed)
        level = levelled(line, max(line.busy(cuts[0])))
        assert level is not None
        assert max(line.busy(level)) == pytest.approx(min(max(line.busy(cut)) for cut in cuts), rel=1e-9)
        found = best_cut(line, random.Random(seed).choice(cuts), anywhere)
        assert line.seconds(found) == pytest.approx(min(map(line.seconds, cuts)), rel=1e-9)


def test_a_rank_three_times_as_slow_gets_a_third_of_the_layers() -> None:
    """Without embedding and head: 3 + 9 layers at 3 : 1 take both ranks 9 layers' time."""
    nothing = seconds(0.0)
    parts = Parts(layers=(seconds(1.0),) * 12, embedding=nothing, head=nothing)
    line = Line(plan=Plan(pp=2), parts=parts, slow=(1.0, 3.0), microbatches=64)
    assert best_cut(line, (6, 6), anywhere) == (9, 3)
    assert line.busy((9, 3)) == [27.0, 27.0]


def test_a_cut_that_has_no_room_is_not_taken_and_what_is_best_stays() -> None:
    parts = Parts(layers=(seconds(1.0),) * 12, embedding=seconds(0.0), head=seconds(0.0))
    line = Line(plan=Plan(pp=2), parts=parts, slow=(1.0, 3.0), microbatches=64)
    assert best_cut(line, (6, 6), lambda cut: max(cut) <= 7) == (7, 5)
    assert best_cut(line, (6, 6), lambda cut: False) == (6, 6)
    assert best_cut(line, (9, 3), anywhere) == (9, 3)


def test_ends_without_layers_are_legal_to_begin_with() -> None:
    line, _ = drawn("1f1b", 1)
    layers, stages = len(line.parts.layers), line.plan.pp
    first = (0, layers - stages + 2, *(1,) * (stages - 2)) if stages > 2 else (0, layers)
    found = best_cut(line, first, anywhere)
    assert line.seconds(found) <= line.seconds(first)


@pytest.mark.parametrize("schedule", KINDS)
def test_what_is_found_is_legal(schedule: str) -> None:
    model = dataclasses.replace(PRESETS["tiny"], num_layers=12)
    plan = Plan(pp=2, dp=1, virtual=KINDS[schedule], schedule=schedule)
    one = Job(model=model, plan=plan, topology=cluster("h100", 2), seq=128, global_batch=8)
    line = Line(plan=plan, parts=parts_of(one), slow=(2.0, 1.0), microbatches=8)
    now = stage_layers(model, plan)
    cut = best_cut(line, now, anywhere)
    assert line.seconds(cut) < line.seconds(now)
    check(dataclasses.replace(plan, stages=cut), model_shape(model), world_size=2, global_batch=8, seq=128)


def test_speeds_come_back_from_the_seconds_that_they_make() -> None:
    line, cuts = drawn("interleaved", 3)
    spent = [busy * line.microbatches for busy in line.busy(cuts[-1])]
    assert slowness(line.parts, line.plan, cuts[-1], spent, line.microbatches) == pytest.approx(line.slow)


def test_a_rank_without_layers_is_taken_to_be_like_the_others() -> None:
    parts = Parts(layers=(seconds(1.0),) * 4, embedding=seconds(0.001), head=seconds(0.001))
    told = slowness(parts, Plan(pp=3), (0, 2, 2), [5.0, 12.0, 12.006], 1)
    assert told == pytest.approx([2.0, 2.0, 2.0], rel=1e-3)


@pytest.mark.parametrize("recompute", ["none", "full", "full:0-3 selective:4"])
def test_parts_add_up_to_the_stages_of_the_time_model(recompute: str) -> None:
    """Where the device, not the host, is the pace."""
    one = job(f"pp=4 recompute={shlex.quote(recompute)}", devices=4, batch=8)
    stages = parts_of(one).stages(stage_layers(one.model, one.plan))
    for mine, whole in zip(stages, stage_costs(one), strict=True):
        assert (mine.forward, mine.backward, mine.weight) == pytest.approx(
            (whole.forward, whole.backward, whole.weight), rel=0.03
        )


def test_the_schedule_of_a_file_is_the_one_that_is_simulated(tmp_path: Path) -> None:
    file = tmp_path / "mine.schedule"
    file.write_text(generate("gpipe", ranks=2, microbatches=4).text())
    line, _ = drawn("gpipe", 0)
    line = dataclasses.replace(line, plan=Plan(pp=2, schedule="gpipe"), slow=(1.0, 2.0), microbatches=4)
    cut = (1, len(line.parts.layers) - 1)
    own = dataclasses.replace(line, plan=Plan(pp=2, schedule=str(file)))
    assert own.seconds(cut) == pytest.approx(line.seconds(cut))
    assert best_cut(own, cut, anywhere) == best_cut(line, cut, anywhere)
