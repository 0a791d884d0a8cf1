"""Every fitted or measured number of the memory model, with what it was fitted on. All else there is counted."""

from __future__ import annotations

from typing import Final

from plait.planner.constants import Constant

RESERVED: Final = Constant(
    value=0.08,
    unit="of what comes and goes in a step",
    meaning="memory that the caching allocator holds in pieces of the wrong size",
    source="published/formulas.json, fragmentation: 8 to 10%",
)
CONTEXT: Final = Constant(
    value=3.25 * 1024**3,
    unit="bytes",
    meaning="what a device holds beyond the tensors: context, libraries, NCCL's buffers, pieces of the allocator",
    source="sailor_gh200 and internevo, the two sources that read the whole device's memory",
)
