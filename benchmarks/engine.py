"""What every engine of the benchmark shares: its interface, and the peers' clipping and optimizer.

Clipping and update are the same for all of PyTorch's engines, because this form was the fastest for each:

- AdamW is the fused one over the *local* tensors of DTensor parameters: no DTensor dispatch per parameter, and tensors
  that DTensor's foreach paths refuse to mix may be mixed;
- each rank's share of the squared gradient norm comes from one ``_foreach_norm`` and is summed, together with the loss,
  in one all-reduce of two numbers; gradients are scaled only if the norm is above 1.0;
- the loss is divided by the global count of unmasked targets before backward, so no engine rescales gradients
  afterwards.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bench_model import IGNORE, BenchConfig

CLIP = 1.0
LEARNING_RATE, BETAS, WEIGHT_DECAY = 3e-4, (0.9, 0.95), 0.1


def local_of(tensor: Tensor) -> Tensor:
    """The plain tensor that this rank stores, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's part of the gradient. DTensor does not promise the parameter's own placement: it leaves norm weights
    ``Partial`` under sequence parallelism, and gives a vocabulary-parallel embedding a whole replicated gradient.
    """
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return local_of(gradient)


class Update:
    """Gradient clipping by the global norm and fused AdamW over local tensors.

    ``replicas``: on how many ranks of the world this rank's share of a parameter is stored; a replicated gradient
    counts 1/replicas in the squared norm on each, so the sum over the world counts each logical element once. Matrices
    alone decay, as in plait.
    """

    def __init__(self, parameters: Iterable[tuple[nn.Parameter, int]]) -> None:
        self.parameters = [(p, local_of(p.detach()), 1.0 / replicas) for p, replicas in parameters]
        decay = [local for _, local, _ in self.parameters if local.ndim >= 2]
        plain = [local for _, local, _ in self.parameters if local.ndim < 2]
        groups = [{"params": decay, "weight_decay": WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, fused=True)

    @torch.no_grad()
    def apply(self, loss: float) -> tuple[float, float]:
        """Takes this rank's share of the mean loss; updates the weights; returns (loss, gradient norm) of the world."""
        gradients = []
        for parameter, local, _ in self.parameters:
            local.grad = local_gradient(parameter)
            gradients.append(local.grad)
        norms = torch._foreach_norm(gradients)
        shares = torch.tensor([share for _, _, share in self.parameters], dtype=torch.float64)
        total = torch.stack([(torch.stack(norms).double().square() * shares).sum(), torch.tensor(loss).double()])
        dist.all_reduce(total)
        norm, mean = total[0].sqrt().item(), total[1].item()
        if norm > CLIP:
            torch._foreach_mul_(gradients, CLIP / (norm + 1e-6))
        self.optimizer.step()
        for parameter, local, _ in self.parameters:
            parameter.grad = local.grad = None
        return mean, norm


class Engine(ABC):
    """One way to train the benchmark model in ``ranks`` processes."""

    name: str
    ranks: int
    update: Update | None = None
    grad_norm: float = math.nan  # of the latest step, before clipping

    def __init__(self, config: BenchConfig) -> None:
        self.config = config

    @abstractmethod
    def setup(self, rank: int, world_size: int, weights: Mapping[str, Tensor]) -> None:
        """Builds the model from full plait-named weights; once on every rank, with torch.distributed up."""

    @abstractmethod
    def step(self, tokens_BT: Tensor, targets_BT: Tensor) -> float:
        """One training step on the global batch (the same tensors on all ranks). Returns the mean loss, the same on all
        ranks.
        """

    def finish(self, loss: float) -> float:
        """Clips and updates; takes this rank's share of the mean loss and returns the world's."""
        assert self.update is not None
        mean, self.grad_norm = self.update.apply(loss)
        return mean

    def require(self, world_size: int) -> None:
        if world_size != self.ranks:
            raise ValueError(f"{self.name} runs on {self.ranks} ranks, but the world has {world_size}")


def unmasked(targets_BT: Tensor) -> int:
    return int((targets_BT != IGNORE).sum())


def microbatches(tokens_BT: Tensor, targets_BT: Tensor, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The samples in ``count`` equal parts, for gradient accumulation (less memory, better use of caches)."""
    return zip(tokens_BT.chunk(count), targets_BT.chunk(count), strict=True)


def named(name: str, count: int) -> str:
    return name if count == 1 else f"{name}, {count} microbatches"
