"""Attention against a loop over heads and positions, and rotary positions against complex numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from plait.models.attention import Attend, rope_tables, rotate
from plait.models.batch import Batch
from plait.models.config import ModelConfig, RopeScaling


def batch(samples: int, seq: int, *, documents: Tensor | None = None, positions: Tensor | None = None) -> Batch:
    tokens = torch.zeros(samples, seq, dtype=torch.int64)
    return Batch(
        tokens_BT=tokens,
        targets_BT=tokens,
        sample_B=torch.arange(samples),
        step=0,
        documents_BT=documents,
        positions_BT=positions,
    )


def slow(q: Tensor, k: Tensor, v: Tensor, window: int | None, documents: Tensor) -> Tensor:
    """One query at a time."""
    samples, heads, seq, head_dim = q.shape
    group = heads // k.shape[1]
    rows = []
    for b in range(samples):
        for h in range(heads):
            for t in range(seq):
                first = 0 if window is None else max(0, t - window + 1)
                seen = [s for s in range(first, t + 1) if documents[b, s] == documents[b, t]]
                scores = k[b, h // group, seen] @ q[b, h, t] / math.sqrt(head_dim)
                rows.append(scores.softmax(0) @ v[b, h // group, seen])
    return torch.stack(rows).view(samples, heads, seq, head_dim)


DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 3, 9, 50])
@pytest.mark.parametrize("packed", [False, True])
def test_attend_with_its_gradients(kv_heads: int, window: int | None, packed: bool) -> None:
    torch.manual_seed(0)
    documents = DOCUMENTS if packed else None
    q = torch.randn(2, 4, 9, 8, dtype=torch.double, requires_grad=True)
    k, v = (torch.randn(2, kv_heads, 9, 8, dtype=torch.double, requires_grad=True) for _ in range(2))
    ours = Attend(window)(q, k, v, batch(2, 9, documents=documents))
    expected = slow(q, k, v, window, DOCUMENTS if packed else torch.zeros(2, 9))
    torch.testing.assert_close(ours, expected)
    weights = torch.randn_like(ours)
    grads = torch.autograd.grad((ours * weights).sum(), (q, k, v))
    torch.testing.assert_close(grads, torch.autograd.grad((expected * weights).sum(), (q, k, v)))


CONFIG = ModelConfig(
    vocab_size=8, hidden_size=32, num_layers=1, num_heads=4, ffn_size=8, max_positions=64, rope_theta=50.0
)


def test_rotation_is_a_complex_product_and_backward_turns_back() -> None:
    torch.manual_seed(0)
    positions = torch.tensor([[0, 1, 2, 0, 1], [5, 6, 7, 8, 9]])
    x = torch.randn(2, 3, 5, 8, dtype=torch.double, requires_grad=True)
    rope = rope_tables(CONFIG, batch(2, 5, positions=positions))
    assert rope is not None
    angles = positions[:, None, :, None] * 50.0 ** (-torch.arange(4, dtype=torch.double) / 4)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    out = rotate(x, rope)
    torch.testing.assert_close(out, torch.cat((turned.real, turned.imag), -1), rtol=1e-6, atol=1e-6)
    (grad,) = torch.autograd.grad(out.square().sum(), x)
    torch.testing.assert_close(grad, 2 * x.detach(), rtol=1e-6, atol=1e-6)


def test_tables_without_positions_count_from_zero() -> None:
    rope = rope_tables(CONFIG, batch(2, 5))
    given = rope_tables(CONFIG, batch(2, 5, positions=torch.arange(5).repeat(2, 1)))
    assert rope is not None
    assert given is not None
    for ours, expected in zip(rope, given, strict=True):
        assert ours.shape == (1, 1, 5, 4)
        assert torch.equal(ours.expand_as(expected), expected)


def test_llama3_scaling_keeps_short_and_stretches_long_wavelengths() -> None:
    scaling = RopeScaling(kind="llama3", factor=8.0, original_max_positions=128)
    config = ModelConfig(
        vocab_size=8,
        hidden_size=64,
        num_layers=1,
        num_heads=1,
        ffn_size=8,
        max_positions=64,
        rope_theta=10000.0,
        rope_scaling=scaling,
    )
    one = batch(1, 1, positions=torch.tensor([[1]]))
    rope = rope_tables(config, one)
    assert rope is not None
    found = torch.atan2(rope[1], rope[0]).flatten().double()
    plain = 10000.0 ** (-torch.arange(32, dtype=torch.double) / 32)
    wavelength = 2 * math.pi / plain
    short, long = wavelength < 128 / 4, wavelength > 128 / 1
    assert short.any()
    assert long.any()
    torch.testing.assert_close(found[short], plain[short], rtol=1e-5, atol=0)
    torch.testing.assert_close(found[long], plain[long] / 8, rtol=1e-5, atol=0)
    between = ~short & ~long
    assert ((found < plain) & (found > plain / 8))[between].all()
