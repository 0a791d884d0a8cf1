"""Initial weights: any box is the slice of the whole; one process is filled from any source."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.models import init
from plait.models.config import PRESETS, ModelConfig, parameter_shapes
from plait.models.decoder import Decoder
from plait.models.init import Box, InitSource, draw, initialise

CONFIG = PRESETS["tiny"]


@st.composite
def shape_and_box(draw_value: st.DrawFn) -> tuple[tuple[int, int], Box]:
    # Wide and tall, so that boxes span several of the blocks that rows are drawn in.
    columns = draw_value(st.sampled_from([1, 3, 700, 70_000]))
    rows = draw_value(st.integers(1, max(2, 2_000_000 // columns if columns > 700 else 3_000)))
    spans = []
    for size in (rows, columns):
        start = draw_value(st.integers(0, size))
        spans.append((start, draw_value(st.integers(start, size))))
    return (rows, columns), tuple(spans)


@settings(max_examples=40, deadline=None)
@given(shape_and_box(), st.integers(0, 2**63))
def test_a_box_is_bit_for_bit_the_slice(case: tuple[tuple[int, int], Box], seed: int) -> None:
    shape, box = case
    whole = draw("some.weight", shape, None, seed=seed, config=CONFIG)
    part = draw("some.weight", shape, box, seed=seed, config=CONFIG)
    assert torch.equal(part, whole[tuple(slice(*span) for span in box)])


def test_boxes_over_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "_BLOCK", 40)
    whole = draw("some.weight", (33, 10), None, seed=0, config=CONFIG)
    for first in range(33):
        for last in range(first, 34):
            part = draw("some.weight", (33, 10), ((first, last), (2, 9)), seed=0, config=CONFIG)
            assert torch.equal(part, whole[first:last, 2:9])
    rows = whole.unique(dim=0)
    assert len(rows) == 33


def test_a_box_of_experts_is_the_slice_and_each_expert_its_own_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "_BLOCK", 40)
    name = "layers.0.mlp.experts.gate_up"
    whole = draw(name, (5, 12, 10), None, seed=0, config=CONFIG)
    assert len(whole.flatten(0, 1).unique(dim=0)) == 60
    for experts in ((0, 5), (1, 3), (4, 5), (2, 2)):
        for rows in ((0, 12), (3, 11), (5, 5)):
            for columns in ((0, 10), (2, 9)):
                part = draw(name, (5, 12, 10), (experts, rows, columns), seed=0, config=CONFIG)
                assert torch.equal(part, whole[slice(*experts), slice(*rows), slice(*columns)])


@pytest.mark.parametrize(
    "name", ["mlp.experts.down", "mlp.shared.down.weight", "mlp.experts.gate_up", "mlp.router.weight"]
)
def test_only_projections_into_the_residual_stream_are_drawn_smaller(name: str) -> None:
    shape = (4, 200, 100) if "experts" in name else (200, 400)
    values = draw(f"layers.3.{name}", shape, None, seed=0, config=CONFIG)
    std = 0.02 / math.sqrt(2 * CONFIG.num_layers) if "down" in name else 0.02
    assert values.std().item() == pytest.approx(std, rel=0.02)


def test_values_follow_name_and_seed() -> None:
    shape = (400, 300)
    base = draw("a.weight", shape, None, seed=0, config=CONFIG)
    assert torch.equal(base, draw("a.weight", shape, None, seed=0, config=CONFIG))
    for other in (
        draw("b.weight", shape, None, seed=0, config=CONFIG),
        draw("a.weight", shape, None, seed=1, config=CONFIG),
    ):
        assert abs((base * other).mean().item() / 0.02**2) < 5 / math.sqrt(base.numel())
    assert base.std().item() == pytest.approx(0.02, rel=0.01)
    assert abs(base.mean().item()) < 5 * 0.02 / math.sqrt(base.numel())
    down = draw("layers.0.mlp.down.weight", shape, None, seed=0, config=CONFIG)
    assert down.std().item() == pytest.approx(0.02 / math.sqrt(2 * CONFIG.num_layers), rel=0.01)


def test_norms_are_one_and_biases_zero() -> None:
    source = InitSource(PRESETS["gpt2-tiny"], 0)
    assert torch.equal(source.read("layers.1.norm2.weight"), torch.ones(128))
    assert torch.equal(source.read("layers.1.norm2.bias", ((3, 7),)), torch.zeros(4))
    assert torch.equal(source.read("layers.1.attn.qkv.bias"), torch.zeros(384))
    deepseek = InitSource(PRESETS["deepseek-v3"], 0)
    assert torch.equal(deepseek.read("layers.3.mlp.router.bias"), torch.zeros(256))
    assert torch.equal(deepseek.read("layers.3.attn.kv_a_norm.weight"), torch.ones(512))


@pytest.mark.parametrize("box", [((0, 3),), ((0, 300), (0, 1)), ((5, 4), (0, 1)), ((-1, 4), (0, 1))])
def test_boxes_outside_are_refused(box: Box) -> None:
    with pytest.raises(ValueError, match=r"does not lie in head\.weight"):
        InitSource(CONFIG, 0).read("head.weight", box)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no parameter head\.weight"):
        InitSource(dataclasses.replace(CONFIG, tied=True), 0).read("head.weight")


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("tied", [False, True])
def test_initialise_fills_every_parameter(device: str, tied: bool) -> None:
    config = dataclasses.replace(CONFIG, num_layers=2, tied=tied)
    with torch.device(device):
        model = Decoder(config)
    if device == "meta":
        model.to(torch.bfloat16)
    source = InitSource(config, 3)
    initialise(model, source)
    found = dict(model.named_parameters())
    assert list(found) == list(parameter_shapes(config))
    for name, parameter in found.items():
        assert parameter.dtype == (torch.bfloat16 if device == "meta" else torch.float32)
        assert torch.equal(parameter, source.read(name).to(parameter.dtype)), name
    assert model.head is not None
    assert model.embed is not None
    assert (model.head.weight is model.embed.tokens.weight) == tied


def test_initialise_refuses_another_shape() -> None:
    other: ModelConfig = dataclasses.replace(CONFIG, ffn_size=64)
    with pytest.raises(ValueError, match=r"layers.0.mlp.gate_up.weight is \(128, 128\) in the source"):
        initialise(Decoder(CONFIG), InitSource(other, 0))
