"""Jobs that the tests of the time model share."""

from __future__ import annotations

import dataclasses

from plait.core.plan import Plan
from plait.models.config import PRESETS, ModelConfig
from plait.planner.clusters import cluster
from plait.planner.job import Job, Practice

LLAMA = PRESETS["llama3-8b"]
MIXTRAL = PRESETS["mixtral-8x7b"]


def job(
    plan: str = "",
    *,
    model: ModelConfig = LLAMA,
    on: str = "h100",
    devices: int = 8,
    seq: int = 4096,
    batch: int = 64,
    practice: Practice | None = None,
) -> Job:
    """A job of a plan's text on a preset's cluster; bf16 unless the plan says otherwise."""
    parsed = Plan.parse(plan)
    if "precision" not in plan:
        parsed = dataclasses.replace(parsed, precision="bf16")
    return Job(
        model=model,
        plan=parsed.resolve(devices),
        topology=cluster(on, devices),
        seq=seq,
        global_batch=batch,
        practice=practice or Practice(),
    )
