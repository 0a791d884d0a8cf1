"""Claims on schedules: the bubble that was measured, simulated for the measured costs, and given by the formula."""

from __future__ import annotations

import statistics

from claims_ranks import Claim, train

WARM = 3
SCHEDULES = (
    ("gpipe", 1, 4),
    ("1f1b", 1, 4),
    ("1f1b", 1, 8),
    ("interleaved", 2, 4),
    ("zb-h1", 1, 4),
    ("zb-h1", 1, 8),
    ("zb-v", 2, 4),
    ("zb-v", 2, 8),
)
"""(schedule, virtual stages a rank, microbatches), on two ranks."""


def formula(schedule: str, virtual: int, microbatches: int, ranks: int = 2) -> float:
    """Bubble as a share of the step, for equal stages and F = B = W without transfers.

    1F1B and GPipe (p-1)/(m+p-1), interleaved (p-1)/(vm+p-1) (arXiv:2104.04473); ZB-H1 idles for (p-1)(F+B-W)
    (arXiv:2401.10241, table 2), a third of 1F1B's; ZB-V for nothing with enough microbatches (arXiv:2405.15362).
    """
    if schedule == "zb-v":
        return 0.0
    work = 3 * microbatches if schedule == "zb-h1" else virtual * microbatches
    return (ranks - 1) / (work + ranks - 1)


def measure(schedule: str, virtual: int, microbatches: int, steps: int) -> dict[str, float]:
    """Medians over the steps of one run; the simulator has the stage costs of the same step."""
    rows = train(
        {
            "plan.tp": 1,
            "plan.pp": 2,
            "plan.schedule": schedule,
            "plan.virtual": virtual,
            "plan.micro": 2,
            "train.global_batch": 2 * microbatches,
            "train.steps": steps + WARM,
            "model.hidden_size": 256,
            "model.num_layers": 8,
            "model.ffn_size": 704,
            "model.head_dim": 64,
            "data.seq": 256,
        }
    )[WARM:]
    simulated = [row["bubble_rate_predicted"] for row in rows if row["bubble_rate_predicted"] is not None]
    return {
        "measured": statistics.median(row["bubble_rate"] for row in rows),
        "simulated": statistics.median(simulated),
        "seconds": statistics.median(row["step_time_s"] for row in rows),
    }


def bubbles(quick: bool) -> list[Claim]:
    """A line a schedule."""
    claims = []
    for schedule, virtual, microbatches in SCHEDULES[1:2] if quick else SCHEDULES:
        row = measure(schedule, virtual, microbatches, 2 if quick else 15)
        want = formula(schedule, virtual, microbatches)
        apart = row["measured"] - want
        near = abs(row["measured"] - row["simulated"]) <= 0.03
        why = "as its costs say: F, B and W are not equal" if near else "and its costs do not say why"
        verdict = f"{'above' if apart > 0 else 'below'} by {abs(apart):.3f}, {why}"
        claims.append(
            Claim(
                claim=f"bubble, {schedule}, p=2 m={microbatches}",
                published=f"{want:.3f}",
                measured=f"{row['measured']:.3f} (simulated for its costs {row['simulated']:.3f})",
                verdict="as published" if abs(apart) <= 0.03 else verdict,
            )
        )
    return claims
