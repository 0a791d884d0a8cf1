"""What every step is measured by: each rank's spans and counters, brought together in one collective a step."""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections.abc import Sequence
from time import perf_counter
from typing import final

import torch
from torch import Tensor

from plait.core.events import COMM, COMPUTE, Bubble, Event, bubble
from plait.models.config import flops_per_token
from plait.models.moe import moe_metrics
from plait.parallel.apply import Parallel
from plait.planner.calibrate import known_device
from plait.schedule.simulate import Cost, simulate
from plait.telemetry.record import MOE_KEY, SCALE_KEY, Recorder
from plait.train.exchange import gather_json
from plait.train.run import Setup
from plait.train.step import Taken

SHARE = 0.005
"""Of a run's time that simulating its schedule may take: large schedules are then not simulated for every step."""
AXES = ("pp", "dp", "cp", "tp", "ep", "world")
"""Keys of ``comm_bytes``; ``world``: what all ranks share, such as the loss; gathering these numbers is not in it."""
_HOME = {"pp+dp+cp+tp": "world", "dp+cp": "dp", "edp": "dp", "etp": "ep", "tie": "pp"}
"""Group -> the axis that its bytes are booked on; ``tp/2`` or ``dp+cp across 2``, part of it, goes with the whole."""


def axis_of(group: str) -> str:
    """The key of ``comm_bytes`` under which what a group sends is booked."""
    whole = group.partition("/")[0].partition(" ")[0]
    return _HOME.get(whole, whole)


def resident_bytes() -> int:
    """Most memory that this process has held so far."""
    # ru_maxrss is in bytes on macOS, in KiB elsewhere (getrusage(2)).
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def process_bytes(device: torch.device) -> int:
    """What a rank's process takes before it holds a model: on a CPU measured peaks have it on top. 0 on a GPU."""
    if device.type != "cpu":
        return 0
    # What a first step brings, whatever the model: torch's compiler, imported by its optimizers, and oneDNN and MKL.
    weight = torch.nn.Parameter(torch.ones(8, 8))
    optimizer = torch.optim.AdamW([weight], fused=True)
    (weight @ weight).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return resident_bytes()


def device_facts(setup: Setup, device: torch.device) -> dict[str, object]:
    """What ``device.json`` says: the device, and the peak that ``mfu`` is measured against (null: unknown)."""
    if device.type == "cpu":
        facts: dict[str, object] = {"device": "cpu", "threads_per_rank": torch.get_num_threads()}
        return facts | {"cores": os.cpu_count(), "peak_flops": None, "peak_source": "no published peak for this CPU"}
    name, precision = torch.cuda.get_device_name(device), setup.plan.precision
    known = known_device(name, torch.cuda.get_device_properties(device).total_memory)
    peak = None if known is None else known.peaks.get(precision)
    source = known.source if known is not None and peak else "no peak in plait's table for this device and precision"
    return {"device": name, "precision": precision, "peak_flops": peak, "peak_source": source}


@final
class Meter:
    """Turns a step's spans, times and bytes of all ranks into a row of ``metrics.jsonl``."""

    def __init__(self, setup: Setup, parallel: Parallel, recorder: Recorder, peak_flops: float | None) -> None:
        self._setup = setup
        self._parallel = parallel
        self._recorder = recorder
        self._world = parallel.world
        self._peak = peak_flops
        self._begin = 0.0
        self._flops = flops_per_token(setup.model, setup.config.data.seq)
        self._origin = self._common_origin()
        self._elapsed = self._spent = 0.0
        self._last: float | None = None
        self.asked = 0
        """The largest of what the ranks gave to `finish`."""
        self.computes: list[float] = []
        """Seconds that each rank computed in the step."""
        self.parts: list[list[float]] = []
        """Each rank's own seconds in the step, by `plait.train.supervise.PARTS`."""

    def start(self) -> None:
        """A step begins."""
        self._recorder.clear()
        self._world.book.ledger.clear()
        self._begin = perf_counter()

    def finish(self, step: int, taken: Taken, *, asked: int = 0) -> dict[str, object]:
        """The step has ended on this rank: its row, complete on rank 0. Collective over all ranks.

        ``asked``: a number that all ranks are to know the largest of, a signal's.
        """
        seconds = perf_counter() - self._begin
        everyone = self._world.group("pp", "dp", "cp", "tp")
        rows = everyone.all_gather(self._numbers(seconds, asked)).wait().cpu().view(everyone.size, -1)
        scalars, sent, stages = rows[:, :9], rows[:, 9 : 9 + len(AXES)], rows[:, 9 + len(AXES) :]
        compute, first, last, waited, took, memory, signals, update, data = scalars.unbind(1)
        self.asked, self.computes = int(signals.max()), compute.tolist()
        forward, backward, weight = stages.view(len(rows), -1, 3, 2)[..., 0].sum(1).unbind(1)
        self.parts = torch.stack([forward, backward + weight, update, data], dim=1).tolist()
        step_time = float(took.max())
        tokens = self._setup.config.train.global_batch * self._setup.config.data.seq
        measured = Bubble(compute=float(compute.sum()), ranks=len(rows), makespan=float(last.max() - first.min()))
        # On a GPU the host's waits are those of launches; compute spans come from marks on the stream.
        timed = self._world.device.type == "cpu"
        rate, size = tokens / step_time, self._world.mesh.world_size
        mesh = self._world.mesh
        used = {*(axis for axis, count in mesh.sizes.items() if count > 1), "world"}
        if self._setup.model.moe is not None and mesh.ep * mesh.etp > 1:
            used.add("ep")
        extra: dict[str, object] = {}
        if taken.loss_scale is not None:
            extra[SCALE_KEY] = taken.loss_scale
        if taken.routers and self._setup.model.moe is not None:
            config = self._setup.model.moe
            seen = taken.routers.items()
            extra[MOE_KEY] = [{"layer": layer, **moe_metrics(stats, config)} for layer, stats in seen]
        return extra | {
            "step": step,
            "loss": taken.loss,
            "grad_norm": taken.norm,
            "lr": taken.lr,
            "tokens": tokens,
            "step_time_s": step_time,
            "tokens_per_s": rate,
            "tokens_per_s_per_device": rate / size,
            "bubble_rate": measured.rate,
            "bubble_rate_predicted": self._prediction(stages.sum(0), step_time),
            "comm_fraction": float((waited / took).mean()) if timed else None,
            "comm_bytes": {axis: int(count) for axis, count in zip(AXES, sent.sum(0), strict=True) if axis in used},
            "memory_peak_bytes": [int(size) for size in memory],
            "mfu": None if self._peak is None else rate * self._flops / (size * self._peak),
        }

    def events(self) -> list[Event]:
        """The last step's spans of all ranks, on one clock. Collective over all ranks."""
        mine = [
            (event.stream, event.kind, event.name, event.start - self._origin, event.end - self._origin, event.bytes)
            for event in self._recorder.events()
        ]
        return [
            Event(rank=rank, stream=str(stream), kind=str(kind), name=str(name), start=start, end=end, bytes=size)
            for rank, spans in enumerate(gather_json(self._world, mine))
            for stream, kind, name, start, end, size in spans  # type: ignore[attr-defined]
        ]

    def _common_origin(self) -> float:
        """What to subtract from this rank's clock: nothing on one host, which has one; else all start at a barrier."""
        hosts = gather_json(self._world, socket.gethostname())
        self._world.group("pp", "dp", "cp", "tp").barrier()
        return perf_counter() if len(set(map(str, hosts))) > 1 else 0.0

    def _numbers(self, seconds: float, asked: int) -> Tensor:
        """float64: compute, first start, last end, waiting, step seconds, memory, ``asked``, optimizer, data; bytes by
        `AXES`; stages' F B W."""
        spans = self._recorder.events()
        compute = [span for span in spans if span.stream == COMPUTE]
        first = min((span.start for span in compute), default=float("inf")) - self._origin
        last = max((span.end for span in compute), default=float("-inf")) - self._origin
        waited = sum(span.end - span.start for span in spans if span.stream == COMM)
        computed = sum(span.end - span.start for span in compute)
        update, data = (_own_seconds(spans, stream) for stream in ("update", "data"))
        numbers = [computed, first, last, waited, seconds, self._memory(), asked, update, data]
        sent = dict.fromkeys(AXES, 0)
        for group, count in self._world.book.ledger.by_axis().items():
            sent[axis_of(group)] += count
        stages = torch.zeros(self._setup.plan.stage_count, 3, 2, dtype=torch.float64)
        for span in compute:
            stage, kind = int(span.name.partition(span.kind)[0]), "FBW".index(span.kind)
            stages[stage, kind] += torch.tensor([span.end - span.start, 1.0])
        everything = torch.cat([torch.tensor([*numbers, *sent.values()], dtype=torch.float64), stages.flatten()])
        return everything.to(self._world.device)

    def _memory(self) -> int:
        """Peak bytes of this rank so far: of the GPU's allocator, or of the process."""
        if self._world.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._world.device)
        return resident_bytes()

    def _prediction(self, sums: Tensor, step_time: float) -> float | None:
        """`_predicted` on the rank that keeps the file; anew when this takes no more than `SHARE` of the run."""
        self._elapsed += step_time
        if self._world.rank == 0 and self._spent <= SHARE * self._elapsed:
            begin = perf_counter()
            self._last = self._predicted(sums)
            self._spent += perf_counter() - begin
        return self._last

    def _predicted(self, sums: Tensor) -> float | None:
        """Bubble of the same schedule on paper, with the mean cost of each stage's actions in this step."""
        if self._setup.plan.schedule == "2bw":
            return None  # its steps overlap: no list of one step to simulate
        per_stage = sums.view(-1, 3, 2)
        means = (per_stage[..., 0] / per_stage[..., 1].clamp_min(1)).tolist()
        costs = [Cost(forward=f, backward=b, weight=w) for f, b, w in means]
        schedule = self._parallel.schedule(self._setup.microbatches).compute_only()
        return bubble(simulate(schedule, costs), len(schedule.ranks)).rate


def _own_seconds(spans: Sequence[Event], stream: str) -> float:
    """Seconds of ``stream`` without the waits for other ranks inside them."""
    mine = [(span.start, span.end) for span in spans if span.stream == stream]
    waits = [(span.start, span.end) for span in spans if span.stream == COMM]
    inside = (end - start for start, end in waits if any(begin <= start and end <= stop for begin, stop in mine))
    return sum(end - start for start, end in mine) - sum(inside)
