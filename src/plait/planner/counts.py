"""What one rank computes, sends and holds in a step, exactly, in closed form. No torch.

The numbers are those of plait's own executor, equal to what ``plait dry-run`` counts of it: FLOPs (2 m n k a product;
attention as its kernels compute it, not halved for the causal mask; backward and recomputation as well), bytes and
calls of every collective as the ledger books them, and the training state with its padding. Where values decide, both
take the same: tokens are spread evenly over the experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plait.core.errors import PlanError
from plait.planner.counts_layers import Layers
from plait.planner.counts_state import State
from plait.planner.counts_tally import Tally
from plait.planner.job import Job


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Of one rank in one step."""

    flops: int
    bytes: Mapping[tuple[str, str], int]
    """(axis, operation) -> bytes sent; the keys of the ledger."""
    calls: Mapping[tuple[str, str], int]
    parameters: int
    """Elements of the tensors, or parts of tensors, that the rank computes with."""
    weights: int
    gradients: int
    optimizer: int
    """Bytes that stay on the rank between steps."""

    def bytes_by_axis(self) -> dict[str, int]:
        """Bytes sent along each axis."""
        found: dict[str, int] = {}
        for (axis, _), sent in self.bytes.items():
            found[axis] = found.get(axis, 0) + sent
        return found


def counts(job: Job, rank: int) -> Counts:
    """What ``rank`` does in a step of ``job``. PlanError for a rank that there is not."""
    size = job.world_size
    if not 0 <= rank < size:
        raise PlanError(f"rank {rank} is none of the world's; what works: 0 to {size - 1}")
    tally = Tally()
    Layers(job, rank, tally).count()
    state = State(job, rank)
    state.count(tally)
    model = job.model
    # Loss and norm, and what the routers saw, of all ranks together.
    tally.call("pp+dp+cp+tp", "all_reduce", size, 2 * 8)
    sparse = sum(model.moe_of(layer) is not None for layer in range(model.num_layers))
    if model.moe is not None and sparse:
        tally.call("pp+dp+cp+tp", "all_reduce", size, 8 * sparse * (3 * model.moe.num_experts + 3))
    weights, gradients, optimizer = state.bytes()
    return Counts(
        flops=tally.flops,
        bytes=dict(tally.bytes),
        calls=dict(tally.calls),
        parameters=state.parameters,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
    )
