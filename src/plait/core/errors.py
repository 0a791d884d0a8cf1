"""Every error that a user can cause or meet, each with the exit code of the command that ends with it."""

from __future__ import annotations


class PlaitError(Exception):
    """Base of plait's errors. ``exit_code`` is what ``plait`` returns to the shell."""

    exit_code = 1


class ConfigError(PlaitError, ValueError):
    """Bad input: a run file, a key, a path, a data file."""

    exit_code = 2


class PlanError(PlaitError, ValueError):
    """A plan that cannot work: names the axis, its value, the reason, and the nearest values that would work."""

    exit_code = 3


class ScheduleError(PlanError):
    """A pipeline schedule that is incomplete, out of order, or deadlocks; the message holds the rank grid."""


class RankError(PlaitError, RuntimeError):
    """A rank failed, or waited too long; names the rank and the logical cause."""

    exit_code = 4


class DivergedError(RankError):
    """Loss or gradients are no finite numbers, and ``run.nan`` leaves nothing to try: the same would come again."""

    exit_code = 7


class SaveError(PlaitError, RuntimeError):
    """The last state of a run could not be saved; what was committed before is whole, and `--resume` goes on there."""

    exit_code = 8


class WeightsError(PlaitError, ValueError):
    """Stored weights or checkpoints that are missing, damaged, or do not fit the model."""

    exit_code = 5
