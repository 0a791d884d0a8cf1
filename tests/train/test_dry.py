"""``plait train --dry``: what it announces is what a run holds."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from plait.core.config import dump, load, loads
from plait.train import dry
from plait.train.run import build, prepare
from tests.pool import Connect, Pool

SMALL = (
    "model.hidden_size=32", "model.num_layers=4", "model.num_heads=4", "model.num_kv_heads=2", "model.ffn_size=48",
    "model.vocab_size=259", "data.seq=16", "train.global_batch=8", "plan.tp=1", "plan.pp=1", "plan.micro=1",
)  # fmt: skip

PLANS = {
    "tp-pp": (4, ["plan.tp=2", "plan.pp=2"]),
    "kv-copies": (4, ["plan.tp=4", "plan.sequence_parallel=false"]),
    "tied": (4, ["model.tied=true", "plan.tp=2", "plan.pp=2", "plan.schedule=interleaved", "plan.virtual=2"]),
    "tied-on-one-rank": (2, ["model.tied=true", "plan.tp=2"]),
    "zero-1": (4, ["plan.pp=2", "plan.dp=2", "plan.zero=1", "plan.stages=3,1"]),
    "bf16-frozen": (4, ["plan.tp=2", "plan.dp=2", "plan.zero=1", "plan.precision=bf16", 'train.freeze=["layers.0.*"]']),
    "zero-2": (4, ["plan.pp=2", "plan.dp=2", "plan.zero=2"]),
    "zero-3-bf16": (4, ["plan.tp=2", "plan.dp=2", "plan.zero=3", "plan.precision=bf16"]),
    "hsdp": (4, ["plan.dp=4", "plan.zero=3", "plan.zero_group=2"]),
    "2bw": (2, ["plan.pp=2", "plan.schedule=2bw"]),
    "experts": (
        4,
        [
            "model.preset=moe-tiny",
            'model.moe={"num_experts"=4, "top_k"=2, "ffn_size"=24}',
            "plan.dp=4",
            "plan.ep=2",
            "plan.zero=3",
            "plan.precision=bf16",
        ],
    ),
    "gpt2": (2, ["model.preset=gpt2-tiny", "model.num_kv_heads=4", "model.ffn_size=64", "plan.pp=2"]),
}


def held_by_rank(connect: Connect, text: str, size: int) -> tuple[int, dict[str, int], int]:
    """Parameters and bytes of the real thing, and how many elements of padding its buckets may have."""
    setup = prepare(loads(text), world_size=size)
    world = connect(setup.plan.mesh(size))
    zero = build(setup, world).zero
    count = sum(view.numel() for _, view, _ in zero.parameters())
    return count, dict(zero.state_bytes()), 16 * setup.dp * len(zero.buckets)


@pytest.mark.parametrize("name", list(PLANS))
def test_bytes_are_those_of_a_real_run(pool: Pool, name: str) -> None:
    size, sets = PLANS[name]
    config = load(None, [*SMALL, *sets])
    setup = prepare(config, world_size=size)
    mesh = setup.plan.mesh(size)
    held = {
        (one.pp, one.tp, one.ep, one.etp): one
        for one in dry.holdings(setup.model, setup.plan, mesh, config.train.freeze)
    }
    for rank, (count, real, padding) in enumerate(pool.run(size, held_by_rank, dump(config), size)):
        at = mesh.coordinate(rank)
        said = held[at["pp"], at["tp"], at["ep"], at["etp"]]
        assert said.parameters == count
        for what, announced, width in (
            ("weights", said.weights, 4),
            ("gradients", said.gradients, 4),
            ("optimizer", said.optimizer, 12),
        ):
            assert announced <= real[what] + width, (rank, what)
            assert real[what] <= announced + padding * width, (rank, what)


def test_frozen_parameters_have_weights_alone() -> None:
    size, sets = PLANS["bf16-frozen"]
    setup = prepare(load(None, [*SMALL, *sets]), world_size=size)
    free, frozen = (
        dry.holdings(setup.model, setup.plan, setup.plan.mesh(size), names)[0] for names in ((), ("layers.0.*",))
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
    assert text.count("  64 x   pp ") == 8
    assert "tp 0-7" in text
    assert len(text.splitlines()) < 80


def test_no_torch_and_no_worker() -> None:
    code = (
        "import sys; from plait.cli import main; code = main(['train', '--dry']); "
        "assert code == 0 and 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "what each rank holds" in done.stdout
