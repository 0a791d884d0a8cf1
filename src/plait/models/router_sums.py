"""What routers saw in a step, as one vector of sums that ranks can add up, and what follows from it. Pure functions.

N rows, E experts, K experts a token. Only real rows count, padding does not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from plait.models.parts import MoEConfig


@dataclass(frozen=True, kw_only=True)
class Sums:
    """The vector fp64 [3E + 3] by name."""

    load_E: Tensor
    """Assignments, before dropping."""
    dropped_E: Tensor
    """Assignments beyond the capacity."""
    probability_E: Tensor
    """Router probabilities: the softmax of the logits, or sigmoid scores over their sum."""
    entropy: Tensor
    """Entropies (nats) of the tokens' probabilities."""
    squared_lse: Tensor
    """Squares of the log-sum-exp of the tokens' logits."""
    real: Tensor
    """Real rows."""

    @classmethod
    def of(cls, stats: Tensor) -> Sums:
        """The parts of a vector, as views."""
        load_E, dropped_E, probability_E, rest = torch.split(stats, [*[(stats.numel() - 3) // 3] * 3, 3])
        return cls(
            load_E=load_E,
            dropped_E=dropped_E,
            probability_E=probability_E,
            entropy=rest[0],
            squared_lse=rest[1],
            real=rest[2],
        )


def zero_sums(experts: int) -> Tensor:
    """The vector before any row; on the CPU wherever a model is being built."""
    return torch.zeros(3 * experts + 3, dtype=torch.float64, device="cpu")


@torch.no_grad()
def observe(
    logits_NE: Tensor, experts_NK: Tensor, kept_NK: Tensor | None, real_N: Tensor | None, config: MoEConfig
) -> Tensor:
    """The vector of some rows."""
    experts = config.num_experts
    if real_N is not None:
        logits_NE, experts_NK = logits_NE[real_N], experts_NK[real_N]
        kept_NK = None if kept_NK is None else kept_NK[real_N]
    if config.score == "softmax":
        probability_NE = logits_NE.softmax(-1)
    else:
        probability_NE = logits_NE.sigmoid()
        probability_NE = probability_NE / probability_NE.sum(-1, keepdim=True)
    load_E = torch.bincount(experts_NK.flatten(), minlength=experts).double()
    dropped_E = torch.zeros_like(load_E)
    if kept_NK is not None:
        dropped_E = torch.bincount(experts_NK[~kept_NK], minlength=experts).double()
    entropy = torch.special.entr(probability_NE).sum(dtype=torch.float64)
    squared_lse = logits_NE.logsumexp(-1).square().sum(dtype=torch.float64)
    real = torch.full_like(entropy, logits_NE.shape[0])
    rest = torch.stack([entropy, squared_lse, real])
    return torch.cat([load_E, dropped_E, probability_NE.sum(0, dtype=torch.float64), rest])


def losses(total_stats: Tensor, config: MoEConfig) -> dict[str, float]:
    """The two losses of a step of one router, from the sums over its global batch, weights included.

    ``aux``: ``aux_loss * E * sum_e(f_e P_e)``, f the share of assignments, P the mean probability (Switch,
    arXiv:2101.03961, eq. 4; with K experts a token f still sums to 1). ``z``: ``z_loss * mean(lse^2)`` (ST-MoE,
    arXiv:2202.08906, eq. 5). Without any real row both are 0.
    """
    sums = Sums.of(total_stats)
    real, load = max(float(sums.real), 1.0), max(float(sums.load_E.sum()), 1.0)
    balance = float((sums.load_E * sums.probability_E).sum()) / (load * real)
    return {
        "aux": config.aux_loss * config.num_experts * balance,
        "z": config.z_loss * float(sums.squared_lse) / real,
    }


def metrics(total_stats: Tensor, config: MoEConfig) -> dict[str, float | list[float]]:
    """What a person wants to know of a router's step, from the sums over its global batch.

    ``aux`` and ``z`` (`losses`), ``load`` (each expert's share of the assignments), ``probability`` (mean router
    probability of each), ``dropped`` (share of the assignments), ``spread`` (std / mean of the load; 0 is even),
    ``entropy`` (mean, nats).
    """
    sums = Sums.of(total_stats)
    assigned, real = max(float(sums.load_E.sum()), 1.0), max(float(sums.real), 1.0)
    mean = max(float(sums.load_E.mean()), 1e-300)
    return {
        **losses(total_stats, config),
        "load": (sums.load_E / assigned).tolist(),
        "probability": (sums.probability_E / real).tolist(),
        "dropped": float(sums.dropped_E.sum()) / assigned,
        "spread": float(sums.load_E.std(correction=0)) / mean,
        "entropy": float(sums.entropy) / real,
    }
