"""The bounds of the search against the models they bound, what it answers, and its speed."""

from __future__ import annotations

import dataclasses
import random
import time

import pytest

from plait.core.errors import ConfigError, PlanError
from plait.core.mesh import ORDERS
from plait.core.plan import Plan
from plait.models.config import PRESETS, ModelConfig, MoEConfig
from plait.planner.bounds import Bounds
from plait.planner.cells import cells
from plait.planner.clusters import cluster
from plait.planner.cost import predict
from plait.planner.losers import simplicity
from plait.planner.memory import memory
from plait.planner.search import search
from plait.planner.space import Request, plan_of
from plait.planner.why import Candidate, reason
from tests.planner.searches import DENSE, nodes_of, request


@pytest.mark.parametrize(
    ("model", "name", "gpus", "batch", "keys"),
    [
        (PRESETS["llama3-8b"], "h100", 64, 64, {}),
        (PRESETS["mixtral-8x7b"], "a100-80g", 64, 64, {}),
        (PRESETS["deepseek-v3"], "h800", 512, 512, {}),
        (PRESETS["llama3-8b"], "b200", 144, 72, {"precision": "fp8"}),
        (PRESETS["gpt2"], "mi300x", 16, 32, {"precision": "fp32"}),
        (PRESETS["bench-moe"], "tpu-v6e", 12, 24, {"fix": {"schedule": "interleaved"}}),
    ],
    ids=("dense", "experts", "latent", "fp8", "fp32", "no launches"),
)
def test_bounds_are_bounds(model: ModelConfig, name: str, gpus: int, batch: int, keys: dict[str, str]) -> None:
    asked = Request(model=model, topology=cluster(name, gpus), world_size=gpus, seq=1024, global_batch=batch, **keys)  # type: ignore[arg-type]
    bounds = Bounds(asked)
    draw = random.Random(name)
    found = list(cells(asked))
    bounds.lay(found[0])
    tightness = []
    for cell in draw.sample(found, min(12, len(found))):
        roughly, alike = bounds.cells.roughly(cell), bounds.cells.alike(cell)
        leaves = bounds.leaves(cell, all_of_them=True)
        if leaves is None:
            continue
        for place in draw.sample(range(len(leaves)), min(8, len(leaves))):
            leaf = leaves.leaf(place)
            plan = plan_of(asked, cell, leaf.form)
            took = predict(asked.job(plan)).step_time
            assert roughly <= took, (cell, str(plan))
            assert alike <= took, (cell, str(plan))
            assert leaf.bound <= took, str(plan)
            held = memory(asked.job(plan)).fullest.peak
            # Of plans that fit alone.
            assert bounds.cells.closely(cell) <= took or held > asked.memory, (cell, str(plan))
            least = bounds.peak(leaf)
            assert least <= held, str(plan)
            tightness.append((leaf.bound / took, least / held))
    for one, enough in zip(zip(*tightness, strict=True), (0.6, 0.8), strict=True):
        assert sorted(one)[len(tightness) // 2] > enough


def test_axes_are_laid_on_tiers_as_is_faster() -> None:
    """Long samples: transfers between stages are most of what crosses a slow network, unless stages share nodes."""
    keys = {"world_size": 16, "seq": 32768, "global_batch": 32, "fix": {"pp": 4, "dp": 2, "tp": 2}, "top": 3}
    slow, fast = (nodes_of(8, 16, network) for network in (0.1, 1e3))
    found = search(DENSE, slow, **keys)  # type: ignore[arg-type]
    assert found.best is not None and found.best.plan.order == "dp-pp-cp-tp"
    assert "order=pp-dp-cp-tp" in {loser.kind for loser in found.losers}
    usual = search(DENSE, slow, **{**keys, "fix": {"pp": 4, "dp": 2, "tp": 2, "order": ORDERS[0]}}, losers=False)  # type: ignore[arg-type]
    assert usual.best is not None
    assert usual.best.prediction.step_time > found.best.prediction.step_time
    assert {one.plan.order for one in search(DENSE, fast, **keys, losers=False).ranked[:2]} == {"pp-dp-cp-tp"}  # type: ignore[arg-type]


def test_a_form_that_does_not_fit_is_tried_with_layers_recomputed_however_slow_its_other_ways_are() -> None:
    """Of its two orders of axes one does not fit, and the other takes longer than the best plan until then."""
    fix = {"pp": 2, "dp": 2, "tp": 2, "cp": 2, "micro": 1, "schedule": "interleaved", "zero": 2}
    keys = {"world_size": 16, "seq": 8192, "global_batch": 16, "top": 1, "losers": False, "fix": fix}
    deep = dataclasses.replace(DENSE, num_layers=8)
    found = search(deep, nodes_of(8, 16, 0.05), max_memory=0.128, **keys).best  # type: ignore[arg-type]
    assert found is not None
    assert found.plan.recompute == "selective:0"


def test_stages_are_cut_by_time_and_memory_at_once() -> None:
    """Long samples on a deep pipeline: early stages hold many microbatches, and layers move to late ones."""
    fix: dict[str, object] = {"schedule": "1f1b", "pp": 8, "tp": 8, "cp": 1, "micro": 1}
    wide = dataclasses.replace(
        DENSE, vocab_size=128256, hidden_size=8192, num_layers=80, num_heads=64, ffn_size=28672, max_positions=16384
    )
    keys = {"world_size": 64, "seq": 16384, "global_batch": 64, "max_memory": 0.5, "top": 1, "losers": False}
    found = search(wide, cluster("a100-80g", 64), fix=fix, **keys).best  # type: ignore[arg-type]
    even = search(wide, cluster("a100-80g", 64), fix={**fix, "stages": (10,) * 8}, **keys).best  # type: ignore[arg-type]
    assert found is not None and even is not None
    assert found.plan.stages is not None and found.plan.stages[0] < found.plan.stages[-2]
    assert ":" in found.plan.recompute
    assert found.prediction.step_time < 0.96 * even.prediction.step_time


def test_given_keys_are_kept_and_numbers_that_make_no_request_are_refused() -> None:
    asked = {"world_size": 8, "seq": 4096, "global_batch": 16}
    topology = cluster("a100-80g", 8)
    found = search(DENSE, topology, **asked, fix={"tp": 2, "schedule": "gpipe", "zero": 1}, losers=False)
    assert {(one.plan.tp, one.plan.zero) for one in found.ranked} == {(2, 1)}
    assert {one.plan.schedule for one in found.ranked} == {"gpipe"}
    with pytest.raises(ConfigError, match="unknown key 'tpp' in a plan"):
        search(DENSE, topology, **asked, fix={"tpp": 2})
    with pytest.raises(ConfigError, match="16 ranks on 8 devices"):
        search(DENSE, topology, world_size=16, seq=4096, global_batch=16)
    with pytest.raises(ConfigError, match=r"max_memory=1\.5"):
        search(DENSE, topology, **asked, max_memory=1.5)
    with pytest.raises(
        PlanError, match="dp=8 is in no plan for 8 ranks: micro=1 with dp=8: a global batch of 3 is not"
    ):
        search(DENSE, topology, world_size=8, seq=4096, global_batch=3, fix={"dp": 8})


def test_a_request_that_cannot_be_met_says_what_is_nearest() -> None:
    found = search(PRESETS["llama3-8b"], cluster("a100-40g", 2), world_size=2, seq=8192, global_batch=8)
    assert found.best is None and found.nearest is not None
    assert found.nearest.memory.fullest.peak > found.request.memory
    assert "more memory" in found.advice[0] and "stage" in found.advice[0]
    assert any(word in found.advice[-1] for word in ("devices", "seq=", "max_memory"))


def test_losers_say_why() -> None:
    found = search(PRESETS["llama3-8b"], cluster("h100", 32), world_size=32, seq=4096, global_batch=64)
    why = {loser.kind: loser.why for loser in found.losers}
    assert {"pp=2", "tp=2", "recompute=full", "schedule=gpipe", "zero=0"} <= why.keys()
    assert "FLOPs for recompute=full" in why["recompute=full"]
    assert "GiB of" in why["zero=0"]
    best = found.ranked[0].prediction.step_time
    for loser in found.losers:
        assert not loser.candidate.fits(found.request.memory) or loser.candidate.prediction.step_time >= best


def test_a_losing_kind_is_shown_by_its_best_plan() -> None:
    asked = {"world_size": 64, "seq": 8192, "global_batch": 256}
    found = search(PRESETS["llama3-8b"], cluster("h100", 64), top=5, **asked)  # type: ignore[arg-type]
    shown = {loser.kind: loser.candidate.prediction.step_time for loser in found.losers}
    for one in found.ranked:
        for kind in ("pp", "tp", "cp", "micro", "schedule", "zero"):
            kinds = f"{kind}={getattr(one.plan, kind)}"
            assert shown.get(kinds, 0.0) <= one.prediction.step_time * (1 + 1e-9), kinds
    for kind in ("tp", "cp"):
        best = search(PRESETS["llama3-8b"], cluster("h100", 64), top=1, losers=False, fix={kind: 2}, **asked).best  # type: ignore[arg-type]
        assert best is not None
        assert shown[f"{kind}=2"] == pytest.approx(best.prediction.step_time)


def test_reasons_name_what_takes_the_time() -> None:
    asked = request(DENSE, 32, global_batch=64)

    def candidate(text: str) -> Candidate:
        job = asked.job(Plan.parse(f"{text} precision=bf16"))
        return Candidate(plan=job.plan, prediction=predict(job), memory=memory(job))

    best = candidate("tp=2 dp=16 zero=1")
    wide = reason(asked, "tp=16", candidate("tp=16 dp=2 zero=1"), best)
    assert "tp=16 crosses the nvlink domains of 8: all-gather and reduce-scatter" in wide
    whole = reason(asked, "tp=16", candidate("tp=16 dp=2 zero=1 sequence_parallel=false"), best)
    assert "compute" in whole and "recompute" not in whole
    deep = reason(asked, "pp=4", candidate("tp=2 pp=4 dp=4 micro=4 zero=1 schedule=gpipe"), best)
    assert "bubble" in deep and "4 microbatches on pp=4" in deep
    tight = dataclasses.replace(asked, max_memory=0.1)
    assert "stage 0 needs" in reason(tight, "dp=32", candidate("dp=32"), best)


def test_among_equals_the_simpler_plan_is_first() -> None:
    texts = ["pp=2", "pp=2 zero=1", "pp=2 schedule=gpipe", "pp=2 schedule=zb-v virtual=2 cp=2"]
    assert sorted(map(Plan.parse, reversed(texts)), key=simplicity) == [Plan.parse(text) for text in texts]


def test_planning_needs_no_torch() -> None:
    import subprocess
    import sys

    code = "import plait.planner.commands, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_405b_on_16384_devices_is_planned_in_seconds() -> None:
    """Processor time, so that other work on the machine does not count; aim 2 s (docs/planning.md has the figure)."""
    model = ModelConfig(
        vocab_size=128256,
        hidden_size=16384,
        num_layers=126,
        num_heads=128,
        num_kv_heads=8,
        ffn_size=53248,
        max_positions=131072,
    )
    before = time.process_time()
    found = search(model, cluster("h100", 16384), world_size=16384, seq=8192, global_batch=2048, top=1, losers=False)
    assert time.process_time() - before < 4
    assert found.best is not None
    assert found.considered > 1_000_000
    assert found.predicted < 500


def test_a_thousand_billion_parameters_of_experts_are_planned_in_seconds() -> None:
    """On 4,096 devices; so many cells that a few kinds are left out. Aim 5 s (docs/planning.md has the figure)."""
    model = ModelConfig(
        family="qwen3_moe",
        vocab_size=151936,
        hidden_size=8192,
        num_layers=64,
        num_heads=64,
        num_kv_heads=8,
        ffn_size=24576,
        max_positions=40960,
        head_dim=128,
        moe=MoEConfig(num_experts=256, top_k=8, ffn_size=2560, shared_ffn=2560),
    )
    before = time.process_time()
    found = search(model, cluster("h100", 4096), world_size=4096, seq=4096, global_batch=4096, top=1, losers=False)
    assert time.process_time() - before < 10
    assert found.best is not None
    assert "tp without sequence parallelism" in found.narrowed
    assert found.considered > 1_000_000


@pytest.mark.parametrize(
    ("fix", "says"),
    [
        ({"tp": 0}, "tp=0 is below 1"),
        ({"micro": 0}, "micro=0 is below 1"),
        ({"schedule": "zigzag"}, "schedule=zigzag: neither a schedule"),
        ({"order": "tp-first"}, "order=tp-first is unknown; what works: order=pp-dp-cp-tp or order=dp-pp-cp-tp"),
        ({"stages": (1, 2)}, "stages=1,2 sums to 3"),
        ({"stages": (40, -8), "pp": 2}, "stages=40,-8: only the first and the last stage"),
        ({"recompute": "some"}, "recompute: 'some' is neither"),
        ({"gather": "step", "zero": 1}, "gather=step: only zero=3"),
        ({"ep": 2}, "the model has no experts"),
        ({"live": 8}, "live=8: only schedule=auto"),
        ({"precision": "fp8"}, "precision=fp8: A100-80GB-SXM has no such units; what works: precision=bf16"),
        (
            {"zero": 2, "schedule": "2bw"},
            "zero=2 with schedule=2bw is in no plan for 8 ranks: schedule=2bw: two versions",
        ),
        ({"stages": (6, 6, 6, 6, 8)}, "stages=6,6,6,6,8 is in no plan for 8 ranks: stages=6,6,6,6,8 has 5 counts"),
    ],
)
def test_a_given_key_that_no_plan_can_have_is_the_reason(fix: dict[str, object], says: str) -> None:
    with pytest.raises(PlanError) as caught:
        search(PRESETS["llama3-8b"], cluster("a100-80g", 8), world_size=8, seq=512, global_batch=16, fix=fix)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_experts_that_do_not_fit_say_so_for_any_number_of_devices() -> None:
    for gpus in (1, 8):
        found = search(PRESETS["deepseek-v3"], cluster("h100", gpus), world_size=gpus, seq=512, global_batch=8)
        assert not found.ranked
        assert "more memory" in found.advice[0]


def test_a_given_cut_stays_where_nothing_fits() -> None:
    found = search(
        PRESETS["llama3-8b"],
        cluster("a100-40g", 4),
        world_size=4,
        seq=8192,
        global_batch=4,
        max_memory=0.2,
        fix={"stages": (7, 8, 8, 9)},
    )
    assert found.nearest is not None
    assert found.nearest.plan.stages == (7, 8, 8, 9)
