"""Vocabulary parallel embedding and cross-entropy: the ranks of ``tp`` hold ranges of the vocabulary.

Ranges differ by at most one token, so a vocabulary that does not divide needs no padding, and no padded token can take
probability. Logits are never gathered: three numbers a row cross the wire. N rows, V this rank's tokens, D hidden.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.comm.collectives import REDUCE, SCATTER, start
from plait.comm.group import Group
from plait.models.batch import IGNORE
from plait.parallel.linear import Fused

_CHUNK_ELEMENTS = 1 << 20


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens_N: Tensor, layer: VocabEmbedding) -> Tensor:
        ctx.layer = layer
        group = layer.group
        if group.size == 1:
            ctx.save_for_backward(tokens_N)
            return F.embedding(tokens_N, weight)
        local_N = tokens_N - layer.start
        mine_M = ((local_N >= 0) & (local_N < weight.shape[0])).nonzero().squeeze(1)
        rows_M = local_N[mine_M]
        ctx.save_for_backward(rows_M, mine_M)
        out_ND = weight.new_zeros(tokens_N.shape[0], weight.shape[1])
        out_ND.index_copy_(0, mine_M, F.embedding(rows_M, weight))
        return start(out_ND, group, layer.arrow.forward).wait()

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[None, None, None]:
        layer: VocabEmbedding = ctx.layer
        grad_ND = start(grad_ND.contiguous(), layer.group, layer.arrow.backward).wait()
        if layer.group.size == 1:
            (rows_M,) = ctx.saved_tensors
        else:
            rows_M, mine_M = ctx.saved_tensors
            grad_ND = grad_ND[mine_M]
        if "weight" in layer.slots:
            layer.slots["weight"].add_rows(rows_M, grad_ND)
        return None, None, None


@final
class VocabEmbedding(Fused):
    """tokens int64 [N] -> [N, D] (or [N/tp, D] when ``sequence``); weight [V, D] is the range from ``start`` on."""

    def __init__(self, *, group: Group, sequence: bool, start: int) -> None:
        super().__init__()
        self.group = group
        self.arrow = SCATTER if sequence else REDUCE
        self.start = start
        self.weight: nn.Parameter

    def forward(self, tokens_N: Tensor) -> Tensor:
        out: Tensor = _Embed.apply(self.weight, tokens_N, self)  # type: ignore[no-untyped-call]
        return out


class _CrossEntropy(torch.autograd.Function):
    """loss_n = log(sum_v exp(logit_nv)) - logit_n,target, the sum and the target's logit found where they live."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, group: Group, start: int) -> Tensor:
        rows, tokens = logits_NV.shape
        kept_N = targets_N != IGNORE
        local_N = targets_N - start
        mine_N = (local_N >= 0) & (local_N < tokens) & kept_N
        top_N = logits_NV.amax(1).float() if tokens else torch.full((rows,), -torch.inf, device=logits_NV.device)
        top_N = group.all_reduce(top_N, "max").wait()
        # Both numbers that are sums over the vocabulary travel together.
        sums_2N = torch.zeros(2, rows, device=logits_NV.device)
        for part in _row_chunks(rows, tokens):
            sums_2N[0, part] = (logits_NV[part].float() - top_N[part, None]).exp_().sum(1)
        index_N = local_N.masked_fill(~mine_N, 0)[:, None]
        if tokens:
            sums_2N[1] = (logits_NV.gather(1, index_N).squeeze(1).float() - top_N).masked_fill_(~mine_N, 0.0)
        sums_2N = group.all_reduce(sums_2N).wait()
        log_sum_N = sums_2N[0].log()
        ctx.save_for_backward(logits_NV, top_N + log_sum_N, index_N, mine_N, kept_N)
        return (log_sum_N - sums_2N[1]).masked_fill_(~kept_N, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits_NV, total_N, index_N, mine_N, kept_N = ctx.saved_tensors
        scale_N = kept_N.float() * grad
        # The logits are not needed again: the gradient takes their place, so one tensor of this size lives, not three.
        hit_N = torch.where(mine_N, scale_N, 0.0)
        for part in _row_chunks(*logits_NV.shape):
            chunk = logits_NV[part].float().sub_(total_N[part, None]).exp_().mul_(scale_N[part, None])
            # In fp32: probability minus one of a token that was sure is lost to rounding in bf16.
            chunk.scatter_add_(1, index_N[part], -hit_N[part, None])
            logits_NV[part] = chunk
        return logits_NV, None, None, None


def _row_chunks(rows: int, columns: int) -> list[slice]:
    step = max(1, _CHUNK_ELEMENTS // max(1, columns))
    return [slice(begin, begin + step) for begin in range(0, rows, step)]


@final
class VocabCrossEntropy(nn.Module):
    """logits [N, V] of this rank's tokens from ``start`` on, targets int64 [N] -> the sum of token losses, fp32.

    The result is the same on every rank. The logits are overwritten by their gradient in backward.
    """

    def __init__(self, *, group: Group, start: int) -> None:
        super().__init__()
        self.group = group
        self.start = start

    def forward(self, logits_NV: Tensor, targets_N: Tensor) -> Tensor:
        loss: Tensor = _CrossEntropy.apply(logits_NV, targets_N, self.group, self.start)  # type: ignore[no-untyped-call]
        return loss
