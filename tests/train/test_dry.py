"""``plait train --dry``: what it announces is what a run holds."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import time

import pytest

from plait.core.config import dump, load, loads
from plait.models.config import parameter_shapes
from plait.planner.state import holdings, place_of
from plait.train import dry
from plait.train.run import build, prepare
from tests.pool import Connect, Pool

SMALL = (
    "model.hidden_size=32", "model.num_layers=4", "model.num_heads=4", "model.num_kv_heads=2", "model.ffn_size=48",
    "model.vocab_size=259", "data.seq=16", "train.global_batch=8", "plan.tp=1", "plan.pp=1", "plan.micro=1",
)  # fmt: skip

MOE = "model.moe={num_experts=4, top_k=2, ffn_size=24, shared_ffn=16, dense_layers=[0]}"

PLANS = {
    "tp-pp": (4, ["plan.tp=2", "plan.pp=2"]),
    "kv-copies": (4, ["plan.tp=4", "plan.sequence_parallel=false"]),
    "tied": (4, ["model.tied=true", "plan.tp=2", "plan.pp=2", "plan.schedule=interleaved", "plan.virtual=2"]),
    "tied-on-one-rank": (2, ["model.tied=true", "plan.tp=2"]),
    "zero-1": (4, ["plan.pp=2", "plan.dp=2", "plan.zero=1", "plan.stages=3,1"]),
    "bf16-frozen": (4, ["plan.tp=2", "plan.dp=2", "plan.zero=1", "plan.precision=bf16", 'train.freeze=["layers.0.*"]']),
    "zero-2": (4, ["plan.pp=2", "plan.dp=2", "plan.zero=2"]),
    "zero-3-bf16": (4, ["plan.tp=2", "plan.dp=2", "plan.zero=3", "plan.precision=bf16"]),
    "zero-3-tied": (4, ["model.tied=true", "plan.tp=2", "plan.dp=2", "plan.zero=3", 'train.freeze=["layers.1.*"]']),
    "stages-inside": (4, ["plan.pp=2", "plan.dp=2", "plan.zero=2", "plan.order=dp-pp-cp-tp"]),
    "hsdp": (4, ["plan.dp=4", "plan.zero=3", "plan.zero_group=2"]),
    "hsdp-bf16": (4, ["plan.dp=4", "plan.zero=2", "plan.zero_group=2", "plan.precision=bf16"]),
    "cp": (4, ["plan.cp=2", "plan.dp=2", "plan.zero=1", "plan.precision=fp16"]),
    "2bw": (2, ["plan.pp=2", "plan.schedule=2bw"]),
    "2bw-zero-1": (4, ["plan.pp=2", "plan.dp=2", "plan.schedule=2bw", "plan.zero=1", "plan.precision=bf16"]),
    "moe-tiny": (4, ["model.preset=moe-tiny", MOE, "plan.dp=4", "plan.ep=2", "plan.zero=3", "plan.precision=bf16"]),
    "experts": (4, [MOE, "plan.tp=2", "plan.dp=2", "plan.ep=2", "plan.zero=1", "plan.precision=bf16"]),
    "experts-cut": (4, [MOE, "plan.tp=2", "plan.dp=2", "plan.expert_tp=2", "plan.zero=2"]),
    "experts-zero-3": (4, [MOE, "plan.dp=4", "plan.ep=2", "plan.zero=3", "moe.bias_balance=true"]),
    "gpt2": (2, ["model.preset=gpt2-tiny", "model.num_kv_heads=4", "model.ffn_size=64", "plan.pp=2"]),
}


def held_by_rank(connect: Connect, text: str, size: int) -> tuple[int, dict[str, int], int]:
    """Parameters and bytes of the real thing, and how many elements of padding its buckets may have."""
    setup = prepare(loads(text), world_size=size)
    world = connect(setup.plan.mesh(size))
    zero = build(setup, world).zero
    rows = zero.parameters()
    # A bucket's shards are rounded up to 16 elements each; frozen parameters have buckets of their own.
    frozen = sum(not one.trained for one, _, _ in rows)
    return sum(view.numel() for _, view, _ in rows), dict(zero.state_bytes()), 16 * size * (len(zero.buckets) + frozen)


@pytest.mark.parametrize("name", list(PLANS))
def test_bytes_are_those_of_a_real_run(pool: Pool, name: str) -> None:
    size, sets = PLANS[name]
    config = load(None, [*SMALL, *sets])
    setup = prepare(config, world_size=size)
    mesh = setup.plan.mesh(size)
    held = {one.place: one for one in holdings(setup.model, setup.plan, mesh, config.train.freeze)}
    for rank, (count, real, padding) in enumerate(pool.run(size, held_by_rank, dump(config), size)):
        said = held[place_of(setup.model, mesh.coordinate(rank))]
        assert said.parameters == count
        for what, announced, width in (
            ("weights", said.weights, 8),
            ("gradients", said.gradients, 4),
            ("optimizer", said.optimizer, 12),
        ):
            assert announced <= real[what] + width, (rank, what)
            assert real[what] <= announced + padding * width, (rank, what)


def most_gathered(connect: Connect, text: str, size: int) -> int:
    """The most bytes of gathered weights that two neighbouring units of a real ZeRO 3 have."""
    setup = prepare(loads(text), world_size=size)
    zero = build(setup, connect(setup.plan.mesh(size))).zero
    units = [
        sum(bucket.length * 8 for bucket in zero.buckets if bucket.first == place)
        for place in sorted({bucket.first for bucket in zero.buckets})
    ]
    return max(a + b for a, b in itertools.pairwise(units))


def test_what_passes_is_two_units_of_a_real_run(pool: Pool) -> None:
    """Weights (4 bytes) and gradients (4 bytes) of two neighbouring units, but for the padding of their buckets."""
    config = load(None, [*SMALL, "plan.dp=2", "plan.zero=3"])
    setup = prepare(config, world_size=2)
    (held,) = holdings(setup.model, setup.plan, setup.plan.mesh(2))
    for real in pool.run(2, most_gathered, dump(config), 2):
        assert held.passing <= real <= held.passing * 1.05


@pytest.mark.parametrize(
    ("sets", "weights", "gradients"),
    [(["plan.zero=1"], 0, 0), (["plan.zero=2"], 0, 1), (["plan.zero=3", "plan.gather=step"], 1, 2 / 5)],
)
def test_what_passes_at_other_levels(sets: list[str], weights: float, gradients: float) -> None:
    """Shares of the model's bytes: small buckets hold two layers' gradients, large ones all of them."""
    config = load(None, [*SMALL, "plan.dp=2", *sets])
    setup = prepare(config, world_size=2)
    (held,) = holdings(setup.model, setup.plan, setup.plan.mesh(2))
    whole = 4 * held.parameters
    assert held.passing == pytest.approx(weights * whole + gradients * whole, rel=0.1)
    if setup.plan.zero == 2:
        small = prepare(load(None, [*SMALL, "plan.dp=2", *sets, "plan.bucket_mb=0.001"]), world_size=2)
        assert holdings(small.model, small.plan, small.plan.mesh(2))[0].passing < held.passing / 2


def test_bytes_by_zero_stage_are_the_formula() -> None:
    """Rajbhandari et al. 2020, table 1, with fp32 gradients; experts are shared by their own copies alone."""
    sets = [*SMALL, MOE, "plan.dp=8", "plan.ep=2"]
    shapes = parameter_shapes(prepare(load(None, sets), world_size=8).model)
    experts = sum(math.prod(shape) for name, shape in shapes.items() if ".experts." in name) // 2
    dense = sum(math.prod(shape) for name, shape in shapes.items() if ".experts." not in name)
    for zero, group in ((0, 8), (1, 8), (2, 8), (3, 8), (3, 2)):
        more = [f"plan.zero={zero}", *([f"plan.zero_group={group}"] if group < 8 else [])]
        setup = prepare(load(None, [*sets, *more]), world_size=8)
        for one in holdings(setup.model, setup.plan, setup.plan.mesh(8)):
            shares = [
                dense / group + experts / min(group, 4) if zero >= level else dense + experts for level in (3, 2, 1)
            ]
            assert [one.weights, one.gradients, one.optimizer] == [
                math.ceil(width * share) for width, share in zip((4, 4, 8), shares, strict=True)
            ]


def test_frozen_parameters_have_weights_alone() -> None:
    size, sets = PLANS["bf16-frozen"]
    setup = prepare(load(None, [*SMALL, *sets]), world_size=size)
    free, frozen = (
        holdings(setup.model, setup.plan, setup.plan.mesh(size), names)[0] for names in ((), ("layers.0.*",))
    )
    assert free.weights == frozen.weights == 2 * free.parameters
    assert free.gradients == 4 * free.parameters > frozen.gradients
    assert free.optimizer == 12 * free.parameters // 2 > frozen.optimizer


def test_stages_partition_the_layers() -> None:
    setup = prepare(load(None, [*SMALL, "plan.pp=2", "plan.schedule=interleaved", "plan.virtual=2"]), world_size=2)
    rows = dry.stages(setup.model, setup.plan)
    assert [row.layers for row in rows] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert [row.pp for row in rows] == [0, 1, 0, 1]
    assert [row.embedding for row in rows] == [True, False, False, False]
    assert [row.head for row in rows] == [False, False, False, True]


@pytest.mark.parametrize(("pp", "batch"), [(1, 4), (2, 8), (4, 8), (4, 2)])
def test_bubble_of_1f1b_is_the_closed_form(pp: int, batch: int) -> None:
    setup = prepare(load(None, [*SMALL, f"plan.pp={pp}", f"train.global_batch={batch}"]), world_size=pp)
    found = json.loads(dry.render(setup, as_json=True))["bubble"]
    assert found["rate"] == pytest.approx((pp - 1) / (batch + pp - 1))
    assert found["overhead"] == pytest.approx((pp - 1) / batch)
    assert (found["idle"], found["total"]) == (3 * pp * (pp - 1), 3 * pp * (batch + pp - 1))


def test_the_picture_and_the_json_say_the_same() -> None:
    setup = prepare(load(None, [*SMALL, "plan.tp=2", "plan.pp=2"]), world_size=4)
    text, found = dry.render(setup), json.loads(dry.render(setup, as_json=True))
    assert max(map(len, text.splitlines())) <= 120
    assert found["mesh"] == {"pp": 2, "dp": 1, "cp": 1, "tp": 2}
    assert [row["at"]["tp"] for row in found["ranks"]] == [0, 1, 0, 1]
    for row in found["ranks"]:
        assert f"{row['parameters']:,}" in text
    assert sum(stage["parameters"] for stage in found["stages"]) == found["model"]["parameters"]
    assert "rank 0: 0F0" in text
    assert "11.1% of the step (6/54 slots idle)" in text
    assert found["schedule"]["text"].startswith("schedule 1f1b stages=2 microbatches=8")


def test_many_ranks_are_shown_by_place_and_quickly() -> None:
    sets = ["model.preset=llama3-8b", "plan.tp=8", "plan.pp=8", "plan.zero=1", "train.global_batch=256"]
    setup = prepare(load(None, [*sets, "plan.micro=1"]), world_size=512)
    begin = time.perf_counter()
    text = dry.render(setup)
    assert time.perf_counter() - begin < 5
    assert text.count("  64 x  pp ") == 8
    assert "tp 0-7" in text
    assert len(text.splitlines()) < 80


def test_a_thousand_ranks_with_experts_quickly() -> None:
    sets = ["model.preset=llama3-8b", "model.moe={num_experts=256, top_k=8, ffn_size=2048}", "train.global_batch=256"]
    plan = ["plan.tp=8", "plan.pp=4", "plan.ep=64", "plan.zero=3", "plan.micro=1"]
    setup = prepare(load(None, [*sets, *plan]), world_size=1024)
    begin = time.perf_counter()
    text = dry.render(setup)
    assert time.perf_counter() - begin < 5
    assert len(text.splitlines()) < 80
    assert "a rank has 4 a layer; 4 copies" in text


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize(
    "sets",
    [
        [
            MOE,
            "plan.tp=2",
            "plan.pp=2",
            "plan.dp=2",
            "plan.ep=4",
            "plan.zero=3",
            "plan.schedule=zb-v",
            "plan.virtual=2",
        ],
        ["plan.cp=2", "plan.pp=2", "plan.dp=2", "plan.schedule=2bw", "plan.zero=1", "plan.compress=topk:0.01"],
        ["plan.tp=2", "plan.pp=2", "plan.cp=2", "plan.schedule=auto", "plan.node=2", "plan.context=ulysses"],
    ],
)
def test_the_text_fits_its_width(monkeypatch: pytest.MonkeyPatch, columns: int, sets: list[str]) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = dry.render(prepare(load(None, [*SMALL, *sets]), world_size=8))
    assert max(map(len, text.splitlines())) <= columns
    (head,) = [line for line in text.splitlines() if "gradients" in line and line.endswith("total")]
    assert head.split()[-6:] == ["layers", "parameters", "weights", "gradients", "optimizer", "total"], "cut off"


def test_choices_are_told_in_words_and_in_json() -> None:
    sets = [MOE, "plan.dp=4", "plan.cp=2", "plan.ep=4", "plan.zero=3", "plan.zero_group=4", "plan.precision=bf16"]
    setup = prepare(load(None, [*SMALL, *sets, "plan.compress=half"]), world_size=8)
    text, found = dry.render(setup), json.loads(dry.render(setup, as_json=True))
    said = " ".join(text.split())
    assert "4 in each of 3 layers, 2 a token, and shared ones 16 wide; a rank has 1 a layer; 2 copies" in said
    assert "ring: 2 ranks share each sample, 8 of its tokens each" in said
    assert "bf16 weights and activations; fp32 masters and gradients" in said
    assert "shared by data ranks: 4 (copied 2 times); experts': 2; gathered for each use" in said
    assert "gradients go over the data axes in half precision" in said
    assert "fold of the same ranks: pp 1 x edp 2 x ep 4 x etp 1" in said
    assert found["expert_mesh"] == {"pp": 1, "edp": 2, "ep": 4, "etp": 1}
    assert found["experts"] == {"layer": 4, "rank": 1}
    assert found["zero"] == {"stage": 3, "ranks": 4, "expert_ranks": 2, "gather": "use"}
    assert (found["context"], found["precision"], found["compress"]["kind"]) == ("ring", "bf16", "half")
    assert [row["at"]["ep"] for row in found["ranks"]] == [0, 1, 2, 3] * 2


def test_a_model_without_experts_has_no_fold_of_theirs() -> None:
    found = json.loads(dry.render(prepare(load(None, [*SMALL, "plan.tp=2"]), world_size=2), as_json=True))
    assert (found["expert_mesh"], found["experts"], found["zero"]["expert_ranks"]) == (None, None, None)
    assert found["ranks"][1]["at"] == {"pp": 0, "dp": 0, "cp": 0, "tp": 1}


@pytest.mark.parametrize(("pp", "batch"), [(1, 2), (2, 4), (4, 4), (4, 8)])
def test_2bw_is_its_steady_window(pp: int, batch: int) -> None:
    """No slot is idle in it, and each rank runs a forward and a backward of every microbatch."""
    sets = [*SMALL, f"plan.pp={pp}", f"train.global_batch={batch}", "plan.schedule=2bw"]
    setup = prepare(load(None, sets), world_size=pp)
    text, found = dry.render(setup), json.loads(dry.render(setup, as_json=True))
    assert (found["bubble"]["idle"], found["bubble"]["total"]) == (0, 3 * pp * batch)
    assert found["schedule"]["flush"] is False
    assert found["schedule"]["text"].startswith(f"schedule 2bw stages={pp} microbatches={batch}")
    rows = [line.partition(": ")[2].split() for line in text.splitlines() if line.startswith("rank ")]
    assert len(rows) == pp
    assert all("." not in row for row in rows)
    if "slots 0 to" not in text:
        for rank, row in enumerate(rows):
            assert sum(cell.startswith(f"{rank}F") for cell in row) == batch


def test_auto_says_what_it_is_searched_for() -> None:
    text = dry.render(prepare(load(None, [*SMALL, "plan.pp=2", "plan.schedule=auto"]), world_size=2))
    assert "the run measures what each stage takes, and searches for that" in " ".join(text.split())


def test_no_torch_and_no_worker() -> None:
    code = (
        "import sys; from plait.cli import main; code = main(['train', '--dry']); "
        "assert code == 0 and 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "what each rank holds" in done.stdout
