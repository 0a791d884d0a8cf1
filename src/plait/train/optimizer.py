"""Learning-rate schedules: pure functions of the step, so that every rank and every restart computes the same."""

from __future__ import annotations

import math

from plait.core.errors import ConfigError

SCHEDULES = ("constant", "cosine", "wsd")


def learning_rate(
    step: int, *, schedule: str, lr: float, warmup: int, steps: int, min_lr_ratio: float, decay: float
) -> float:
    """Learning rate of ``step`` (from 0) in a run of ``steps``.

    The first ``warmup`` steps rise linearly from ``lr / warmup`` to ``lr``. Then, with ``low = lr * min_lr_ratio``:

    * ``constant``: ``lr``.
    * ``cosine``: half a cosine from ``lr`` to ``low`` (Loshchilov and Hutter, SGDR, arXiv:1608.03983, eq. 5, once).
    * ``wsd``: warm-up, stable, decay (Hu et al., MiniCPM, arXiv:2404.06395): ``lr``, and over the last
      ``decay`` share of the run down to ``low``, in a straight line (the paper leaves the form of the decay open).

    ``low`` is the rate *after* the last step, so that no step is spent at 0; steps past the end stay there.
    ConfigError for an unknown schedule.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(f"optimizer.schedule = {schedule!r} is unknown; it is one of {', '.join(SCHEDULES)}")
    if step < warmup:
        return lr * (step + 1) / warmup
    if schedule == "constant":
        return lr
    # The decay of WSD never reaches back into the warm-up.
    start = warmup if schedule == "cosine" else max(warmup, steps - round(decay * steps))
    if step < start:
        return lr
    done = min(1.0, (step - start) / (steps - start)) if steps > start else 1.0
    left = 0.5 * (1.0 + math.cos(math.pi * done)) if schedule == "cosine" else 1.0 - done
    return lr * (min_lr_ratio + (1.0 - min_lr_ratio) * left)
