"""Runs a plan beside one process: gradients of every parameter, loss, norm, and weights after steps of AdamW."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from plait.core.plan import Plan
from plait.models.batch import IGNORE, Batch
from plait.models.config import PRESETS, ModelConfig
from plait.models.decoder import Decoder
from plait.models.init import InitSource, initialise
from plait.parallel.apply import Parallel, parallelize
from tests.pool import Connect

SEQ = 16
GLOBAL_BATCH = 8

LLAMA = dataclasses.replace(
    PRESETS["tiny"], hidden_size=32, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8, ffn_size=48, vocab_size=67
)
GPT2 = dataclasses.replace(
    PRESETS["gpt2-tiny"], hidden_size=32, num_layers=4, num_heads=4, num_kv_heads=4, head_dim=8, ffn_size=64,
    vocab_size=67, max_positions=32, dropout=0.1,
)


def models() -> dict[str, ModelConfig]:
    return {
        "llama": dataclasses.replace(LLAMA, tied=False),
        "llama-tied": dataclasses.replace(LLAMA, tied=True),
        "gpt2": dataclasses.replace(GPT2, tied=False),
        "gpt2-tied": dataclasses.replace(GPT2, tied=True),
        "qwen3": dataclasses.replace(LLAMA, qk_norm=True, num_kv_heads=1, qkv_bias=True, tied=False),
    }


def global_batch(config: ModelConfig, step: int, *, masked: bool = True, documents: bool = False) -> Batch:
    """A batch whose samples have different numbers of unmasked targets (case P1)."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, config.vocab_size, (GLOBAL_BATCH, SEQ + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    if masked:
        lengths = torch.randint(1, SEQ + 1, (GLOBAL_BATCH,), generator=generator)
        targets[torch.arange(SEQ)[None] >= lengths[:, None]] = IGNORE
    positions = numbers = None
    if documents:
        ends = torch.rand((GLOBAL_BATCH, SEQ), generator=generator) < 0.25
        numbers = ends.long().cumsum(1)
        starts = torch.where(ends, torch.arange(SEQ), 0).cummax(1).values
        positions = torch.arange(SEQ)[None] - starts
    return Batch(
        tokens_BT=tokens[:, :-1].contiguous(), targets_BT=targets, sample_B=torch.arange(GLOBAL_BATCH) + step * GLOBAL_BATCH,
        step=step, positions_BT=positions, documents_BT=numbers,
    )


def rows(batch: Batch, index: slice) -> Batch:
    return dataclasses.replace(
        batch,
        tokens_BT=batch.tokens_BT[index],
        targets_BT=batch.targets_BT[index],
        sample_B=batch.sample_B[index],
        positions_BT=None if batch.positions_BT is None else batch.positions_BT[index],
        documents_BT=None if batch.documents_BT is None else batch.documents_BT[index],
    )


def microbatches(batch: Batch, plan: Plan, dp_index: int) -> list[Batch]:
    assert plan.dp is not None
    share = GLOBAL_BATCH // plan.dp
    begin = dp_index * share
    return [rows(batch, slice(at, at + plan.micro)) for at in range(begin, begin + share, plan.micro)]


def count(batch: Batch) -> int:
    return int((batch.targets_BT != IGNORE).sum())


def groups(parallel: Parallel, lr: float) -> torch.optim.AdamW:
    decay, rest = parallel.zero.optimizer_groups()
    kinds = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW([kind for kind in kinds if kind["params"]], lr=lr, fused=True)


def cut_run(connect: Connect, text: str, config: ModelConfig, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """On one rank: losses, norms, first-step gradients and final weights as (name, pieces of local tensor)."""
    plan = Plan.parse(text)
    size = options["world"]
    plan = plan.resolve(size)
    world = connect(plan.mesh(size), transport=options.get("transport", "auto"))
    with torch.device("meta"):
        model = Decoder(config, seed=7)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in options.get("freeze", ())))
    parallel = parallelize(model, plan, world, weights=InitSource(config, 3))
    optimizer = groups(parallel, 1e-2)
    losses, norms, grads = [], [], []
    for step in range(steps):
        batch = global_batch(config, step, documents=options.get("documents", False))
        loss = parallel.forward_backward(microbatches(batch, plan, world.at["dp"]), count(batch))
        losses.append(float(loss))
        square = parallel.share_loss(torch.zeros(()), parallel.zero.square_norm())[1]
        norms.append(float(square.sqrt()))
        if step == 0:
            grads = [_row(one, start, part, world.at) for one, start, part in parallel.zero.gradients()]
        parallel.zero.scale_gradients(min(1.0, 1.0 / norms[-1]))
        optimizer.step()
        parallel.zero.publish()
    weights = [_row(one, 0, view.reshape(-1), world.at) for one, view, _ in parallel.zero.parameters()]
    return {"losses": losses, "norms": norms, "grads": grads, "weights": weights}


def _row(one: Any, start: int, part: Tensor, at: dict[str, int]) -> tuple[Any, ...]:
    return one.name, one.shape, [(piece.box, piece.local) for piece in one.pieces], start, part.float().numpy().copy()


def assemble(config: ModelConfig, results: list[list[tuple[Any, ...]]]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Whole tensors from what the ranks hold, and how often each element was given; all givers must agree."""
    from plait.models.config import parameter_shapes

    whole = {name: torch.full(shape, float("nan")) for name, shape in parameter_shapes(config).items()}
    seen = {name: torch.zeros(shape) for name, shape in parameter_shapes(config).items()}
    for rank_rows in results:
        locals_: dict[str, tuple[Any, Tensor]] = {}
        for name, shape, pieces, start, values in rank_rows:
            if name not in locals_:
                size = int(torch.tensor(shape).prod()) if shape else 1
                locals_[name] = (pieces, torch.full((size,), float("nan")))
            locals_[name][1][start : start + len(values)] = torch.from_numpy(values)
        for name, (pieces, flat) in locals_.items():
            shape = next(row[1] for row in rank_rows if row[0] == name)
            local = flat.view(shape)
            for box, inside in pieces:
                block = local[tuple(slice(*edge) for edge in inside)]
                target = whole[name][tuple(slice(*edge) for edge in box)]
                have = ~block.isnan()
                both = have & ~target.isnan()
                torch.testing.assert_close(target[both], block[both], rtol=1e-4, atol=1e-6, msg=f"copies of {name} differ")
                target[have] = block[have]
                seen[name][tuple(slice(*edge) for edge in box)] += have.float()
    return whole, seen


def one_process(config: ModelConfig, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """The reference: the plain model, torch's autograd, clipping and AdamW on whole tensors."""
    model = Decoder(config, seed=7)
    initialise(model, InitSource(config, 3))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in options.get("freeze", ())))
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in named.values() if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=1e-2,
    )
    losses, norms, grads = [], [], {}
    for step in range(steps):
        batch = global_batch(config, step, documents=options.get("documents", False))
        logits = model(None, batch)
        loss = model.loss(logits, batch.targets_BT.flatten()) / count(batch)
        optimizer.zero_grad()
        loss.backward()
        losses.append(float(loss.detach()))
        if step == 0:
            grads = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
        norms.append(float(torch.nn.utils.clip_grad_norm_(list(named.values()), 1.0)))
        optimizer.step()
    return {"losses": losses, "norms": norms, "grads": grads, "weights": {n: p.detach() for n, p in model.named_parameters()}}


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp_min(1e-12))
