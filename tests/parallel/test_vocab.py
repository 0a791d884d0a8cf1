"""Vocabulary-parallel embedding and cross-entropy against torch's on whole tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.comm.world import World
from plait.core.mesh import Mesh
from plait.core.shard import split
from plait.models.batch import IGNORE
from plait.parallel.grads import Deferred, Slot
from plait.parallel.vocab import VocabCrossEntropy, VocabEmbedding
from tests.pool import Connect, Pool

VOCAB, HIDDEN, ROWS = 11, 6, 12


def numbers(scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    targets[[2, 7]] = IGNORE
    return {
        "tokens": torch.randint(0, VOCAB, (ROWS,), generator=generator),
        "weight": torch.randn(VOCAB, HIDDEN, generator=generator),
        "grad": torch.randn(ROWS, HIDDEN, generator=generator),
        "logits": torch.randn(ROWS, VOCAB, generator=generator) * scale,
        "targets": targets,
    }


def run_embedding(connect: Connect, size: int, sequence: bool) -> dict[str, Any]:
    group = connect(Mesh(tp=size)).group("tp")
    given = numbers()
    start, stop = split(VOCAB, size, group.index)
    layer = VocabEmbedding(group=group, sequence=sequence, start=start)
    layer.weight = nn.Parameter(given["weight"][start:stop].clone())
    layer.slots["weight"] = Slot(torch.full((stop - start, HIDDEN), float("nan")), 1, lambda: None, Deferred())
    out = layer(given["tokens"])
    out.backward(given["grad"].chunk(size)[group.index] if sequence else given["grad"])
    return {"out": out.detach().numpy().copy(), "weight": layer.slots["weight"].grad.numpy().copy()}


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_embedding(pool: Pool, size: int, sequence: bool) -> None:
    sequence = sequence and size > 1
    given = numbers()
    weight = given["weight"].requires_grad_()
    wanted = F.embedding(given["tokens"], weight)
    wanted.backward(given["grad"])
    assert weight.grad is not None
    ranks = pool.run(size, run_embedding, size, sequence)
    outs = [torch.from_numpy(rank["out"]) for rank in ranks]
    for whole in [torch.cat(outs)] if sequence else outs:
        assert torch.equal(whole, wanted.detach())
    grads = torch.cat([torch.from_numpy(rank["weight"]) for rank in ranks])
    torch.testing.assert_close(grads, weight.grad, rtol=1e-6, atol=1e-6)


def run_loss(connect: Connect, size: int, scale: float, masked: bool, dtype: torch.dtype) -> dict[str, Any]:
    world = connect(Mesh(tp=size))
    group = world.group("tp")
    given = numbers(scale)
    start, stop = split(VOCAB, size, group.index)
    logits = given["logits"][:, start:stop].to(dtype).clone().requires_grad_()
    targets = torch.full_like(given["targets"], IGNORE) if masked else given["targets"]
    # A leaf may not be overwritten, as the loss does with its logits.
    loss = VocabCrossEntropy(group=group, start=start)(logits * 1.0, targets)
    loss.backward(torch.tensor(0.25))
    assert logits.grad is not None
    sent = world.book.ledger.by_axis().get("tp", 0)
    return {"loss": float(loss.detach()), "dtype": loss.dtype, "grad": logits.grad.float().numpy().copy(), "sent": sent}


@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_cross_entropy(pool: Pool, size: int, scale: float) -> None:
    """Logits of 1e4 stay finite; masked rows have no loss and no gradient; three numbers a row cross the wire."""
    given = numbers(scale)
    logits = given["logits"].double().requires_grad_()
    wanted = F.cross_entropy(logits, given["targets"], ignore_index=IGNORE, reduction="sum")
    (wanted * 0.25).backward()
    assert logits.grad is not None
    ranks = pool.run(size, run_loss, size, scale, False, torch.float32)
    assert all(rank["loss"] == ranks[0]["loss"] for rank in ranks)
    assert ranks[0]["loss"] == pytest.approx(float(wanted.detach()), rel=1e-6)
    grad = torch.cat([torch.from_numpy(rank["grad"]) for rank in ranks], 1)
    assert grad.isfinite().all()
    # In fp32 a logit of 1e4 is known to 1e-3 x 0.5, and so is what the exponential of a difference is.
    torch.testing.assert_close(grad.double(), logits.grad, rtol=1e-5 if scale == 1 else 2e-3, atol=1e-7)
    assert not grad[given["targets"] == IGNORE].any()
    assert ranks[0]["sent"] == 2 * (size - 1) * 3 * 4 * ROWS // size


def test_everything_masked_is_a_loss_of_zero(pool: Pool) -> None:
    for rank in pool.run(2, run_loss, 2, 1.0, True, torch.float32):
        assert rank["loss"] == 0.0
        assert not rank["grad"].any()


def test_bf16_logits_have_a_loss_in_fp32(pool: Pool) -> None:
    """bf16 has 8 bits: a logit of up to 4 is rounded by 2^-7 at most, and the 10 losses differ by that each."""
    given = numbers()
    wanted = F.cross_entropy(given["logits"], given["targets"], ignore_index=IGNORE, reduction="sum")
    for rank in pool.run(2, run_loss, 2, 1.0, False, torch.bfloat16):
        assert rank["dtype"] == torch.float32
        assert rank["loss"] == pytest.approx(float(wanted), abs=10 * 2 * 2**-7)


def test_the_bf16_gradient_of_a_sure_token_is_not_lost() -> None:
    """Probability minus one, taken in bf16, would be zero where the target has probability 0.999."""
    generator = torch.Generator().manual_seed(2)
    targets = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    logits = torch.randn(ROWS, VOCAB, generator=generator).to(torch.bfloat16)
    logits[torch.arange(ROWS), targets] += 9.0
    want = logits.double().requires_grad_()
    F.cross_entropy(want, targets, reduction="sum").backward()
    assert want.grad is not None
    layer = VocabCrossEntropy(group=World.alone().group("tp"), start=0)
    got = logits.clone().requires_grad_()
    layer(got * 1, targets).backward()
    assert got.grad is not None
    at_target = (torch.arange(ROWS), targets)
    torch.testing.assert_close(got.grad[at_target].double(), want.grad[at_target], rtol=2**-7, atol=0.0)
