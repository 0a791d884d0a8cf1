"""Which layers of a plan are recomputed, layer by layer, read once."""

from __future__ import annotations

from functools import lru_cache

from plait.core.plan import recompute_ranges


@lru_cache(maxsize=1 << 10)
def modes_of(text: str, layers: int) -> tuple[str, ...]:
    """The mode of every layer under ``recompute=text``, as `Plan.recompute_of` says one by one."""
    modes = ["none"] * layers
    for mode, first, last in reversed(recompute_ranges(text)):  # the first range that names a layer has it
        stop = layers if last is None else min(layers, last + 1)
        modes[first:stop] = [mode] * max(0, stop - first)
    return tuple(modes)
