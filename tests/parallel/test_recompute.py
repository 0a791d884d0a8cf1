"""Recomputed blocks and attention beside those that keep everything; routers count once (case P17)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.models.attention import Attend
from plait.models.batch import Batch
from plait.models.config import ModelConfig
from plait.models.decoder import Block, Decoder
from plait.models.init import InitSource, initialise
from plait.models.parts import MoEConfig
from plait.models.router import Router
from plait.parallel.recompute import RecomputedAttend, RecomputedBlock
from tests.parallel.cuts import GPT2, LLAMA, count, global_batch

MOE = dataclasses.replace(
    LLAMA, moe=MoEConfig(num_experts=4, top_k=2, ffn_size=16, score="softmax", normalise=True, aux_loss=0.1, z_loss=0.1)
)


def wrap(model: Decoder, mode: str) -> None:
    """Recompute every layer."""
    for name, block in list(model.layers.items()):
        assert isinstance(block, Block)
        if mode == "selective":
            block.attn.attend = RecomputedAttend(block.attn.attend.window, block.attn.attend)
        elif mode == "full":
            model.layers[name] = RecomputedBlock(block)


def run(config: ModelConfig, mode: str) -> tuple[float, dict[str, Tensor], list[Tensor]]:
    """Loss, gradients by name, and what the routers counted."""
    model = Decoder(config, seed=7)
    initialise(model, InitSource(config, 3))
    wrap(model, mode)
    batch = global_batch(config, 0)
    loss = model.loss(model(None, batch), batch.targets_BT.flatten()) / count(batch)
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), grads, [m.stats for m in model.modules() if isinstance(m, Router)]


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("config", [LLAMA, GPT2, MOE], ids=["llama", "gpt2-dropout", "moe"])
def test_the_same_bits_as_without(config: ModelConfig, mode: str) -> None:
    loss, grads, stats = run(config, mode)
    wanted_loss, wanted_grads, wanted_stats = run(config, "none")
    assert loss == wanted_loss
    assert grads.keys() == wanted_grads.keys()
    for name, grad in grads.items():
        assert torch.equal(grad, wanted_grads[name]), name
    assert len(stats) == (config.num_layers if config is MOE else 0)
    for ours, theirs in zip(stats, wanted_stats, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.sum() > 0


def test_a_router_records_again_after_a_backward_and_after_one_that_fails() -> None:
    model = Decoder(MOE)
    initialise(model, InitSource(MOE, 3))
    wrap(model, "full")
    (router, *_) = (module for module in model.modules() if isinstance(module, Router))
    batch = global_batch(MOE, 0)
    model(None, batch).sum().backward()
    once = router.stats.clone()
    assert router.recording
    out = model(None, batch).sum()
    assert torch.equal(router.stats, 2 * once)

    def broken(*inputs: Any) -> Tensor:
        raise RuntimeError("broken in backward")

    handle = router.register_forward_pre_hook(lambda *inputs: broken())
    with pytest.raises(RuntimeError, match="broken in backward"):
        out.backward()
    handle.remove()
    assert router.recording


class Counting(Attend):
    """Attention that counts its calls."""

    calls = 0

    def forward(self, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, batch: Batch) -> Tensor:
        self.calls += 1
        return super().forward(q_BHTE, k_BKTE, v_BKTE, batch)


def test_any_way_to_attend_is_run_once_more_in_backward() -> None:
    core = Counting(3)
    attend = RecomputedAttend(core.window, core)
    batch = global_batch(LLAMA, 0)
    leaves = [torch.randn(8, 2, 16, 4, requires_grad=True) for _ in range(3)]
    out = attend(*leaves, batch)
    assert attend.window == 3
    assert core.calls == 1
    found = torch.autograd.grad(out.square().sum(), leaves)
    assert core.calls == 2
    wanted = torch.autograd.grad(Attend(3)(*leaves, batch).square().sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_names_stay_and_nothing_is_kept_twice() -> None:
    model = Decoder(LLAMA)
    before = [name for name, _ in model.named_parameters()]
    wrap(model, "selective")
    wrap_full = Decoder(LLAMA)
    wrap(wrap_full, "full")
    assert [name for name, _ in model.named_parameters()] == before
    assert [name for name, _ in wrap_full.named_parameters()] == before


def test_a_recomputed_block_keeps_its_input_alone() -> None:
    """Bytes that autograd keeps for backward, counted by hooks."""

    def kept(mode: str) -> int:
        model = Decoder(LLAMA)
        initialise(model, InitSource(LLAMA, 3))
        wrap(model, mode)
        weights = {p.data_ptr() for p in model.parameters()}
        seen: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            if x.data_ptr() not in weights:
                seen[x.data_ptr()] = x.nbytes
            return x

        hidden = torch.randn(128, LLAMA.hidden_size, requires_grad=True)
        part = model.layers["1"]
        batch = global_batch(LLAMA, 0)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            part(hidden, None, batch)
        return sum(seen.values())

    assert kept("full") < kept("selective") < kept("none")
