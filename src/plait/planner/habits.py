"""What frameworks keep in memory that neither model nor plan says, read from their sources. One row a framework."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from plait.planner.constants import ALIKE
from plait.planner.job import Practice


@dataclass(frozen=True, kw_only=True)
class Habits:
    """Of the memory of a training step."""

    logits: tuple[float, float, float] = (4.0, 6.0, 2.0)
    """Bytes a logit that the loss keeps, and works with beside in forward and backward. The usual vocabulary-parallel
    loss: half-precision logits (2), their fp32 copy (4) and its exponentials (4), which are kept."""
    keeps_output: bool = True
    """A stage keeps what it has sent (Megatron lets it go: Korthikanti et al. 2022, appendix B)."""
    gathered_inputs: bool = False
    """Sequence parallel: linear layers keep all ranks' rows (DTensor, nanotron), not their own to gather again."""
    eager: bool = False
    """Pointwise operators keep their results (silu's beside the product), where no compiler fuses them."""
    dummies: bool = False
    """Fused weight gradients leave an unused one of every shape behind (Transformer Engine, Megatron's head)."""
    half_gradients: float = 0.0
    """Bytes a parameter of half-precision gradients that stay beside the fp32 sums."""
    update: float = 0.0
    """Bytes a parameter of this rank's share that the optimizer step works with."""
    saves_matmuls: bool = False
    """``selective`` keeps attention's output and every second product (torchtitan's operator policy)."""
    fsdp: bool = False
    """ZeRO 2 is FSDP without resharding: shards in fp32, whole weights in half precision, whole fp32 gradients."""
    low_inputs: bool = False
    """fp8 layers keep their inputs in fp8 (Transformer Engine); others in half precision."""


_EAGER_LOSS: Final = (6.0, 4.0, 8.0)
"""``cross_entropy(logits.float(), ...)``: logits (2), log-softmax (4); then the gradients of loss and softmax."""
_OF: Final[Mapping[str, Habits]] = {
    "megatron": Habits(logits=(4.0, 0.0, 0.0), keeps_output=False, dummies=True, low_inputs=True),
    "megatron-alltoall": Habits(logits=(4.0, 0.0, 0.0), keeps_output=False, dummies=True, low_inputs=True),
    "megatron-clamped": Habits(logits=(4.0, 0.0, 0.0), keeps_output=False, dummies=True, low_inputs=True),
    "megatron-deepspeed": Habits(),
    "deepspeed": Habits(),
    # accumulate_grad_in_fp32: the half-precision gradients of autograd stay allocated.
    "nanotron": Habits(gathered_inputs=True, eager=True, half_gradients=2.0),
    # Flat half-precision and fp32 copies of the gradients (2 + 4), and foreach AdamW's root and denominator (4 + 4).
    "internevo": Habits(update=14.0, eager=True),
    "torchtitan": Habits(logits=_EAGER_LOSS, gathered_inputs=True, saves_matmuls=True, fsdp=True),
    "fsdp": Habits(logits=_EAGER_LOSS, eager=True, fsdp=True),
    "maxtext": Habits(logits=(4.0, 0.0, 4.0)),
}


def habits_of(practice: Practice) -> Habits:
    """The row of the practice's framework, or of the one that it is like; the usual ones where there is none."""
    name = practice.framework
    return _OF.get(name, _OF.get(ALIKE.get(name, name), Habits()))
