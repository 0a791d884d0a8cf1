"""``plan = "auto"``: the planner's choice for the machine that a run is on."""

from __future__ import annotations

import dataclasses

from plait.core.config import Config
from plait.core.errors import ConfigError, PlanError
from plait.core.fields import counted
from plait.core.topology import Topology
from plait.planner.calibrate import known_device
from plait.planner.clusters import cluster, local_path, presets
from plait.planner.host import cores
from plait.planner.local import practice
from plait.planner.search import search
from plait.train.run import model_config


def planned(config: Config, *, ranks: int | None = None, alone: bool = True) -> Config:
    """``config`` with a plan, where it leaves that to plait; else itself.

    ``ranks``: None is run.processes, or else one for every GPU, or core, of this machine. ``alone``: False where other
    processes choose a plan at the same time, which has to be the same: then nothing is estimated. PlanError where no
    plan fits into memory, ConfigError where the machine is not known.
    """
    if config.auto is None:
        return config
    device = device_of(config)
    size = ranks or config.run.processes or (_gpus() if device == "cuda" else cores())
    topology = machine(device, size)
    if topology is None or not (alone or local_path().is_file() or device == "cuda"):
        raise ConfigError(
            'plan = "auto": nothing is known of this machine that all ranks agree on; what works: plait calibrate '
            "first, or a plan"
        )
    fix = {name: getattr(config.plan, name) for name in config.auto}
    found = search(
        model_config(config),
        topology,
        world_size=size,
        seq=config.data.seq,
        global_batch=config.train.global_batch,
        precision=str(fix.get("precision", "fp32" if device == "cpu" else "bf16")),
        fix=fix,
        top=1,
        practice=practice(topology),
        losers=False,
    )
    if found.best is None:
        near = (
            ""
            if found.nearest is None
            else (
                f"; nearest is {str(found.nearest.plan)!r}, whose fullest rank needs "
                f"{found.nearest.memory.fullest.peak / 2**30:.1f} GiB of {topology.device.memory / 2**30:.1f}"
            )
        )
        raise PlanError(f'plan = "auto": no plan for {counted(size, "rank")} fits into their memory{near}')
    return dataclasses.replace(config, plan=found.best.plan, auto=None)


def machine(device: str, devices: int) -> Topology | None:
    """``devices`` of this machine: as calibrated, or estimated (``cpu``), or a GPU that is known by name; else None."""
    if device == "cpu" or local_path().is_file():
        return cluster("local", devices)
    import torch

    found = known_device(torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory)
    known = [preset for preset, each in presets().items() if each == found]
    return cluster(known[0], devices) if known else None


def device_of(config: Config) -> str:
    """Where its ranks will compute: ``cpu`` or ``cuda``."""
    if config.run.device != "auto":
        return config.run.device
    return "cuda" if _gpus() else "cpu"


def _gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
