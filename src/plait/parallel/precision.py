"""What a plan's precision means: the dtype layers compute in, fp16's loss scale, and where fp8 can run.

Master weights, gradients and their sums are fp32 in every precision (Micikevicius et al. 2018, arXiv:1710.03740).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

import torch

DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""Precision -> dtype of weights and activations. fp8 is bf16 but for the products of linear layers inside blocks."""

FIRST_SCALE: Final = 2.0**16
LEAST_SCALE: Final = 1.0
GROWTH_STEPS: Final = 2000
FP8_CAPABILITY: Final = (8, 9)
FP8_MULTIPLE: Final = 16


@final
@dataclass(kw_only=True)
class LossScale:
    """What fp16's loss, and so every gradient, is multiplied with, so that small ones are not lost below 6e-8.

    Halved when a gradient overflows, doubled after `GROWTH_STEPS` steps in a row without overflow (arXiv:1710.03740,
    section 3.2). It is a function of what `update` was told alone: ranks that are told the same (whether the norm of
    all gradients, which all ranks share, is finite) keep the same scale without asking each other. Both fields belong
    to a checkpoint. Scales are powers of 2: dividing by one loses nothing.
    """

    value: float = FIRST_SCALE
    good: int = 0
    """Steps without overflow since the scale last changed."""

    def update(self, finite: bool) -> bool:
        """Whether to take this step, whose gradients are ``finite`` or not; the scale is then the next step's."""
        if not finite:
            self.value = max(self.value / 2, LEAST_SCALE)
            self.good = 0
            return False
        self.good += 1
        if self.good == GROWTH_STEPS:
            self.value *= 2
            self.good = 0
        return True

    @property
    def least(self) -> bool:
        """Whether the scale cannot fall any more: gradients that overflow now do so by themselves."""
        return self.value <= LEAST_SCALE


def fp8_reason(device: torch.device) -> str | None:
    """Why ``device`` cannot run precision=fp8, or None."""
    if device.type != "cuda":
        missing = f"a {device.type} has no fp8 matrix units"
    elif torch.version.hip is not None:
        missing = f"{torch.cuda.get_device_name(device)} is not an NVIDIA GPU, whose fp8 format (e4m3fn) is used"
    elif torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        have, need = (".".join(map(str, one)) for one in (torch.cuda.get_device_capability(device), FP8_CAPABILITY))
        missing = f"{torch.cuda.get_device_name(device)} has compute capability {have}, fp8 needs {need}"
    else:
        return None
    return f"precision=fp8: {missing}; what works: precision=bf16, or precision=fp32"


def fp8_fits(inputs: int, outputs: int) -> bool:
    """Whether the fp8 kernels take a weight [outputs, inputs] (this rank's part); other layers compute in bf16."""
    return inputs % FP8_MULTIPLE == 0 and outputs % FP8_MULTIPLE == 0
