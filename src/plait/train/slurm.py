"""Slurm's variables: which task of which step this process is, and where its rank 0 can be met."""

from __future__ import annotations

import re
from collections.abc import Mapping

from plait.core.errors import ConfigError

_FIRST_SPECIAL = 0xFFFFFFF0
"""Step numbers from here on are no step of srun: the batch script, an interactive shell."""


def tasks(env: Mapping[str, str]) -> int:
    """Tasks of the srun step that this process is one of; 1 outside of a step.

    A batch script has SLURM_PROCID and the *job's* SLURM_NTASKS too, but it is one process: it is no task of a step.
    """
    step = env.get("SLURM_STEP_ID") or ""
    if "SLURM_PROCID" not in env or not step.isdecimal() or int(step) >= _FIRST_SPECIAL:
        return 1
    return int(env.get("SLURM_STEP_NUM_TASKS") or 1)


def tasks_here(env: Mapping[str, str]) -> int:
    """Tasks of the step on this node: SLURM_STEP_TASKS_PER_NODE is ``2(x3),1`` for nodes of 2, 2, 2 and 1."""
    counts: list[int] = []
    for part in (env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_NTASKS_PER_NODE") or "").split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise ConfigError("srun gave no readable SLURM_STEP_TASKS_PER_NODE: give it --ntasks-per-node")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts[int(env.get("SLURM_NODEID") or 0) if len(counts) > 1 else 0]


def own_gpu(env: Mapping[str, str], here: int) -> bool:
    """Whether a GPU that is the only one a task sees is its own: not so where the node's ``here`` tasks share one."""
    return "SLURM_GPUS_PER_TASK" in env or int(env.get("SLURM_GPUS_ON_NODE") or 0) >= here


def address(env: Mapping[str, str]) -> tuple[str, int]:
    """Rank 0's (host, port)."""
    host = env.get("MASTER_ADDR") or first_host(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST") or "")
    return host, int(env.get("MASTER_PORT") or port(int(env.get("SLURM_JOB_ID") or 0), int(env["SLURM_STEP_ID"])))


def first_host(nodelist: str) -> str:
    """``rack[2-3]n[04-08,11],login1`` -> ``rack2n04``; ConfigError for an empty list."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    if first is None:
        raise ConfigError("srun gave no SLURM_NODELIST: set MASTER_ADDR to the host of rank 0")
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])


def port(job: int, step: int) -> int:
    """A port that all ranks of a job's step agree on, below the range from which Linux hands out ports of its own."""
    return 15000 + (job + 97 * step) % 15000
