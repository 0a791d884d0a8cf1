"""Predicted steps: the pipeline's closed forms against the simulator, what each choice costs, and published rows."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import defaultdict
from pathlib import Path

import pytest

from plait.core.events import bubble
from plait.core.topology import GemmPoint, Measured
from plait.models.config import PRESETS, ModelConfig, flops_per_token
from plait.planner.clusters import cluster
from plait.planner.constants import CONSTANTS, FIT_SOURCES
from plait.planner.cost import predict, stage_costs, timeline
from plait.planner.fast_simulate import makespan as simulated
from plait.planner.fit import measured
from plait.planner.job import Practice
from plait.planner.overlap import Pipeline, makespan, under
from plait.schedule.simulate import Cost
from tests.planner.jobs import LLAMA, MIXTRAL, job


def pipeline(name: str, ranks: int, m: int, scale: list[float], virtual: int, transfer: float = 0.0) -> Pipeline:
    return Pipeline(
        name=name,
        ranks=ranks,
        microbatches=m,
        forward=tuple(1.0 * x for x in scale),
        backward=tuple(1.1 * x for x in scale),
        weight=tuple(0.9 * x for x in scale),
        transfer=transfer,
    )


def exact(pipe: Pipeline) -> float:
    costs = [
        Cost(forward=f, backward=b, weight=w) for f, b, w in zip(pipe.forward, pipe.backward, pipe.weight, strict=True)
    ]
    return simulated(
        pipe.name,
        costs,
        ranks=pipe.ranks,
        microbatches=pipe.microbatches,
        virtual=pipe.virtual,
        transfer=pipe.transfer,
    )


@pytest.mark.parametrize("m", [1, 3, 8, 40])
@pytest.mark.parametrize(("name", "virtual"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 4)])
def test_equal_stages_are_exact(name: str, virtual: int, m: int) -> None:
    pipe = pipeline(name, 4, m, [1.0] * 4 * virtual, virtual)
    if name == "interleaved" and m % 4:
        assert makespan(pipe) == pytest.approx(exact(pipe), rel=0.1)
    else:
        assert makespan(pipe) == pytest.approx(exact(pipe))


@pytest.mark.parametrize(
    ("name", "virtual", "within"),
    [("1f1b", 1, 0.02), ("interleaved", 2, 0.09), ("zb-h1", 1, 1e-9), ("zb-h2", 1, 1e-9), ("zb-v", 2, 1e-9)],
)
def test_uneven_stages_against_the_simulator(name: str, virtual: int, within: float) -> None:
    for ranks in (2, 4, 8):
        for m in (4, 8, 32):
            for scale in ([1.0, 0.9, 1.1, 1.2], [1.0, 1.0, 1.0, 1.0]):
                stages = (scale * (ranks * virtual))[: ranks * virtual]
                stages[-1] += 0.5
                pipe = pipeline(name, ranks, m, stages, virtual)
                assert makespan(pipe) == pytest.approx(exact(pipe), rel=within)


def test_transfers_of_equal_stages_take_a_turn_each() -> None:
    pipe = pipeline("1f1b", 8, 32, [1.0] * 8, 1, transfer=0.1)
    assert makespan(pipe) == pytest.approx(exact(pipe), rel=0.01)
    assert makespan(pipe) > makespan(dataclasses.replace(pipe, transfer=0.0)) + 32 * 0.1


def test_two_weight_versions_never_flush() -> None:
    pipe = pipeline("2bw", 4, 16, [1.0] * 4, 1)
    assert makespan(pipe) == pytest.approx(16 * 3.0)


def test_communication_under_compute() -> None:
    share = under(3.0, 2.0, 0.25)
    assert (share.exposed, share.hidden, share.slowing) == (1.0, 2.0, 0.5)
    assert under(1.0, 0.0, 0.25).added == 1.0


PLANS = [
    "",
    "tp=8",
    "pp=8 micro=1",
    "pp=4 schedule=interleaved virtual=2",
    "pp=4 schedule=zb-h1",
    "pp=4 schedule=zb-v virtual=2",
    "pp=2 schedule=auto",
    "pp=2 schedule=2bw",
    "zero=3",
    "zero=1 zero_group=2",
    "cp=8",
    "cp=4 context=ulysses",
    "cp=4 context=gather",
    "tp=2 pp=2 recompute=full",
    "recompute='full:0-3 selective:4-7'",
    "precision=fp8",
]


@pytest.mark.parametrize("plan", PLANS)
def test_the_parts_of_a_rank_make_up_its_step(plan: str) -> None:
    given = job(plan)
    found = predict(given)
    assert len(found.ranks) == given.plan.pp
    for rank in found.ranks:
        parts = [rank.compute, rank.bubble, rank.optimizer, rank.other, *rank.exposed.values(), *rank.hidden.values()]
        assert all(0 <= part < math.inf for part in parts)
        spent = rank.compute + rank.bubble + rank.optimizer + rank.other + sum(rank.exposed.values())
        assert spent == pytest.approx(found.step_time, rel=1e-9)
    assert found.low < found.step_time < found.high
    assert found.mfu is not None
    assert 0.02 < found.mfu < 1
    tokens = given.global_batch * given.seq
    assert found.model_flops == pytest.approx(flops_per_token(LLAMA, given.seq) * tokens)
    assert found.tokens_per_s_per_device == pytest.approx(tokens / found.step_time / given.world_size)


def test_the_parts_of_ranks_that_share_cores_make_up_the_step() -> None:
    """Ranks that take turns are busy for less than their sums while others wait."""
    given = job("pp=4 micro=2", devices=4, model=PRESETS["gpt2"], seq=256, batch=16, practice=Practice())
    device = dataclasses.replace(given.topology.device, name="some cpu", kind="cpu", peaks={"fp32": 1e11, "bf16": 1e11})
    few, enough = (
        dataclasses.replace(given, topology=dataclasses.replace(given.topology, device=device, cores=cores))
        for cores in (2, 4)
    )
    found = predict(few)
    assert found.ranks[-1].compute < predict(enough).ranks[-1].compute, "the rank with the head works while others wait"
    for rank in found.ranks:
        spent = rank.compute + rank.bubble + rank.optimizer + rank.other + sum(rank.exposed.values())
        assert spent == pytest.approx(found.step_time, rel=1e-9)


def step(plan: str, **given: object) -> float:
    return predict(job(plan, **given)).step_time  # type: ignore[arg-type]


def test_choices_cost_what_they_should() -> None:
    assert step("recompute=full") / step("") == pytest.approx(4 / 3, abs=0.08)
    assert 1 < step("recompute=selective") / step("") < 1.15
    assert step("precision=fp8") < step("")
    assert step("tp=8") > step("tp=2") > step("")
    assert step("pp=8 micro=8") > step("pp=8 micro=1") > step("pp=8 micro=1 schedule=zb-h2")
    assert step("", on="a100-80g") > 1.8 * step("", on="h100")
    assert step("", batch=128) == pytest.approx(2 * step(""), rel=0.1)


def test_tensor_parallelism_across_nodes_is_worse_than_within() -> None:
    inside = predict(job("tp=8", devices=16))
    across = predict(job("tp=16", devices=16, model=dataclasses.replace(LLAMA, num_kv_heads=32)))
    assert across.ranks[0].exposed["tp"] > 2 * inside.ranks[0].exposed["tp"]


def test_practices() -> None:
    def with_(plan: str, **practice: object) -> float:
        return step(plan, practice=Practice(**practice))  # type: ignore[arg-type]

    assert with_("", overlap_grads=False) > with_("")
    assert with_("zero=3", overlap_weights=False) > with_("zero=3")
    assert with_("tp=8", overlap_tp=True) < with_("tp=8")
    assert with_("", attention="unfused") > with_("")
    assert with_("", fused=True) < with_("")
    assert with_("pp=4 tp=2", overlap_pp=False) > with_("pp=4 tp=2")


def test_the_host_sets_the_pace_of_small_models() -> None:
    tiny = {"model": PRESETS["gpt2"], "seq": 128, "batch": 64}
    slow = step("micro=1", **tiny)
    assert step("micro=1", **tiny, practice=Practice(graph=True)) < 0.5 * slow
    assert slow == pytest.approx(2 * step("micro=2", **tiny), rel=0.3), "launches, not tokens"


def test_experts() -> None:
    def with_(**practice: object) -> float:
        return step("ep=8", model=MIXTRAL, practice=Practice(**practice))  # type: ignore[arg-type]

    assert with_(balanced=True) < with_()
    assert with_(overlap_ep=True) < with_()
    assert predict(job("ep=8", model=MIXTRAL)).ranks[0].exposed["ep"] > 0


def test_casting_many_experts_rows_takes_the_host_longer_than_casting_them_at_once() -> None:
    """Where each expert gets few rows, and no graph replays the launches."""
    assert MIXTRAL.moe is not None
    many = dataclasses.replace(MIXTRAL, moe=dataclasses.replace(MIXTRAL.moe, num_experts=128, ffn_size=1024))

    def with_(recipe: str, *, graph: bool = False) -> float:
        practice = Practice(fp8=recipe, graph=graph, fused=True, balanced=True)
        return step("ep=8 micro=1 precision=fp8", model=many, seq=1024, practice=practice)

    assert with_("mxfp8") > 1.2 * with_("blockwise")
    assert with_("mxfp8", graph=True) == with_("blockwise", graph=True)


@pytest.mark.parametrize(
    ("devices", "model", "kind"),
    [(8, LLAMA, "dense"), (16, LLAMA, "dense_nodes"), (8, MIXTRAL, "experts"), (16, MIXTRAL, "experts_nodes")],
)
def test_the_interval_is_that_of_its_kind(devices: int, model: ModelConfig, kind: str) -> None:
    found = predict(job("ep=8" if model.moe else "", devices=devices, model=model))
    assert math.log(found.high / found.step_time) == pytest.approx(CONSTANTS[f"spread.{kind}"].value)
    assert math.log(found.step_time / found.low) == pytest.approx(CONSTANTS[f"spread.{kind}"].value)


def test_timeline_is_the_pipeline_of_the_stage_costs() -> None:
    given = job("pp=4 micro=2")
    events = timeline(given)
    costs = stage_costs(given)
    assert len(costs) == 4
    work = [event for event in events if event.kind in "FB"]
    assert len(work) == 2 * 4 * given.microbatches
    busy = sum(event.end - event.start for event in work if event.rank == 0)
    assert busy == pytest.approx(given.microbatches * (costs[0].forward + costs[0].backward + costs[0].weight))
    assert 0 < bubble(work, 4).rate < 0.5
    assert {event.kind for event in events} >= {"F", "B", "SEND_F", "optimizer"}


def test_measured_points_of_a_machine_are_used() -> None:
    topology = cluster("h100", 8)
    gemm = (GemmPoint(m=4096, n=4096, k=4096, precision="bf16", seconds=2.0 * 4096**3 / 50e12),)
    slow = dataclasses.replace(job(""), topology=dataclasses.replace(topology, measured=Measured(gemm=gemm)))
    assert predict(slow).step_time > 5 * predict(job("")).step_time


def test_predictions_are_repeatable_and_quick() -> None:
    import time

    given = [job(f"pp=4 tp={tp} micro={micro}", devices=64) for tp in (1, 2, 4) for micro in (1, 2, 4)]
    first = [predict(one).step_time for one in given]
    began = time.process_time()
    again = [predict(one).step_time for one in given * 10]
    assert again == first * 10
    assert (time.process_time() - began) / 90 < 5e-3


def test_published_step_times(shared: Path) -> None:
    """The fit holds on the sources it was made on, and on those that are held out."""
    errors: dict[str, list[float]] = defaultdict(list)
    for key, pairs in measured(str(shared / "published" / "published.jsonl"), None).items():
        errors[key.partition(",")[0]] += [abs(predict(given).step_time / time - 1) for given, time in pairs]
    medians = {source: statistics.median(found) for source, found in errors.items()}
    assert all(medians[source] < 0.08 for source in FIT_SOURCES), medians
    unseen = [error for source, found in errors.items() if source not in FIT_SOURCES for error in found]
    assert statistics.median(unseen) < 0.08
    assert statistics.quantiles(unseen, n=10)[-1] < 0.22
