"""Norms, SwiGLU, the loss and dropout against plain references."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from plait.models.batch import IGNORE, Batch
from plait.models.layers import CrossEntropy, Dropout, LayerNorm, RMSNorm, SectionedLinear, swiglu


def batch(samples: int, seq: int, *, first: int = 0, step: int = 0) -> Batch:
    tokens = torch.zeros(samples, seq, dtype=torch.int64)
    return Batch(tokens_BT=tokens, targets_BT=tokens, sample_B=torch.arange(first, first + samples), step=step)


def filled(norm: RMSNorm | LayerNorm) -> RMSNorm | LayerNorm:
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return norm


def test_rms_norm_and_its_gradient() -> None:
    torch.manual_seed(0)
    norm = filled(RMSNorm(6, 1e-3)).double()
    x = torch.randn(2, 3, 6, dtype=torch.double, requires_grad=True)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (6,), norm.weight, 1e-3))
    weight = norm.weight
    ours = torch.autograd.grad(norm(x).square().sum(), (x, weight))
    plain = torch.autograd.grad(F.rms_norm(x, (6,), weight, 1e-3).square().sum(), (x, weight))
    torch.testing.assert_close(ours, plain)


def test_rms_norm_is_fp32_inside_for_lower_inputs() -> None:
    norm = RMSNorm(512, 1e-6).bfloat16()
    torch.nn.init.ones_(norm.weight)
    # A sum of 512 squares of 300 stalls in bf16, which holds 8 bits; fp32 has it exactly.
    x = torch.full((4, 512), 300.0, dtype=torch.bfloat16).requires_grad_()
    out = norm(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), torch.ones(4, 512), rtol=0, atol=0)
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16
    assert norm.weight.grad is not None
    torch.testing.assert_close(norm.weight.grad.float(), torch.full((512,), 4.0))


def test_layer_norm_has_a_bias() -> None:
    norm = filled(LayerNorm(6, 1e-5))
    assert [name for name, _ in norm.named_parameters()] == ["weight", "bias"]
    x = torch.randn(5, 6)
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias
    torch.testing.assert_close(norm(x), expected)


def test_swiglu_and_its_gradient() -> None:
    torch.manual_seed(0)
    gate, up = (torch.randn(4, 7, dtype=torch.double, requires_grad=True) for _ in range(2))
    torch.testing.assert_close(swiglu(gate, up), F.silu(gate) * up)
    assert torch.autograd.gradcheck(swiglu, (gate, up))


def test_sectioned_linear_gives_its_sections() -> None:
    layer = SectionedLinear(4, (3, 2, 1), bias=True)
    torch.manual_seed(0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(5, 4)
    parts = layer(x)
    assert [part.shape[-1] for part in parts] == [3, 2, 1]
    torch.testing.assert_close(torch.cat(parts, -1), x @ layer.weight.T + layer.bias)


def test_loss_is_the_fp32_sum_over_unmasked_targets() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(6, 9), torch.tensor([3, IGNORE, 0, 8, IGNORE, 1])
    kept = [row for row in range(6) if targets[row] != IGNORE]
    expected = sum(logits[row].logsumexp(-1) - logits[row, targets[row]] for row in kept)
    torch.testing.assert_close(CrossEntropy()(logits, targets), expected)
    assert CrossEntropy()(logits.bfloat16(), targets).dtype == torch.float32
    assert CrossEntropy()(logits, torch.full((6,), IGNORE)) == 0


def test_dropout_is_identity_without_rate_and_in_eval() -> None:
    x = torch.randn(8, 5)
    assert Dropout(0.0, 0, 0, 0)(x, batch(2, 4)) is x
    assert Dropout(0.5, 0, 0, 0).eval()(x, batch(2, 4)) is x


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("features", [64, 63])
def test_dropout_rate_scale_and_gradient(p: float, features: int) -> None:
    x = torch.ones(4 * 512, features, requires_grad=True)
    out = Dropout(p, 3, 1, 2)(x, batch(4, 512))
    dropped = (out == 0).float()
    deviation = math.sqrt(p * (1 - p) / x.numel())
    assert abs(dropped.mean().item() - p) < 4 * deviation
    # Rows and columns each have the rate: six standard deviations over some thousand of them.
    for dim, count in ((0, x.shape[0]), (1, features)):
        assert (dropped.mean(dim) - p).abs().max() < 6 * math.sqrt(p * (1 - p) / count)
    torch.testing.assert_close(out[out != 0], torch.full_like(out[out != 0], 1 / (1 - p)))
    out.sum().backward()
    torch.testing.assert_close(x.grad, out.detach())


def masks(**change: int) -> Tensor:
    at = {"seed": 0, "layer": 1, "site": 1, "step": 5, "first": 0, **change}
    layer = Dropout(0.5, at["seed"], at["layer"], at["site"])
    return layer.keep(batch(2, 64, first=at["first"], step=at["step"]), 256)


@pytest.mark.parametrize("change", [{"seed": 1}, {"layer": 2}, {"site": 2}, {"step": 6}, {"first": 2}, {"layer": -1}])
def test_dropout_masks_are_independent_in_every_argument(change: dict[str, int]) -> None:
    agree = (masks() == masks(**change)).float().mean().item()
    assert abs(agree - 0.5) < 5 * 0.5 / math.sqrt(2 * 64 * 256)


def test_dropout_masks_of_rows_and_features_are_independent() -> None:
    keep = masks().float() - 0.5
    for shift in (1, 2, 3, 64):
        for dim in (0, 1):
            shifted = keep.roll(shift, dim)
            assert abs((keep * shifted).mean().item() * 4) < 5 / math.sqrt(keep.numel())
    # Every two rows: none alike, none opposite.
    likeness = (keep @ keep.T * 4 / keep.shape[1]).fill_diagonal_(0)
    assert likeness.abs().max() < 6.5 / math.sqrt(keep.shape[1])


class SomeRows(Dropout):
    """Given rows 3 to 7 of the microbatch."""

    def rows(self, batch: Batch) -> tuple[Tensor, Tensor]:
        sample_N, index_N = super().rows(batch)
        return sample_N[3:7], index_N[3:7]


def test_dropout_of_some_rows_and_samples_is_the_slice_of_the_whole() -> None:
    x = torch.randn(12, 10)
    whole = Dropout(0.3, 7, 0, 1)(x, batch(3, 4))
    assert torch.equal(SomeRows(0.3, 7, 0, 1)(x[3:7], batch(3, 4)), whole[3:7])
    assert torch.equal(Dropout(0.3, 7, 0, 1)(x[4:8], batch(1, 4, first=1)), whole[4:8])


def mix(word: int) -> int:
    """splitmix64's finaliser on Python's integers."""
    word &= 2**64 - 1
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return word ^ word >> 31


def test_dropout_masks_are_those_of_the_stated_hash() -> None:
    """So a run that goes on under a later version meets the same masks."""
    golden = 0x9E3779B97F4A7C15
    keep = Dropout(0.25, 7, -1, 2).keep(batch(2, 3, first=11, step=13), 5)
    for row, (sample, index) in enumerate((sample, index) for sample in (11, 12) for index in range(3)):
        key = 0
        for part in (7, 13, -1, 2, sample, index):
            key = mix(key + part + golden)
        for feature in range(5):
            word = mix(key + (feature // 2 + 1) * golden)
            half = word >> 32 if feature % 2 else word % 2**32
            signed = half - 2**32 if half >= 2**31 else half
            assert keep[row, feature] == (signed >= 2**30 - 2**31)
