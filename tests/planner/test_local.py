"""Ranks that share cores: work is conserved, bubbles are filled by others, and a core of one's own is the limit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.core.plan import Plan
from plait.core.topology import CommPoint, Device, Measured, MeetingPoint, Tier, Topology
from plait.models.config import PRESETS
from plait.planner.clusters import cluster
from plait.planner.cost import predict, stage_costs
from plait.planner.job import PLAIT, Job
from plait.planner.local import doubt, meeting, practice, span_of, turns
from plait.planner.overlap import Pipeline, makespan
from plait.planner.search import search
from plait.planner.space import Request


def _pipe(ranks: int, microbatches: int, name: str = "1f1b", virtual: int = 1) -> Pipeline:
    stages = ranks * virtual
    return Pipeline(
        name=name,
        ranks=ranks,
        microbatches=microbatches,
        forward=(1.0,) * stages,
        backward=(1.0,) * stages,
        weight=(1.0,) * stages,
    )


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (3, 2)])
def test_with_a_core_for_each_it_is_the_usual_makespan(name: str, ranks: int, microbatches: int) -> None:
    pipe = _pipe(ranks, microbatches, name)
    assert turns(pipe, 1, ranks, 0.0, 1.0) == pytest.approx(makespan(pipe))
    assert turns(pipe, 2, 2 * ranks, 0.0, 1.0) == pytest.approx(makespan(pipe))


def test_copies_fill_each_others_bubbles() -> None:
    # Two copies of two stages on two cores: whatever stage works, both of its copies do, so no core is ever idle.
    pipe = _pipe(2, 4)
    assert turns(pipe, 2, 2, 0.0, 1.0) == pytest.approx(4 * 3.0)
    assert makespan(pipe) == pytest.approx(5 * 3.0)


def test_a_rank_alone_has_no_more_than_a_core() -> None:
    # Four stages on two cores: the seconds are of ranks that share, so one alone takes half as long, not a quarter.
    pipe = _pipe(4, 1)
    assert turns(pipe, 1, 2, 0.0, 1.0) == pytest.approx(4 * 3.0 / 2)
    assert turns(pipe, 1, 1, 0.0, 1.0) == pytest.approx(4 * 3.0 / 4)


def test_a_core_of_its_own_spares_a_rank_the_crowd() -> None:
    # The seconds of ranks that share hold the crowding: it stays where all work, and is gone where one stage does.
    assert 4 * 3.0 / 1.2 < turns(_pipe(2, 4), 2, 2, 0.0, 1.2) < 4 * 3.0
    assert turns(_pipe(4, 1), 1, 2, 0.0, 1.2) == pytest.approx(4 * 3.0 / 2 / 1.2)
    assert turns(_pipe(2, 4), 1, 2, 0.0, 1.2) == pytest.approx(makespan(_pipe(2, 4)))


def test_meetings_cost_what_was_measured() -> None:
    points = [(2, 1e-2, 1e-3), (2, 1e-1, 3e-3), (4, 1e-2, 5e-3)]
    measured = Measured(meetings=tuple(MeetingPoint(ranks=n, apart=a, seconds=s) for n, a, s in points))
    for apart, seconds in ((1e-4, 1e-3), (1e-2, 1e-3), (10**-1.5, 2e-3), (1e-1, 3e-3), (5.0, 3e-3)):
        assert meeting(measured, 2, apart) == pytest.approx(seconds)
    assert meeting(measured, 16, 1.0) == 5e-3, "of the nearest size"
    assert meeting(measured, 1, 1.0) == meeting(Measured(), 2, 1.0) == 0.0


def test_collectives_of_tensor_ranks_are_meetings() -> None:
    plan = Plan.parse("tp=2 dp=1 micro=2")
    job = Job(model=PRESETS["tiny"], plan=plan, topology=_topology(2), seq=64, global_batch=4)
    late = MeetingPoint(ranks=2, apart=1.0, seconds=1e-3)
    topology = replace(job.topology, measured=replace(job.topology.measured, meetings=(late,)))
    (before,), (after,) = stage_costs(job), stage_costs(replace(job, topology=topology))
    layers = PRESETS["tiny"].num_layers
    assert after.forward - before.forward == pytest.approx(1e-3 * (4 * layers + 2), rel=0.1)
    assert after.backward - before.backward == pytest.approx(1e-3 * (4 * layers + 1), rel=0.1)
    assert after.weight == pytest.approx(before.weight, rel=0.1), "its gathers run beside it"


def test_figures_to_be_taken_with_care_say_so() -> None:
    quiet = _topology(2)
    assert doubt(quiet) == ""
    for measured, words in (
        (Measured(busy=0.4), "measured on a busy machine: other programs took 40% of its cores"),
        (Measured(busy=0.01, spread=0.3), "measured on an unsteady machine: passes lay 30% apart"),
    ):
        assert doubt(replace(quiet, measured=measured)) == words
    assert doubt(replace(quiet, source="estimated; plait calibrate measures")).startswith("estimated")


def test_waiting_takes_its_share() -> None:
    pipe = _pipe(4, 8)
    free, taken = turns(pipe, 1, 2, 0.0, 1.0), turns(pipe, 1, 2, 0.2, 1.0)
    assert free < taken < 1.2 * free
    assert free >= 8 * 3.0  # all the work there is, on both cores


def _topology(cores: int | None, size: int = 8) -> Topology:
    device = Device(name="cpu", memory=8e9, peaks={"fp32": 1e11}, bandwidth=1e10, kind="cpu")
    tier = Tier(name="host", size=size, bandwidth=1e9, latency=1e-5)
    return Topology(name="host", device=device, devices=4, tiers=(tier,), cores=cores, measured=Measured(waiting=0.1))


def test_only_crowded_hosts_take_turns() -> None:
    plan = Plan.parse("pp=2 dp=2")
    pipe = _pipe(2, 4)
    job = Job(model=PRESETS["tiny"], plan=plan, topology=_topology(2), seq=64, global_batch=8)
    crowded = span_of(pipe, job)
    assert crowded == turns(pipe, 2, 2, 0.1, 1.0) < makespan(pipe)
    for topology in (_topology(4), _topology(None), _topology(2, size=2)):
        assert span_of(pipe, replace(job, topology=topology)) == makespan(pipe)


def test_a_search_finds_pipelines_that_take_turns() -> None:
    """Stages fill each other's bubbles on shared cores: bounds must not take them for idle."""
    slow = tuple(
        CommPoint(op="all_reduce", tier="host", ranks=4, size=size, seconds=size * 1e-8) for size in (1e3, 1e8)
    )
    topology = replace(_topology(2), measured=Measured(crowding=1.2, comm=slow))
    model = replace(PRESETS["tiny"], num_layers=4)
    fix = {"tp": 1, "cp": 1, "zero": 0, "recompute": "none"}
    words = {"seq": 64, "global_batch": 8, "precision": "fp32", "practice": practice(topology)}
    found = search(model, topology, world_size=4, fix=fix, top=1, **words)  # type: ignore[arg-type]
    request = Request(model=model, topology=topology, world_size=4, **words)  # type: ignore[arg-type]
    texts = ("dp=4", "pp=2 dp=2", "pp=2 dp=2 micro=2", "pp=4", "pp=4 micro=2", "pp=4 micro=4")
    listed = {text: predict(request.job(Plan.parse(text).resolve(4))).step_time for text in texts}
    assert found.best is not None
    assert "pp=" in min(listed, key=lambda text: listed[text])
    assert found.best.prediction.step_time <= min(listed.values())


def test_a_cpu_hides_nothing() -> None:
    assert practice(cluster("h100", 8)) == PLAIT
    assert not practice(_topology(2)).overlap_grads
