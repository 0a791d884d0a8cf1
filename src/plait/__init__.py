"""plait plans, runs, proves and explains the model-parallel training of transformers.

These names are the library; each is imported when it is first asked for, so that ``import plait`` loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.comm.world import World
    from plait.core.config import Config, load
    from plait.core.errors import ConfigError, PlaitError, PlanError, RankError, ScheduleError, WeightsError
    from plait.core.mesh import Mesh
    from plait.core.plan import Plan
    from plait.models.batch import Batch
    from plait.models.config import PRESETS, ModelConfig
    from plait.models.decoder import Decoder
    from plait.models.init import InitSource
    from plait.parallel.apply import Parallel, parallelize
    from plait.train.launch import Worker, launch

_HOMES = {
    "Batch": "plait.models.batch",
    "Config": "plait.core.config",
    "ConfigError": "plait.core.errors",
    "Decoder": "plait.models.decoder",
    "InitSource": "plait.models.init",
    "Mesh": "plait.core.mesh",
    "ModelConfig": "plait.models.config",
    "PRESETS": "plait.models.config",
    "Parallel": "plait.parallel.apply",
    "PlaitError": "plait.core.errors",
    "Plan": "plait.core.plan",
    "PlanError": "plait.core.errors",
    "RankError": "plait.core.errors",
    "ScheduleError": "plait.core.errors",
    "WeightsError": "plait.core.errors",
    "Worker": "plait.train.launch",
    "World": "plait.comm.world",
    "launch": "plait.train.launch",
    "load": "plait.core.config",
    "parallelize": "plait.parallel.apply",
}

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Config",
    "ConfigError",
    "Decoder",
    "InitSource",
    "Mesh",
    "ModelConfig",
    "PRESETS",
    "Parallel",
    "PlaitError",
    "Plan",
    "PlanError",
    "RankError",
    "ScheduleError",
    "WeightsError",
    "Worker",
    "World",
    "launch",
    "load",
    "parallelize",
]


def __getattr__(name: str) -> object:
    """The object behind a name of ``__all__`` (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'plait' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
