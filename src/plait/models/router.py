"""Which experts a token takes, and with what weights: `Router`. One device; what a cut replaces are its seams.

N rows (tokens), D hidden, E experts, K experts a token, B samples of T tokens.

The same tokens and weights give the same choice in every cut, bit for bit: the logits of a row are products in fp64
rounded to fp32 (the order of fp64 sums, which the shape of a product decides, moves them by some 1e-16 of
sum(|h| |w|); so rounding to fp32 hides it but in about one of 1e8 logits, and then the choice only changes where two
scores are one fp32 step apart), everything after that works row by row, and equal scores go to the lower expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from plait.models.batch import Batch
from plait.models.parts import MoEConfig
from plait.models.router_sums import Sums, observe, zero_sums


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The experts of N rows."""

    experts_NK: Tensor
    """int64, by falling score; of equal scores the lower expert comes first."""
    weights_NK: Tensor
    """fp32 (fp64 in an fp64 model), differentiable: what each expert's output is multiplied with."""
    kept_NK: Tensor | None
    """bool, False where the expert does not see the row: beyond its capacity, or padding; None: all are kept."""


class _Logits(torch.autograd.Function):
    """h @ W^T in fp64, rounded to fp32; gradients in fp32. Keeps the operands alone."""

    @staticmethod
    def forward(ctx: Any, h_ND: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(h_ND, weight_ED)
        exact_NE = h_ND.double() @ weight_ED.double().t()
        return exact_NE if h_ND.dtype == torch.float64 else exact_NE.float()

    @staticmethod
    def backward(ctx: Any, grad_NE: Tensor) -> tuple[Tensor, Tensor]:
        h_ND, weight_ED = ctx.saved_tensors
        grad_h = grad_NE @ weight_ED.to(grad_NE.dtype)
        grad_weight = grad_NE.t() @ h_ND.to(grad_NE.dtype)
        return grad_h.to(h_ND.dtype), grad_weight.to(weight_ED.dtype)


class _Inject(torch.autograd.Function):
    """Its first argument; the backward adds the second one to the gradient."""

    @staticmethod
    def forward(ctx: Any, logits_NE: Tensor, extra_NE: Tensor) -> Tensor:
        ctx.save_for_backward(extra_NE)
        return logits_NE.view_as(logits_NE)

    @staticmethod
    def backward(ctx: Any, grad_NE: Tensor) -> tuple[Tensor, None]:
        (extra_NE,) = ctx.saved_tensors
        return grad_NE + extra_NE, None


def identity(rows: Tensor, batch: Batch) -> Tensor:
    """The seams of `Router` on one device: a rank's rows are all rows."""
    return rows


def within_capacity(experts_NK: Tensor, score_NK: Tensor | None, experts: int, limit_B: Tensor) -> Tensor:
    """bool [N, K]: which assignments are among the first ``limit_B`` (int64) of their expert in their sample.

    ``experts_NK`` holds the rows of whole samples, one sample after the other; ``experts`` stands in it for padding,
    which is never kept. The first are those of the highest ``score_NK`` (of equal ones the earlier row and choice), or
    for None those of the earlier rows.
    """
    rows, top_k = experts_NK.shape
    samples = limit_B.numel()
    sample_N = torch.arange(samples, device=experts_NK.device).repeat_interleave(rows // max(samples, 1))
    queue = (sample_N[:, None] * (experts + 1) + experts_NK).flatten()
    order = torch.arange(rows * top_k, device=queue.device)
    if score_NK is not None:
        order = score_NK.flatten().argsort(descending=True, stable=True)
    order = order[queue[order].argsort(stable=True)]
    lengths = torch.bincount(queue, minlength=samples * (experts + 1))
    begins = lengths.cumsum(0) - lengths
    place = torch.empty_like(queue)
    place[order] = torch.arange(rows * top_k, device=queue.device) - begins[queue[order]]
    return (place.view(rows, top_k) < limit_B[sample_N][:, None]) & (experts_NK < experts)


class Router(nn.Module):
    """h [N, D] -> `Choice`; weight [E, D], bias [E] (moved by `end_step` alone) or None.

    In training it also adds the gradients of its two losses to the logits' gradient, times ``batch.scale``, and sums up
    what it saw in ``stats`` for the step's end. Both losses are means over the real rows of the *global* batch, so that
    every cut has the same; the load in the balancing loss is that of the step before, which is known when a pipeline
    runs the first backward of a step. ``gather`` maps this rank's rows [n, ...] to the rows of the whole samples of the
    microbatch, in order, and ``mine`` maps those back: a cut of the rows sets both.
    """

    def __init__(self, hidden_size: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size))
        bias = torch.empty(config.num_experts) if config.bias else None
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.gather: Callable[[Tensor, Batch], Tensor] = identity
        self.mine: Callable[[Tensor, Batch], Tensor] = identity
        self.recording = True
        """Off while a block is computed again: what its rows add to the sums has been added."""
        # No buffers: they are real where a model is built on meta, and keep their dtype where it is cast.
        self.stats = zero_sums(config.num_experts)
        """fp64 [3E + 3]: see `Sums`."""
        self.share_E = torch.full((config.num_experts,), 1 / config.num_experts, device="cpu")
        """fp32: each expert's share of the assignments of the step before."""

    def forward(self, h_ND: Tensor, batch: Batch, rows: slice | None = None) -> Choice:
        """``rows``: which of the batch's B*T rows ``h_ND`` holds; None: all."""
        real_N = batch.real_N()
        if real_N is not None and rows is not None:
            real_N = real_N[rows]
        logits_NE: Tensor = _Logits.apply(h_ND, self.weight)  # type: ignore[no-untyped-call]
        if self.training and (self.config.aux_loss or self.config.z_loss):
            extra_NE = self._loss_gradient(logits_NE.detach(), real_N, batch)
            logits_NE = _Inject.apply(logits_NE, extra_NE)  # type: ignore[no-untyped-call]
        scores_NE = self._scores(logits_NE)
        experts_NK = self._choose(scores_NE.detach())
        weights_NK = scores_NE.gather(1, experts_NK)
        kept_NK = self._kept(experts_NK, weights_NK.detach(), real_N, batch)
        if self.training and self.recording:
            self._place(h_ND.device)
            self.stats += observe(logits_NE.detach(), experts_NK, kept_NK, real_N, self.config)
        if self.config.normalise:
            weights_NK = weights_NK / (weights_NK.sum(-1, keepdim=True) + 1e-20)
        return Choice(experts_NK=experts_NK, weights_NK=weights_NK * self.config.scale, kept_NK=kept_NK)

    def _scores(self, logits_NE: Tensor) -> Tensor:
        if self.config.score == "softmax":
            return logits_NE.softmax(-1)
        # In fp64, rounded: fp32's vector and scalar kernels differ in the last bit, by where a row lies in memory.
        return logits_NE.double().sigmoid().to(logits_NE.dtype)

    @torch.no_grad()
    def _choose(self, scores_NE: Tensor) -> Tensor:
        """int64 [N, K]; groups as in DeepSeek-V3, arXiv:2412.19437, section 2.1.2."""
        config = self.config
        if self.bias is not None:
            scores_NE = scores_NE + self.bias.to(scores_NE.dtype)
        if config.groups > 1:
            each_NGE = scores_NE.view(scores_NE.shape[0], config.groups, -1)
            best_NG = each_NGE.topk(2, dim=-1).values.sum(-1)
            chosen_N = best_NG.sort(dim=-1, descending=True, stable=True).indices[:, : config.top_groups]
            open_NG = torch.zeros_like(best_NG, dtype=torch.bool).scatter_(1, chosen_N, True)
            scores_NE = each_NGE.masked_fill(~open_NG[..., None], -math.inf).flatten(1)
        # topk promises no order of equal scores; a stable sort keeps the lower expert first.
        return scores_NE.sort(dim=-1, descending=True, stable=True).indices[:, : config.top_k].contiguous()

    @torch.no_grad()
    def _kept(self, experts_NK: Tensor, score_NK: Tensor, real_N: Tensor | None, batch: Batch) -> Tensor | None:
        config = self.config
        if config.capacity_factor is None:
            return None if real_N is None else real_N[:, None].expand_as(experts_NK)
        if real_N is not None:
            experts_NK = experts_NK.masked_fill(~real_N[:, None], config.num_experts)
        whole_NK = self.gather(experts_NK, batch)
        samples = batch.tokens_BT.shape[0]
        # As typed: in binary, 1.1 of 10 would make 12. Padding, which depends on the cut, adds nothing.
        share = Fraction(str(config.capacity_factor)) * config.top_k / config.num_experts
        real_B = (whole_NK[:, 0] < config.num_experts).view(samples, -1).sum(1)
        limit_B = -(-real_B * share.numerator // share.denominator)
        by_score = self.gather(score_NK, batch) if config.drop == "score" else None
        kept_NK = within_capacity(whole_NK, by_score, config.num_experts, limit_B)
        return self.mine(kept_NK, batch)

    @torch.no_grad()
    def _loss_gradient(self, logits_NE: Tensor, real_N: Tensor | None, batch: Batch) -> Tensor:
        """Gradient of the two losses (`router_sums.losses`) for these rows' logits, the load held fixed."""
        config, device = self.config, logits_NE.device
        self._place(device)
        total = batch.total
        if total is None:
            total = logits_NE.shape[0] if real_N is None else int(real_N.sum())
        softmax_NE = logits_NE.softmax(-1)
        lse_N = logits_NE.logsumexp(-1, keepdim=True)
        grad_NE = softmax_NE * lse_N * (2 * config.z_loss)
        worth_E = self.share_E.to(logits_NE.dtype) * (config.aux_loss * config.num_experts)
        if config.score == "softmax":
            grad_NE += softmax_NE * (worth_E - softmax_NE @ worth_E[:, None])
        else:
            score_NE = logits_NE.sigmoid()
            whole_N = score_NE.sum(-1, keepdim=True)
            slope_NE = score_NE * (1 - score_NE) / whole_N
            grad_NE += slope_NE * (worth_E - (score_NE / whole_N) @ worth_E[:, None])
        if real_N is not None:
            grad_NE *= real_N[:, None]
        return grad_NE * (batch.scale / max(total, 1))

    def _place(self, device: torch.device) -> None:
        if self.stats.device != device:
            self.stats, self.share_E = self.stats.to(device), self.share_E.to(device)


@contextmanager
def unrecorded(*models: nn.Module) -> Iterator[None]:
    """The routers in ``models`` add nothing to their sums inside: what they see has been, or is not to be, counted."""
    found = [module for model in models for module in model.modules() if isinstance(module, Router)]
    for router in found:
        router.recording = False
    try:
        yield
    finally:
        # Also where the computation is broken off, as recomputation is once it has made what backward needs.
        for router in found:
            router.recording = True


@torch.no_grad()
def end_step(router: Router, total_stats: Tensor) -> None:
    """Close an optimizer step: ``total_stats`` is ``router.stats`` summed over the whole global batch.

    Sets the load for the next step's balancing loss, moves the bias towards the experts that had less than the mean
    (arXiv:2408.15664), and starts the sums anew.
    """
    load_E = Sums.of(total_stats).load_E
    if bool(load_E.sum() > 0):
        router.share_E = (load_E / load_E.sum()).float().to(router.share_E.device)
        if router.config.bias_balance and router.bias is not None:
            router.bias.add_(torch.sign(load_E.mean() - load_E).to(router.bias), alpha=router.config.bias_rate)
    router.stats.zero_()
