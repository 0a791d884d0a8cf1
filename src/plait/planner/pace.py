"""The host's pace: a stage does not run faster than its operators are launched."""

from __future__ import annotations

from dataclasses import dataclass

from plait.planner.job import Practice
from plait.planner.kernels import Machine
from plait.planner.stages import Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class Paced:
    """A stage's F, B, W in seconds with exposed communication, the host's pace in them."""

    forward: float
    backward: float
    weight: float


def pace_of(machine: Machine, stage: Stage, practice: Practice, microbatches: int) -> Paced:
    """No phase ends before the host has launched it; ahead in backward, it makes up in the next forward."""
    f, b, w = stage.forward.total, stage.backward.total, stage.weight.total
    table, family = machine.table, machine.family
    launch = 0.0 if practice.graph else launch_of(machine, practice)
    if launch == 0:
        return Paced(forward=f, backward=b, weight=w)
    # Messages wait for other ranks, so that the host does not get ahead under them.
    host_f = stage.forward.launches * launch + stage.forward.waits
    host_b = (stage.backward.launches + stage.weight.launches) * launch + stage.backward.waits + stage.weight.waits
    # Some operators wait for the host and some for the device: a smooth maximum.
    power = table.of("pace_join", family)
    alone = smooth(f, host_f, power) + smooth(b + w, host_b, power)
    many = smooth(f + b + w, host_f + host_b, power)
    mean = (alone + (microbatches - 1) * many) / microbatches
    factor = mean / (f + b + w) if f + b + w else 1.0
    return Paced(forward=f * factor, backward=b * factor, weight=w * factor)


def launch_of(machine: Machine, practice: Practice) -> float:
    """Seconds that the host takes for a launch."""
    launch = machine.launch * machine.table.of("pace", practice.framework)
    return launch * machine.table.of("fused_launch", machine.family) if practice.fused else launch


def smooth(device: float, host: float, power: float) -> float:
    """The longer of two times, and more where they are near."""
    low, high = sorted((device, host))
    return high * (1 + (low / high) ** power) ** (1 / power) if high else 0.0
