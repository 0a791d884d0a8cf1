"""Peak memory: published closed forms in their own conventions, live counts, bytes a parameter, plait's own steps."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from plait.core.plan import Plan
from plait.models.config import PRESETS, ModelConfig, parameter_count
from plait.parallel.layout import build_schedule
from plait.planner.activations import layer_steps, total
from plait.planner.clusters import cluster
from plait.planner.job import Job, Practice
from plait.planner.live import live_of
from plait.planner.memory import memory
from plait.planner.parameters import elements, parts_of, stage_parts, state_bytes
from plait.planner.saved import local_of
from plait.planner.state import holdings
from plait.schedule.check import check

GPT = ModelConfig(
    family="gpt2",
    vocab_size=51200,
    hidden_size=4096,
    num_layers=8,
    num_heads=32,
    ffn_size=16384,
    max_positions=2048,
    norm="layernorm",
    activation="gelu_tanh",
    positions="learned",
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    dropout=0.1,
)
LLAMA = PRESETS["llama3-8b"]
MEGATRON = Practice(framework="megatron", attention="unfused", weight_bytes=2, grad_bytes=4, optimizer_bytes=12)


def layer(model: ModelConfig, plan: str, practice: Practice, *, seq: int, index: int = 0) -> float:
    parsed = dataclasses.replace(Plan.parse(plan), precision="bf16", dp=1)
    at = local_of(model, parsed, seq, False)
    return total(layer_steps(model, parsed, practice, at, index, parsed.recompute_of(index)))


def job(
    plan: str, model: ModelConfig = LLAMA, *, devices: int = 8, seq: int = 2048, batch: int = 64, **practice: object
) -> Job:
    parsed = Plan.parse(plan)
    if "precision" not in plan:
        parsed = dataclasses.replace(parsed, precision="bf16")
    return Job(
        model=model,
        plan=parsed.resolve(devices),
        topology=cluster("h100", devices),
        seq=seq,
        global_batch=batch,
        practice=dataclasses.replace(Practice(), **practice) if practice else Practice(),  # type: ignore[arg-type]
    )


# --- activations of a layer


@pytest.mark.parametrize("t", [2, 8])
def test_korthikanti_2022_table_2(t: int) -> None:
    """Activation bytes of a layer, arXiv:2205.05198, table 2; the norms' statistics, 8 a token, are not in it."""
    s, b, h, a = 2048, 4, 4096, 32
    sbh, scores = s * b * h, 5 * a * s / h
    for plan, bytes_of in (
        ("", sbh * (34 + scores)),
        (f"tp={t} sequence_parallel=false", sbh * (10 + 24 / t + scores / t)),
        (f"tp={t}", sbh / t * (34 + scores)),
        (f"tp={t} sequence_parallel=false recompute=selective", sbh * (10 + 24 / t)),
        (f"tp={t} recompute=selective", sbh / t * 34),
        (f"tp={t} sequence_parallel=false recompute=full", sbh * 2),
    ):
        assert layer(GPT, f"{plan} micro={b}", MEGATRON, seq=s) == pytest.approx(bytes_of, rel=1e-3), plan


def test_llama_with_flash_attention() -> None:
    """RMSNorm, SwiGLU, grouped keys: sb(8h + 4q + 4k + 6f)/t + 4 s b n_q/t (formulas.json, act_llama)."""
    s, b, t = 2048, 2, 4
    h, q, k, f, heads = 4096, 4096, 1024, 14336, 32
    want = s * b * (8 * h + 4 * q + 4 * k + 6 * f) / t + 4 * s * b * heads / t
    have = layer(LLAMA, f"tp={t} micro={b}", Practice(framework="megatron", fused=True), seq=s)
    assert have == pytest.approx(want, rel=1e-3)


def test_experts_and_latent_attention() -> None:
    """Experts keep tokens x top_k x (D + 3 F) x 2 bytes (Primus, projection docs, moe_act), a shared one 3 F each."""
    model, tokens = PRESETS["deepseek-v3"], 1024
    moe, mla = model.moe, model.mla
    assert moe is not None and mla is not None
    plan = dataclasses.replace(Plan.parse("ep=8 dp=8"), precision="bf16")
    at = local_of(model, plan, tokens, False)
    steps = layer_steps(model, plan, Practice(framework="megatron", fused=True), at, 5, "none")

    def kept(*kinds: str) -> float:
        return sum(step.keeps for step in steps if step.kind in kinds)

    assert kept("experts", "moe act") == tokens * moe.top_k * (7168 + 3 * moe.ffn_size) * 2
    assert kept("shared", "shared act") == tokens * 3 * moe.shared_ffn * 2
    # Latents before and after their norms, with one statistic each; then q, k, v, their result, its log-sum-exp.
    latents = 2 * mla.q_rank + 2 * mla.kv_rank + mla.rope_dim if mla.q_rank is not None else 0
    heads = 128 * (2 * mla.qk_dim + 2 * mla.v_dim)
    want = tokens * 2 * (latents + heads + 7168) + tokens * 4 * (2 + 128)
    assert kept("attention", "mla up", "attention core") == want


def test_parts_that_are_computed_again() -> None:
    megatron = Practice(framework="megatron", fused=True)
    plan = "recompute=selective"
    whole = layer(LLAMA, "", megatron, seq=2048)
    sizes = [2048 * width * 2 for width in (4096, 14336)]
    for part, gone in (("mlp", sizes[0] + 3 * sizes[1]), ("layernorm", 2 * sizes[0])):
        practice = dataclasses.replace(megatron, recompute_parts=(part,))
        assert whole - layer(LLAMA, plan, practice, seq=2048) == pytest.approx(gone, rel=1e-6), part
    experts = dataclasses.replace(megatron, recompute_parts=("moe_act",))
    mixtral = PRESETS["mixtral-8x7b"]
    less = layer(mixtral, "", megatron, seq=2048) - layer(mixtral, plan, experts, seq=2048)
    assert less == pytest.approx(2048 * 2 * 2 * 14336 * 2)


def test_embedding_dropout_of_the_first_stage() -> None:
    """sbhp/t on the first stage (Korthikanti et al. 2022, section 4.3): a mask for each of p live microbatches."""
    s, b, h, p, t = 2048, 1, 4096, 4, 2
    practice = {"framework": "megatron", "attention": "unfused"}
    report = memory(job(f"tp={t} pp={p} micro={b}", GPT, seq=s, batch=16, **practice))
    masks = report.ranks[0].kinds["dropout"]
    layers = GPT.num_layers // p
    assert masks == pytest.approx(p * s * b * h / t * (1 + 2 * layers))


# --- state


@pytest.mark.parametrize(("weight", "gradient", "optimizer"), [(2, 2, 12), (2, 4, 12)])
def test_16_and_18_bytes_a_parameter(weight: int, gradient: int, optimizer: int) -> None:
    """Rajbhandari et al. 2020, arXiv:1910.02054, section 3: 16 bytes with half-precision gradients, 18 with fp32 ones;
    level 1 shares the optimizer's 12 over the data ranks, level 2 gradients too, level 3 all."""
    count, n = parameter_count(LLAMA), 8
    given = {"framework": "megatron", "weight_bytes": weight, "grad_bytes": gradient, "optimizer_bytes": optimizer}
    for level, want in enumerate(
        (
            weight + gradient + optimizer,
            weight + gradient + optimizer / n,
            weight + (gradient + optimizer) / n,
            (weight + gradient + optimizer) / n,
        )
    ):
        rank = memory(job(f"dp={n} zero={level}", **given)).fullest
        assert rank.weights + rank.gradients + rank.optimizer == pytest.approx(want * count, rel=1e-9), level


def test_experts_are_shared_by_fewer_ranks() -> None:
    model = PRESETS["mixtral-8x7b"]
    one, other = (memory(job(plan, model)).fullest for plan in ("dp=8 ep=8 zero=1", "dp=8 ep=2 zero=1"))
    experts = 32 * 8 * 3 * 4096 * 14336
    rest = parameter_count(model) - experts - 32 * 8 * 4096
    assert one.optimizer == pytest.approx(12 * (rest / 8 + experts / 8) + 32 * 8 * 4096, rel=1e-3)
    assert other.optimizer == pytest.approx(12 * (rest / 8 + experts / 2 / 4) + 32 * 8 * 4096, rel=1e-3)
    assert other.weights - one.weights == pytest.approx(2 * experts * (1 / 2 - 1 / 8), rel=1e-9)


@pytest.mark.parametrize(
    ("plan", "model"),
    [
        ("tp=2 pp=2 dp=2 zero=1", "llama3-8b"),
        ("tp=8 pp=1 zero=0", "gpt2-tiny"),
        ("tp=2 pp=2 dp=2 zero=3", "gpt2"),
        ("tp=2 dp=4 ep=4 zero=2", "mixtral-8x7b"),
        ("tp=2 pp=2 dp=2 ep=2 expert_tp=2 zero=1", "moe-tiny"),
        ("pp=2 virtual=2 schedule=zb-v dp=4 zero=1", "gpt2"),
        ("pp=4 dp=2 schedule=2bw", "gpt2"),
        ("pp=8 precision=fp32", "deepseek-v3"),
    ],
)
def test_state_is_that_of_holdings(plan: str, model: str) -> None:
    """The quick count is the exact one but for rounding up where ranks share."""
    one = (
        job(plan, PRESETS[model], batch=64)
        if model != "gpt2-tiny"
        else job(plan.replace("8", "4"), PRESETS[model], devices=4)
    )
    fullest: dict[int, tuple[int, int, int]] = {}
    for held in holdings(one.model, one.plan, one.mesh):
        known = fullest.get(held.pp, (0, 0, 0))
        fullest[held.pp] = max(known, (held.weights, held.gradients, held.optimizer), key=sum)
    for rank in memory(one).ranks:
        have = (rank.weights, rank.gradients, rank.optimizer)
        assert have == pytest.approx(fullest[rank.pp], rel=1e-6, abs=8), rank.pp


def test_parameters_by_part_add_up() -> None:
    model = dataclasses.replace(PRESETS["deepseek-v3"], num_layers=8)
    one = job("", model, devices=1)
    held = stage_parts(model, 0, 8, 1, 0)
    assert held == {"dense": 3, "moe": 5, "embed": 1, "tail": 1}
    everything = elements(parts_of(model, one.plan), held)
    assert everything.all == parameter_count(model)
    assert sum(state_bytes(one, everything)) == pytest.approx(
        18 * (everything.dense + everything.expert) + 16 * (everything.router - everything.bias) + 4 * everything.bias
    )


# --- live microbatches


@pytest.mark.parametrize("m", [1, 2, 4, 8, 9, 40])
def test_1f1b_holds_the_distance_to_the_last_rank(m: int) -> None:
    """Rank i has min(m, p - i) live (Narayanan et al. 2021, arXiv:2104.04473, section 2.2)."""
    plan = Plan.parse("pp=8")
    for rank in range(8):
        counts = [moment.live[0] for moment in live_of(plan, m, rank).moments if moment.kind == "B"]
        assert max(counts) == min(m, 8 - rank)


@pytest.mark.parametrize(
    ("plan", "m"),
    [
        *itertools.product(
            (
                "pp=4 schedule=gpipe",
                "pp=4",
                "pp=4 virtual=2 schedule=interleaved",
                "pp=3 virtual=4 schedule=interleaved",
                "pp=4 schedule=zb-h1",
                "pp=4 schedule=zb-h2",
                "pp=4 virtual=2 schedule=zb-v",
                "pp=2 virtual=2 schedule=dualpipe-v",
            ),
            (4, 7, 40),
        ),
        ("pp=2 virtual=2 schedule=auto", 4),
    ],
)
def test_live_counts_are_those_of_the_checked_schedule(plan: str, m: int) -> None:
    parsed = Plan.parse(plan)
    want = check(build_schedule(parsed, m)).live
    for rank in range(parsed.pp):
        found = live_of(parsed, m, rank)
        # A moment is what is there before its action: a forward adds one.
        counts = [sum(moment.live) + sum(moment.waiting) + (moment.kind == "F") for moment in found.moments]
        assert max(counts) == want[rank], rank


def test_interleaving_keeps_more() -> None:
    """1 + (p - 1)/(p v) of 1F1B's first rank (Korthikanti et al. 2022, section 4.2.3)."""
    p, v = 4, 2
    model = dataclasses.replace(GPT, dropout=0.0, num_layers=8)
    practice = {"framework": "megatron", "attention": "unfused"}
    plans = (f"pp={p}", f"pp={p} virtual={v} schedule=interleaved")
    layers = [memory(job(plan, model, devices=p, batch=32, **practice)).ranks[0].kinds["mlp"] for plan in plans]
    assert layers[1] / layers[0] == pytest.approx(1 + (p - 1) / (p * v))


def test_a_searched_schedule_fills_its_limit() -> None:
    plain, filled = (
        memory(job("pp=4 schedule=zb-h1", GPT, devices=4, framework="megatron", attention="unfused", **extra))
        for extra in ({}, {"live_limit": 4})
    )
    middle = [report.ranks[2].kinds["mlp"] for report in (plain, filled)]
    assert middle[1] > middle[0]


# --- whole reports


def test_a_report_adds_up() -> None:
    report = memory(job("tp=2 pp=4 micro=2", batch=32))
    assert [rank.pp for rank in report.ranks] == [0, 1, 2, 3]
    for rank in report.ranks:
        assert rank.peak == pytest.approx(max(size for _, size in rank.moments))
        assert sum(rank.kinds.values()) == pytest.approx(rank.activations + rank.logits)
        parts = rank.weights + rank.gradients + rank.optimizer + rank.activations + rank.logits + rank.buffers
        assert rank.peak == pytest.approx(parts + rank.reserve)
        assert {what.split()[0] for what, _ in rank.moments} == {"forward", "backward", "optimizer"}
    assert report.fullest.peak >= report.emptiest.peak
    assert report.ranks[3].logits > 0 and report.ranks[0].logits == 0
    assert report.ranks[0].activations > report.ranks[2].activations


def test_what_saves_memory_does() -> None:
    def peak(plan: str, **practice: object) -> float:
        return memory(job(plan, batch=64, **practice)).fullest.peak

    plans = ["dp=8", "dp=8 recompute=selective", "dp=8 recompute=full:0-15", "dp=8 recompute=full"]
    for more, less in itertools.pairwise([peak(plan) for plan in plans]):
        assert less < more
    for more, less in itertools.pairwise([peak(f"dp=8 zero={level}") for level in range(4)]):
        assert less < more
    assert peak("tp=2 dp=4") < peak("tp=2 dp=4 sequence_parallel=false") < peak("dp=8")
    assert peak("dp=8 micro=4") > peak("dp=8 micro=2")
    assert peak("cp=2 dp=4") < peak("dp=8")
    assert peak("dp=8") < peak("dp=8", memory_kind="reserved") and peak("dp=8") < peak("dp=8", memory_kind="device")


def test_layers_that_predict_further_tokens_have_parameters() -> None:
    """Each the layer itself and a product of two streams to one; on the last stage, with an embedding of its own."""
    practice = {"framework": "megatron", "weight_bytes": 2.0, "grad_bytes": 4.0, "optimizer_bytes": 12.0}
    plain, more = (memory(job("pp=2 tp=4", mtp_layers=count, **practice)).ranks for count in (0, 1))
    parts, hidden = parts_of(LLAMA, Plan.parse("tp=4 pp=2 dp=1")), LLAMA.hidden_size
    assert more[0].weights == plain[0].weights
    added = parts["dense"].dense + parts["embed"].dense + 2 * hidden * hidden // 4
    assert more[1].weights - plain[1].weights == 2 * added
