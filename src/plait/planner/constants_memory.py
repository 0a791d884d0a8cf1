"""Every fitted or measured number of the memory model, with what it was fitted on. All else there is counted."""

from __future__ import annotations

from typing import Final

from plait.planner.constants import Constant

RESERVED: Final = Constant(
    value=1.5,
    unit="of what the steps of a layer work with, one after the other",
    meaning="memory that the caching allocator keeps of it: each size waits for its next use",
    source="zero_bubble and nanotron_ultrascale; torchtitan held out",
)
CONTEXT: Final = Constant(
    value=3.25 * 1024**3,
    unit="bytes",
    meaning="what a device holds beyond the tensors: context, libraries, NCCL's buffers, pieces of the allocator",
    source="sailor_gh200 and internevo, the two sources that read the whole device's memory",
)
