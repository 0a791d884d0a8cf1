"""What the time model answers: seconds of one training step, and where a pipeline rank spends them.

All times are seconds of one optimizer step. Axes (``tp``, ``dp``, ``cp``, ``ep``, ``pp``) are mesh axes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RankTime:
    """One pipeline rank's step; all ranks of a ``pp`` coordinate are alike.

    ``compute`` is the time busy with F, B and W, launch overhead included. ``exposed`` holds, by axis, the
    communication nothing hides; ``hidden`` the communication under compute. ``bubble`` is idle time of the
    pipeline, ``optimizer`` the parameter update, ``other`` data, host, gradient norm, and copies of activations to the
    host that nothing hides. They make up the step.
    """

    pp: int
    compute: float
    exposed: Mapping[str, float]
    hidden: Mapping[str, float]
    bubble: float
    optimizer: float
    other: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A predicted step. ``low`` and ``high`` bound the interval learnt from residuals on published rows.

    ``model_flops`` follows :func:`plait.models.shapes.flops_per_token` (forward and backward, causal attention
    halved, no recomputation); ``hardware_flops`` adds recomputation. ``mfu`` is ``model_flops`` over the step time,
    the world and the peak of the precision, None where the device's peak is unknown.
    """

    step_time: float
    low: float
    high: float
    tokens_per_s_per_device: float
    model_flops: float
    hardware_flops: float
    mfu: float | None
    bubble_rate: float
    ranks: tuple[RankTime, ...]
