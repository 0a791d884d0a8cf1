"""A mixture of experts in place of the MLP, on one device: router, experts, shared expert.

N rows (tokens), D hidden, E experts, K experts a token, F ffn of an expert, M = the assignments that are kept.
What a cut replaces: the whole `MoE` (its children's names stay), or the seams of `Router`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plait.models.batch import Batch
from plait.models.layers import GatedMLP, swiglu
from plait.models.parts import MoEConfig
from plait.models.router import Choice, Router, end_step
from plait.models.router_sums import Sums
from plait.models.router_sums import losses as moe_losses
from plait.models.router_sums import metrics as moe_metrics

__all__ = ["Choice", "Experts", "MoE", "Router", "Sums", "end_step", "moe_losses", "moe_metrics", "routers"]


class Experts(nn.Module):
    """x [N, D], choice -> [N, D]: the weighted sum of the experts that each row has chosen.

    gate_up [E, 2F, D] (gate rows, then up), down [E, D, F]. Rows are sorted by expert, so that each expert's are a
    contiguous slice; outputs are weighted and added up in fp32. Assignments that are not kept add nothing.
    """

    def __init__(self, hidden_size: int, config: MoEConfig) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(config.num_experts, 2 * config.ffn_size, hidden_size))
        self.down = nn.Parameter(torch.empty(config.num_experts, hidden_size, config.ffn_size))

    def forward(self, x_ND: Tensor, choice: Choice) -> Tensor:
        experts = self.gate_up.shape[0]
        chosen = choice.experts_NK.flatten()
        if choice.kept_NK is not None:
            chosen = chosen.masked_fill(~choice.kept_NK.flatten(), experts)
        counts = torch.bincount(chosen, minlength=experts + 1)[:experts].tolist()
        order_M = chosen.argsort(stable=True)[: sum(counts)]
        row_M = order_M // choice.experts_NK.shape[1]
        parts = torch.split(x_ND.index_select(0, row_M), counts)
        out_MD = torch.cat(
            [
                F.linear(swiglu(*F.linear(part_nD, gate_up_FD).chunk(2, dim=-1)), down_DF)
                # unbind: its backward stacks the experts' gradients; that of an index adds a whole [E, ...] each.
                for part_nD, gate_up_FD, down_DF in zip(parts, self.gate_up.unbind(), self.down.unbind(), strict=True)
            ]
        )
        weight_M = choice.weights_NK.flatten().index_select(0, order_M)
        weighted_MD = out_MD.to(weight_M.dtype) * weight_M[:, None]
        return weighted_MD.new_zeros(x_ND.shape).index_add(0, row_M, weighted_MD).to(x_ND.dtype)


class MoE(nn.Module):
    """h [N, D] -> [N, D]: the chosen experts' sum, and the shared expert's output where there is one."""

    def __init__(self, hidden_size: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.router = Router(hidden_size, config)
        self.experts = Experts(hidden_size, config)
        self.shared = GatedMLP(hidden_size, config.shared_ffn, bias=False) if config.shared_ffn else None

    def forward(self, h_ND: Tensor, batch: Batch) -> Tensor:
        out_ND: Tensor = self.experts(h_ND, self.router(h_ND, batch))
        if self.shared is not None:
            out_ND = out_ND + self.shared(h_ND)
        return out_ND


def routers(model: nn.Module) -> dict[int, Router]:
    """Global layer index -> router, of a decoder or a part of one, cut or not."""
    named = ((name.split("."), module) for name, module in model.named_modules())
    return {int(path[1]): module for path, module in named if isinstance(module, Router)}
