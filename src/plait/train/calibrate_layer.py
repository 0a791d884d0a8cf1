"""What a CPU's memory-bound operators cost inside a step, where they come between products and find cold caches.

Alone in a loop, a norm or an activation runs at the speed of a cache. In a step it allocates what it makes and finds
its input evicted; Python and autograd take their time between operators. So a small model takes real steps, and what
they take beyond their products and attention is the time of the bytes that the planner counts for the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from plait.comm.world import World
from plait.core.plan import Plan
from plait.core.topology import Device, Measured, Tier, Topology
from plait.models.batch import Batch
from plait.models.config import PRESETS
from plait.models.decoder import Decoder
from plait.models.init import InitSource
from plait.parallel.apply import parallelize
from plait.planner.job import Job
from plait.planner.kernels import Machine, seconds
from plait.planner.layers import embedding, head, layer
from plait.planner.stages import slice_of
from plait.train.calibrate_kernels import Bench

MODEL = replace(PRESETS["bench"], num_layers=2, vocab_size=2048)
PLAN = Plan(micro=2, dp=1)
SEQ, BATCH = 256, 4
SLOWEST = 10.0
"""How many times slower than alone in a loop memory-bound operators may turn out: more is another program's doing."""


def seconds_of_steps(bench: Bench) -> float:
    """Of a forward and backward on each rank alone, all at the same time."""
    return bench.seconds(step(World.alone(), PLAN))


def bandwidth_in_steps(took: float, device: Device, measured: Measured) -> float:
    """Bytes/s of memory-bound operators in a step, as `plait.planner.ops` counts their bytes.

    ``took``: seconds of one step. ``measured``: products, attention, and the bandwidth of these operators alone, which
    is the most it can be.
    """
    assert measured.bandwidth is not None
    counted, rest = _counted(device, measured)
    slowest, fastest = counted * SLOWEST / measured.bandwidth, counted / measured.bandwidth
    return counted / min(max(took - rest, fastest), slowest)


def _counted(device: Device, measured: Measured) -> tuple[float, float]:
    """Bytes of a step's memory-bound operators, and seconds of all others."""
    tier = Tier(name="host", size=1, bandwidth=device.bandwidth, latency=1e-6)
    topology = Topology(name="one rank", device=device, devices=1, tiers=(tier,), measured=measured)
    job = Job(model=MODEL, plan=PLAN, topology=topology, seq=SEQ, global_batch=BATCH)
    machine, cut = Machine(topology), slice_of(job)
    parts = [(layer(cut, False, None), MODEL.num_layers), (embedding(cut), 1), (head(cut), 1)]
    counted = rest = 0.0
    for work, times in parts:
        for op in (*work.forward.ops, *work.backward.ops, *work.weight.ops):
            if op.kind == "memory":
                counted += times * op.bytes
            else:
                rest += times * seconds(machine, op)
    return counted * job.microbatches, rest * job.microbatches


def step(world: World, plan: Plan) -> Callable[[], object]:
    """Forward and backward of `BATCH` samples over the ranks of ``world``, each holding all samples."""
    with torch.device("meta"):
        model = Decoder(MODEL)
    parallel = parallelize(model, plan, world, weights=InitSource(MODEL, 0))
    tokens_BT = torch.randint(MODEL.vocab_size, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(0))
    batches = [
        Batch(
            tokens_BT=tokens_BT[at : at + plan.micro, :-1],
            targets_BT=tokens_BT[at : at + plan.micro, 1:],
            sample_B=torch.arange(at, at + plan.micro),
            step=0,
        )
        for at in range(0, BATCH, plan.micro)
    ]
    return partial(parallel.forward_backward, batches, BATCH * SEQ)
