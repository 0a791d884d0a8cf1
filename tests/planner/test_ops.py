"""Operators of a layer: their FLOPs are the model's, a cut shares them out, messages carry whole activations."""

from __future__ import annotations

import dataclasses

import pytest

from plait.models.config import PRESETS, flops_per_token
from plait.planner import layers, ops
from plait.planner.job import Practice
from plait.planner.ops import Phase, Slice, Work
from plait.planner.stages import slice_of
from tests.planner.jobs import LLAMA, MIXTRAL, job


def forward_flops(cut: Slice) -> float:
    model = cut.model
    total = ops.total_flops(layers.head(cut).forward)
    for layer in range(model.num_layers):
        work = layers.layer(cut, model.moe_of(layer) is not None, model.window_of(layer))
        total += ops.total_flops(work.forward)
    return total


@pytest.mark.parametrize("name", ["llama3-8b", "gpt2", "mistral-7b", "qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3"])
def test_forward_flops_are_a_third_of_the_models(name: str) -> None:
    model = PRESETS[name]
    seq = min(model.max_positions, 4096)
    cut = slice_of(job(model=model, devices=1, seq=seq, batch=1))
    assert forward_flops(cut) == pytest.approx(flops_per_token(model, seq) * seq / 3, rel=2e-3)


@pytest.mark.parametrize("kind", ["product", "grouped"])
def test_products_cost_as_much_in_each_gradient_as_in_forward(kind: str) -> None:
    work = layers.layer(slice_of(job(model=MIXTRAL)), True, None)
    forward, backward, weight = (
        sum(op.flops for op in phase.ops if op.kind == kind) for phase in (work.forward, work.backward, work.weight)
    )
    assert forward > 0
    assert backward == pytest.approx(forward)
    assert weight == pytest.approx(forward)


def test_flash_backward_makes_the_scores_again() -> None:
    work = layers.layer(slice_of(job()), False, None)
    (forward,) = (op.flops for op in work.forward.ops if op.kind == "attention_f")
    (backward,) = (op.flops for op in work.backward.ops if op.kind == "attention_b")
    assert backward == pytest.approx(2.5 * forward)


def test_attention_over_all_keys_costs_twice_the_causal_one() -> None:
    def core(causal: bool) -> float:
        work = layers.layer(slice_of(job(practice=Practice(causal=causal))), False, None)
        return sum(op.flops for op in work.forward.ops if op.kind == "attention_f")

    assert core(False) == pytest.approx(2 * core(True), rel=1e-3)


@pytest.mark.parametrize("plan", ["tp=4", "tp=8", "cp=4", "tp=2 cp=2"])
def test_a_cut_shares_flops_out(plan: str) -> None:
    whole, cut = slice_of(job()), slice_of(job(plan))
    ranks = cut.tp * cut.cp
    assert forward_flops(cut) * ranks == pytest.approx(forward_flops(whole), rel=1e-3)


def grouped(work: Work) -> float:
    return sum(op.flops for op in work.forward.ops if op.kind == "grouped")


@pytest.mark.parametrize("plan", ["ep=8", "ep=4 tp=2", "ep=2 tp=2 expert_tp=2"])
def test_experts_of_any_cut_compute_a_tokens_choice(plan: str) -> None:
    moe = MIXTRAL.moe
    assert moe is not None
    cut = slice_of(job(plan, model=MIXTRAL))
    rank = grouped(layers.layer(cut, True, None))
    tokens = cut.tokens
    assert rank * cut.tp == pytest.approx(6 * tokens * moe.top_k * moe.ffn_size * MIXTRAL.hidden_size)


def sizes(phase: Phase, axis: str, op: str) -> list[float]:
    return [message.size for message in phase.messages if message.axis == axis and message.op == op]


def test_sequence_parallelism_sends_the_bytes_of_all_reduces() -> None:
    activation = 2.0 * 4096 * LLAMA.hidden_size
    plain = layers.layer(slice_of(job("tp=4 sequence_parallel=false")), False, None)
    assert sizes(plain.forward, "tp", "all_reduce") == [activation] * 2
    assert sizes(plain.backward, "tp", "all_reduce") == [activation] * 2
    cut = layers.layer(slice_of(job("tp=4")), False, None)
    for phase in (cut.forward, cut.backward):
        assert sizes(phase, "tp", "all_gather") == [activation] * 2
        assert sizes(phase, "tp", "reduce_scatter") == [activation] * 2
    assert sizes(cut.weight, "tp", "all_gather") == [activation] * 2, "inputs are gathered again (Korthikanti 4.2.2)"


def test_dispatch_sends_each_choice_of_a_token_there_and_back() -> None:
    moe = MIXTRAL.moe
    assert moe is not None
    work = layers.layer(slice_of(job("ep=8", model=MIXTRAL)), True, None)
    assert sizes(work.forward, "ep", "all_to_all") == [2.0 * 4096 * moe.top_k * MIXTRAL.hidden_size] * 2


def test_unfused_attention_moves_its_scores() -> None:
    def moved(attention: str) -> float:
        work = layers.layer(slice_of(job(practice=Practice(attention=attention))), False, None)
        return sum(op.bytes for op in work.forward.ops if op.part == "core")

    scores = 2.0 * LLAMA.num_heads * 4096 * 4096
    assert moved("unfused") - moved("flash") > 3 * scores


def test_narrow_products_are_cast() -> None:
    def kernels(plan: str) -> int:
        return sum(op.kernels for op in layers.layer(slice_of(job(plan)), False, None).forward.ops)

    assert kernels("precision=fp8") == kernels("") + 4, "one cast for the input of each of four products"


def test_precisions_of_products() -> None:
    def precision(plan: str, **practice: str) -> set[str]:
        cut = slice_of(job(plan, practice=dataclasses.replace(Practice(), **practice)))
        return {op.precision for op in layers.layer(cut, False, None).forward.ops if op.kind == "product"}

    assert precision("precision=fp8") == {"fp8"}
    assert precision("precision=fp8", fp8="nvfp4") == {"fp4"}
    assert precision("precision=fp32") == {"fp32"}
    assert precision("precision=fp32", framework="megatron") == {"tf32"}
