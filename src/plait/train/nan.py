"""`NaNPolicy`: what becomes of a run when loss or gradient norm is no finite number (``run.nan``).

All ranks see the same loss and norm, which are sums over all of them: they judge alike without asking each other.
"""

from __future__ import annotations

import math
from typing import final

from plait.core.config import Config
from plait.core.errors import DivergedError
from plait.parallel.precision import LEAST_SCALE, LossScale
from plait.train.resume import Keeper
from plait.train.step import Steps, Taken


def hopeless(taken: Taken, scale: LossScale | None) -> bool:
    """Whether loss or norm are not finite, and no loss scale can be to blame."""
    if math.isfinite(taken.loss) and math.isfinite(taken.norm):
        return False
    return scale is None or not math.isfinite(taken.loss) or (taken.skipped and taken.loss_scale == LEAST_SCALE)


@final
class NaNPolicy:
    """Counts what it has let pass: ``run.max_skips`` skipped steps in a row, or as many rollbacks."""

    def __init__(self, config: Config, keeper: Keeper, steps: Steps) -> None:
        self._run = config.run
        self._keeper = keeper
        self._steps = steps
        self._skips = self._rollbacks = 0

    def passed(self, step: int) -> int:
        """The step to take after ``step``, whose numbers are finite."""
        self._skips = 0
        return step + 1

    def after(self, step: int, taken: Taken) -> int:
        """The step to take after the hopeless ``step``, whose update was left out; collective. DivergedError: none."""
        loss, norm = str(taken.loss), str(taken.norm)
        if self._run.nan == "skip" and self._skips < self._run.max_skips:
            self._skips += 1
            self._keeper.note("skip", {"step": step, "loss": loss, "grad_norm": norm, "in_a_row": self._skips})
            return step + 1
        if self._run.nan == "rollback" and self._rollbacks < self._run.max_skips:
            self._rollbacks += 1
            behind = step + self._steps.shift + 1
            back = self._keeper.back()
            if back is not None:
                # The samples from the checkpoint to here are left out: what follows is what would have.
                self._steps.shift = behind - back
                self._keeper.note("rollback", {"step": step, "loss": loss, "grad_norm": norm, "to": back})
                return back
            raise diverged(step, taken, ", there is no checkpoint to go back to")
        tried = {
            "stop": "",
            "skip": f", {self._skips} steps in a row were skipped before",
            "rollback": f", after {self._rollbacks} rollbacks",
        }
        raise diverged(step, taken, tried[self._run.nan])


def diverged(step: int, taken: Taken, tried: str) -> DivergedError:
    """What every rank raises then: all see the same numbers, so all stop."""
    return DivergedError(
        f"step {step}: the loss is {taken.loss}, the gradient norm {taken.norm}{tried}: training has diverged. "
        "What helps: a lower optimizer.lr, a longer optimizer.warmup, optimizer.clip=1, plan.precision=fp32"
    )
