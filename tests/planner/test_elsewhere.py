"""Step times that a paper prints and no file of rows holds; no constant was fitted on them.

Korthikanti et al. 2022, arXiv:2205.05198, tables 3 and 5: GPT on A100s with tp=8, everything recomputed, and beside it
sequence parallelism with selective recomputation.
"""

from __future__ import annotations

import pytest

from plait.core.plan import Plan
from plait.models.config import ModelConfig
from plait.planner.clusters import cluster
from plait.planner.cost import predict
from plait.planner.job import Job, Practice

PRACTICE = Practice(
    framework="megatron",
    attention="unfused",
    overlap_grads=False,
    overlap_pp=False,
    weight_bytes=2,
    grad_bytes=2,
    optimizer_bytes=12,
    fused=True,
    recompute_parts=("core_attn",),
)
ROWS = {
    "22B": (6144, 48, 64, "micro=4", 8, 4, 1.42, 1.10),
    "175B": (12288, 96, 96, "pp=8 schedule=interleaved virtual=3", 64, 64, 18.13, 13.75),
    "530B": (20480, 105, 128, "pp=35 schedule=interleaved virtual=3", 280, 280, 49.05, 37.83),
    "1T": (25600, 128, 160, "pp=64", 512, 512, 94.42, 71.49),
}
"""Hidden size, layers, heads, plan, devices, samples, seconds of both."""


def seconds(name: str, extra: str) -> float:
    hidden, layers, heads, plan, devices, batch, *_ = ROWS[name]
    model = ModelConfig(
        family="gpt2",
        vocab_size=51200,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        ffn_size=4 * hidden,
        max_positions=2048,
        tied=True,
        norm="layernorm",
        activation="gelu_tanh",
        positions="learned",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        dropout=0.1,
    )
    return predict(
        Job(
            model=model,
            plan=Plan.parse(f"tp=8 precision=fp16 {plan} {extra}").resolve(devices),
            topology=cluster("a100-80g", devices),
            seq=2048,
            global_batch=batch,
            practice=PRACTICE,
        )
    ).step_time


@pytest.mark.parametrize("name", ROWS)
def test_steps_of_a_paper_that_nothing_was_fitted_on(name: str) -> None:
    *_, full, selective = ROWS[name]
    everything = seconds(name, "recompute=full sequence_parallel=false")
    parts = seconds(name, "recompute=selective sequence_parallel=true")
    assert everything == pytest.approx(full, rel=0.1)
    assert parts == pytest.approx(selective, rel=0.1)
    # The gain that is the paper's subject.
    assert everything / parts == pytest.approx(full / selective, rel=0.04)
