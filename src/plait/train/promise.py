"""What the planner says of a run before its first step, kept in the run folder for `plait.telemetry.report`."""

from __future__ import annotations

import json
import sys

from plait.core.errors import PlanError
from plait.core.topology import Topology
from plait.planner.cost import predict
from plait.planner.counts import counts
from plait.planner.job import Job
from plait.planner.local import doubt, practice
from plait.planner.memory import memory
from plait.telemetry.report import PREDICTION
from plait.train.auto import device_of, machine
from plait.train.folder import write_whole
from plait.train.measure import axis_of
from plait.train.run import Setup

COUNTED_RANKS = 16
"""Worlds of up to this size have the bytes of every rank counted; of larger ones none are promised."""


def promise(setup: Setup, topology: Topology) -> dict[str, object]:
    """The keys of ``prediction.json``: seconds, shares, bytes of a step.

    PlanError for what the planner has no model of.
    """
    job = Job(
        model=setup.model,
        plan=setup.plan,
        topology=topology,
        seq=setup.config.data.seq,
        global_batch=setup.config.train.global_batch,
        practice=practice(topology),
    )
    said, held = predict(job), memory(job)
    # A rank that waits for its pipeline spends that in a communication call.
    waits = [sum(rank.exposed.values()) + rank.bubble for rank in said.ranks]
    peaks = {rank.pp: int(rank.peak) for rank in held.ranks}
    return {
        "plan": str(setup.plan),
        "cluster": topology.name,
        "source": doubt(topology) or topology.source,
        "step_time_s": said.step_time,
        "low": said.low,
        "high": said.high,
        "tokens_per_s_per_device": said.tokens_per_s_per_device,
        "bubble_rate": said.bubble_rate,
        "comm_fraction": sum(waits) / len(waits) / said.step_time,
        "mfu": said.mfu if topology.device.kind == "gpu" else None,
        "comm_bytes": _sent(job) if setup.world_size <= COUNTED_RANKS else None,
        "memory_bytes": [peaks[job.mesh.coordinate(rank)["pp"]] for rank in range(setup.world_size)],
    }


def write_promise(setup: Setup) -> None:
    """``prediction.json`` of a run; nothing where the planner knows neither the device nor such a plan."""
    folder = setup.config.run.dir
    assert folder is not None, "claim_folder names it"
    topology = machine(device_of(setup.config), setup.world_size)
    if topology is None:
        return
    try:
        found = promise(setup, topology)
    except PlanError:
        return
    try:
        write_whole(folder / PREDICTION, json.dumps(found, indent=1) + "\n")
    except OSError as error:  # no reason to end a run
        print(f"plait: warning: {folder / PREDICTION} cannot be written: {error.strerror}", file=sys.stderr)


def _sent(job: Job) -> dict[str, int]:
    """Bytes that all ranks send in a step, by the axes of ``metrics.jsonl``."""
    total: dict[str, int] = {}
    for rank in range(job.world_size):
        for group, sent in counts(job, rank).bytes_by_axis().items():
            axis = axis_of(group)
            total[axis] = total.get(axis, 0) + sent
    return total
