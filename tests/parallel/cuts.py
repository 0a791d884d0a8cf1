"""Runs a plan beside one process: gradients of every parameter, losses, norms, and weights after steps of AdamW.

**Tolerance.** In fp32 a cut changes nothing but the order of additions (of rows over dp and microbatches, of products
over tp). A sum of n terms in another order differs by about sqrt(n) u of its size, u = 2^-24 = 6e-8 (Higham 2002,
section 4.2); with n up to 128 rows x 67 tokens that is 5e-6, and layers add up as sqrt(layers) at most. So losses,
norms and gradients are held to 1e-5 relative; what is seen is below 1e-6.

**AdamW.** Its step is lr m / (sqrt(v) + eps): where a gradient is smaller than its own rounding noise, the step's
sign is noise. One such gradient is in every model with a key bias: the same bias on all keys of a query shifts every
score alike and softmax ignores that, so its true gradient is zero. With eps = 1e-8 those entries walk at random; both
sides here use eps = 1e-4, far above the noise (1e-9), so that a difference d in a gradient moves a weight by lr d /
eps = 10 d at most. Noise d of 1e-9 makes 1e-8 a step, 1e-5 relative of the smallest weights: biases, which start at
zero and move by 1e-3 a step. The learning rate is 1e-3: at 1e-2, half of the initial weights' deviation a step,
training itself is chaotic, and one process that adds its own batch in four parts ends 1e-2 away from itself in the
norm.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.core.plan import Plan
from plait.models.batch import IGNORE, Batch
from plait.models.config import PRESETS, MLAConfig, ModelConfig, MoEConfig, parameter_shapes
from plait.models.decoder import Decoder
from plait.models.init import InitSource, initialise
from plait.models.moe import Sums, end_step, routers
from plait.parallel.apply import Parallel, parallelize
from tests.pool import Connect, Pool

SEQ = 16
GLOBAL_BATCH = 8
TOLERANCE = 1e-5
WEIGHTS_TOLERANCE = 3e-5

LLAMA = dataclasses.replace(
    PRESETS["tiny"], hidden_size=32, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8, ffn_size=48, vocab_size=67
)
GPT2 = dataclasses.replace(
    PRESETS["gpt2-tiny"],
    hidden_size=32,
    num_layers=4,
    num_heads=4,
    num_kv_heads=4,
    head_dim=8,
    ffn_size=64,
    vocab_size=67,
    max_positions=32,
    dropout=0.1,
)


MOE = MoEConfig(num_experts=8, top_k=2, ffn_size=24, aux_loss=0.02, z_loss=0.01)
LATENT = MLAConfig(q_rank=24, kv_rank=16, nope_dim=8, rope_dim=4, v_dim=12)


def expert_models() -> dict[str, ModelConfig]:
    """One of each kind of experts: Mixtral's, one that drops, DeepSeek's with shared experts and latent attention."""
    plain = dataclasses.replace(LLAMA, moe=MOE)
    deepseek = dataclasses.replace(
        MOE, shared_ffn=16, dense_layers=(0,), score="sigmoid", scale=1.5, groups=4, top_groups=2, bias=True
    )
    return {
        "mixtral": plain,
        "dropping": dataclasses.replace(plain, moe=dataclasses.replace(MOE, capacity_factor=1.0)),
        "by-score": dataclasses.replace(plain, moe=dataclasses.replace(MOE, capacity_factor=1.0, drop="score")),
        "deepseek": dataclasses.replace(
            plain,
            mla=LATENT,
            head_dim=12,
            num_kv_heads=4,
            moe=dataclasses.replace(deepseek, bias_balance=True, bias_rate=0.01),
        ),
    }


def models() -> dict[str, ModelConfig]:
    """One of each kind without experts; the names say whether the head is the embedding."""
    return {
        "llama": dataclasses.replace(LLAMA, tied=False),
        "llama-tied": dataclasses.replace(LLAMA, tied=True),
        "gpt2": dataclasses.replace(GPT2, tied=False),
        "gpt2-tied": dataclasses.replace(GPT2, tied=True),
        "qwen3": dataclasses.replace(LLAMA, qk_norm=True, num_kv_heads=1, qkv_bias=True, tied=False),
    }


@dataclass(frozen=True, kw_only=True)
class Run:
    """What both sides do. ``empty``: samples at the end of the batch whose targets are all masked."""

    steps: int = 1
    documents: bool = False
    freeze: tuple[str, ...] = ()
    """Parts of names of parameters that do not train."""
    skip: int | None = None
    """A layer that is not run in steps 0, 2, 4 ...: its parameters get no gradient at all, and have one in between."""
    seq: int = SEQ
    empty: int = 0
    transport: str = "auto"


def global_batch(config: ModelConfig, step: int, run: Run | None = None) -> Batch:
    """A batch whose samples have different numbers of unmasked targets (case P1)."""
    run = run or Run()
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, config.vocab_size, (GLOBAL_BATCH, run.seq + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    lengths = torch.randint(1, run.seq + 1, (GLOBAL_BATCH,), generator=generator)
    targets[torch.arange(run.seq)[None] >= lengths[:, None]] = IGNORE
    targets[GLOBAL_BATCH - run.empty :] = IGNORE
    positions = numbers = None
    if run.documents:
        ends = torch.rand((GLOBAL_BATCH, run.seq), generator=generator) < 0.25
        numbers = ends.long().cumsum(1)
        starts = torch.where(ends, torch.arange(run.seq), 0).cummax(1).values
        positions = torch.arange(run.seq)[None] - starts
    return Batch(
        tokens_BT=tokens[:, :-1].contiguous(),
        targets_BT=targets,
        sample_B=torch.arange(GLOBAL_BATCH) + step * GLOBAL_BATCH,
        step=step,
        positions_BT=positions,
        documents_BT=numbers,
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
    """A data rank's share of the batch."""
    assert plan.dp is not None
    share = GLOBAL_BATCH // plan.dp
    begin = dp_index * share
    return [rows(batch, slice(at, at + plan.micro)) for at in range(begin, begin + share, plan.micro)]


def count(batch: Batch) -> int:
    return int((batch.targets_BT != IGNORE).sum())


def _frozen(name: str, run: Run) -> bool:
    return any(part in name for part in run.freeze)


def build(connect: Connect, text: str, world_size: int, config: ModelConfig, run: Run) -> tuple[Parallel, Plan]:
    """The cut model of one rank, filled."""
    plan = Plan.parse(text).resolve(world_size)
    world = connect(plan.mesh(world_size), transport=run.transport)
    with torch.device("meta"):
        model = Decoder(config, seed=7)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and not _frozen(name, run))
    parallel = parallelize(model, plan, world, weights=InitSource(config, 3))
    return parallel, plan


def _skip(model: torch.nn.Module, run: Run, step: int) -> None:
    assert isinstance(model, Decoder)
    if run.skip is None or str(run.skip) not in model.layers:
        return
    block = model.layers[str(run.skip)]
    if step % 2 == 0:
        block.forward = lambda h_ND, rope, batch: h_ND  # type: ignore[method-assign]
    else:
        del block.forward


def adamw(decay: list[Any], rest: list[Any]) -> torch.optim.AdamW:
    # A rank whose stages are all frozen has no parameters: torch takes empty groups, but not an empty list of groups.
    kinds = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(kinds, lr=1e-3, eps=1e-4)


def cut_run(connect: Connect, text: str, world_size: int, config: ModelConfig, run: Run) -> dict[str, Any]:
    """On one rank: losses, norms, first-step gradients and final weights as rows for `assemble`."""
    parallel, plan = build(connect, text, world_size, config, run)
    world = parallel.world
    optimizer = adamw(*parallel.zero.optimizer_groups())
    losses, norms, grads = [], [], []
    loads: dict[int, list[float]] = {}
    for step in range(run.steps):
        for stage in parallel.stages:
            _skip(stage.module, run, step)
        batch = global_batch(config, step, run)
        loss = parallel.forward_backward(microbatches(batch, plan, world.at["dp"]), count(batch))
        losses.append(float(loss))
        square = parallel.share_loss(torch.zeros(()), parallel.zero.square_norm())[1]
        norms.append(float(square.sqrt()))
        if step == 0:
            grads = [_row(one, start, part) for one, start, part in parallel.zero.gradients()]
        parallel.zero.scale_gradients(min(1.0, 1.0 / (norms[-1] + 1e-6)))
        optimizer.step()
        parallel.zero.publish()
        loads = parallel.loads(parallel.close_routers())
    with parallel.zero.whole():
        weights = [_row(one, 0, view.reshape(-1)) for one, view, _ in parallel.zero.parameters()]
    state = sum(value.numel() for kept in optimizer.state.values() for value in kept.values() if value.dim())
    return {
        "losses": losses,
        "norms": norms,
        "grads": grads,
        "weights": weights,
        "state": state,
        "loads": loads,
        "bytes": dict(world.book.ledger.bytes),
    }


def _row(one: Any, start: int, part: Tensor) -> tuple[Any, ...]:
    # A copy, because pools send arrays, not torch's shared memory.
    return one.name, one.shape, [(piece.box, piece.local) for piece in one.pieces], start, part.float().numpy().copy()


def assemble(config: ModelConfig, results: list[list[tuple[Any, ...]]]) -> dict[str, Tensor]:
    """Whole tensors from what the ranks hold (NaN where nobody holds anything); all copies must be bitwise equal."""
    whole = {name: torch.full(shape, math.nan) for name, shape in parameter_shapes(config).items()}
    for rank, rank_rows in enumerate(results):
        local: dict[str, Tensor] = {}
        for name, shape, _, start, values in rank_rows:
            flat = local.setdefault(name, torch.full((math.prod(shape),), math.nan))
            flat[start : start + len(values)] = torch.from_numpy(values)
        for name, shape, pieces, _, _ in rank_rows:
            for box, inside in pieces:
                block = local[name].view(shape)[tuple(slice(*edge) for edge in inside)]
                target = whole[name][tuple(slice(*edge) for edge in box)]
                have = ~block.isnan()
                both = have & ~target.isnan()
                assert torch.equal(target[both], block[both]), f"the copy of {name} on rank {rank} differs from another"
                target[have] = block[have]
    return whole


@functools.cache
def one_process(config: ModelConfig, run: Run) -> dict[str, Any]:
    """The reference: the plain model, torch's autograd, clipping and AdamW on whole tensors."""
    model = Decoder(config, seed=7)
    initialise(model, InitSource(config, 3))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and not _frozen(name, run))
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = adamw([p for p in named.values() if p.dim() >= 2], [p for p in named.values() if p.dim() < 2])
    losses, norms, grads = [], [], {}
    loads: dict[int, list[float]] = {}
    for step in range(run.steps):
        _skip(model, run, step)
        batch = global_batch(config, step, run)
        real = rows(batch, slice(0, GLOBAL_BATCH - run.empty))
        loss = model.loss(model(None, real), real.targets_BT.flatten()) / count(batch)
        optimizer.zero_grad()
        loss.backward()
        for parameter in named.values():
            # A parameter without a gradient counts as one of zero, and its weight decays like the others.
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        losses.append(float(loss.detach()))
        if step == 0:
            grads = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
        norms.append(float(torch.nn.utils.clip_grad_norm_(list(named.values()), 1.0)))
        optimizer.step()
        loads = {}
        for layer, router in routers(model).items():
            loads[layer] = Sums.of(router.stats).load_E.tolist()
            end_step(router, router.stats.clone())
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "grads": grads, "weights": weights, "loads": loads}


def relative(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|; infinite where a has a NaN (an element that nobody holds)."""
    error = float((a - b).detach().norm() / b.detach().norm().clamp_min(1e-12))
    return math.inf if math.isnan(error) else error


@dataclass(kw_only=True)
class Errors:
    """The largest relative differences from the reference."""

    loss: float
    norm: float
    grad: tuple[float, str]
    weight: tuple[float, str]


def differences(config: ModelConfig, results: list[dict[str, Any]], wanted: dict[str, Any]) -> Errors:
    """How far the ranks' results are from one process. Every rank must have the same losses and norms."""
    for result in results:
        assert result["losses"] == results[0]["losses"], "ranks disagree on the loss"
        assert result["norms"] == results[0]["norms"], "ranks disagree on the norm"
        assert result["loads"] == wanted["loads"], "tokens went to other experts than on one process"

    def largest(key: str) -> float:
        pairs = zip(results[0][key], wanted[key], strict=True)
        return max((abs(a - b) / abs(b) for a, b in pairs), default=0.0)

    def worst(key: str) -> tuple[float, str]:
        whole = assemble(config, [result[key] for result in results])
        return max(((relative(whole[name], value), name) for name, value in wanted[key].items()), default=(0.0, ""))

    return Errors(loss=largest("losses"), norm=largest("norms"), grad=worst("grads"), weight=worst("weights"))


def check_equal(
    pool: Pool, text: str, world_size: int, config: ModelConfig, run: Run | None = None, *, tolerance: float = TOLERANCE
) -> list[dict[str, Any]]:
    """Run ``text`` on ``world_size`` ranks and hold it to the reference; returns the ranks' results."""
    run = run or Run()
    results = pool.run(world_size, cut_run, text, world_size, config, run)
    errors = differences(config, results, one_process(config, run))
    told = f"{text} on {world_size}: {errors}"
    assert errors.loss < tolerance, told
    assert errors.norm < tolerance, told
    assert errors.grad[0] < tolerance, told
    assert errors.weight[0] < WEIGHTS_TOLERANCE, told
    return results
