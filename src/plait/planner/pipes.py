"""Many pipelines at once: how many layers of each kind pass before a rank and lie on it, as matrices.

With seconds of each kind of layer, one product bounds the time of every pipeline. Kinds: those of
layers, then the embedding, then the head. One row a pipeline rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plait.core.plan import Plan
from plait.models.config import ModelConfig
from plait.parallel.layout import stage_bounds, stage_layers
from plait.schedule.placement import placement_of

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Pipe:
    """One pipeline. ``stages`` None: cut by matrix products."""

    pp: int
    schedule: str
    virtual: int
    stages: tuple[int, ...] | None

    @property
    def split(self) -> bool:
        """Whether weight gradients are actions of their own."""
        return self.schedule.startswith("zb") or self.schedule.endswith("-v")


class Pipes:
    """``pipes`` of a model whose layers are of ``kinds``, numbers below ``count - 2``.

    ``closed``: the time model takes pipelines by its closed forms, not action by action.
    """

    def __init__(
        self, pipes: Sequence[Pipe], model: ModelConfig, kinds: Sequence[int], count: int, *, closed: bool
    ) -> None:
        self.pipes = pipes
        prefix = np.zeros((model.num_layers + 1, count))
        prefix[1:] = np.cumsum(np.eye(count)[list(kinds)], axis=0)
        work, ahead, behind, whole = [], [], [], []
        self._stages: dict[Pipe, Floats] = {}
        for pipe in pipes:
            cut = stage_layers(model, Plan(pp=pipe.pp, virtual=pipe.virtual, stages=pipe.stages))
            stages = np.array([prefix[stop] - prefix[first] for first, stop in stage_bounds(cut)])
            stages[0, -2] += 1
            stages[-1, -1] += 1
            self._stages[pipe] = stages
            along_v = pipe.schedule.endswith("-v")
            ranks = np.array(placement_of(pipe.schedule if along_v else "1f1b", pipe.pp, pipe.virtual))
            work.append(np.array([stages[ranks == rank].sum(axis=0) for rank in range(pipe.pp)]))
            whole.append(stages.sum(axis=0))
            fill = _fill(pipe, stages[: pipe.pp])
            ahead.append(fill)
            behind.append(np.zeros_like(fill) if pipe.split else fill)
        # Of each rank: its own stages, and what it waits for at both ends while it has no work, forwards and backwards.
        self._work, self._ahead, self._behind = (np.concatenate(one) for one in (work, ahead, behind))
        self._all = np.array(whole)
        self._ranks = np.array([pipe.pp for pipe in pipes])
        self.starts = np.cumsum([0, *self._ranks[:-1]])
        self._row = np.repeat(np.arange(len(pipes)), self._ranks)
        self._closed = closed
        self._virtual = np.array([pipe.virtual for pipe in pipes])
        self._looped = np.array([pipe.schedule == "interleaved" and pipe.virtual > 1 for pipe in pipes])
        names = np.array([pipe.schedule for pipe in pipes])
        split = np.array([pipe.split for pipe in pipes])
        self._whole = np.where(split, 0, 1)[:, None]
        ways = np.where(split, 1, 2)[self._row]
        turns = np.concatenate([np.arange(pipe.pp) for pipe in pipes])
        self._hops = ways * np.where((names == "interleaved")[self._row], self._ranks[self._row] - 1, turns)

    def seconds(self, counts: Floats, phases: Floats, hop: Floats, host: Floats, power: float) -> tuple[Floats, Floats]:
        """At least: of each pipeline [pipelines, modes], and of each rank for one microbatch [ranks, modes].

        ``counts`` microbatches, ``phases`` F, B, W [3, kinds, modes], ``hop`` a transfer between stages. ``host``:
        its seconds [kinds, modes]; its pace joins in (`plait.planner.pace`): the norm of degree ``power`` of sums is
        no more than the sum of the stages' norms.
        """
        forward, backward, weight = phases

        def paced(layers: Floats) -> Floats:
            device, launched = layers @ (forward + backward + weight), layers @ host
            high, low = np.maximum(device, launched), np.minimum(device, launched)
            return np.asarray(high * (1 + (low / np.maximum(high, 1e-30)) ** power) ** (1 / power))

        work = paced(self._work)
        rows = counts[self._row, None] * work
        rows += self._ahead @ forward + self._behind @ (backward + weight)
        rows += (self._hops * hop[self._row])[:, None]
        spans = np.maximum.reduceat(rows, self.starts, axis=0)
        # One microbatch's way through all stages and back; a split backward's weight gradients may wait.
        way = self._all @ (forward + backward) + self._whole * (self._all @ weight)
        spans = np.maximum(spans, way + (2 * (self._ranks - 1) * hop)[:, None])
        if self._closed:
            # What the time model says of loops, whose stages differ (`plait.planner.overlap`).
            stages = self._ranks * self._virtual
            chunk = paced(self._all) / stages[:, None] + (2 * hop)[:, None]
            steady = (
                counts[:, None] * np.maximum.reduceat(work, self.starts, axis=0) + (self._ranks - 1)[:, None] * chunk
            )
            looped = np.maximum(steady, (stages + counts - 1)[:, None] * chunk)
            spans = np.where(self._looped[:, None], np.maximum(spans, looped), spans)
        return spans, work

    def stages_of(self, pipe: Pipe) -> Floats:
        """Layers of each kind, embeddings and heads of every virtual stage [stages, kinds]."""
        return self._stages[pipe]

    def rows(self, index: int) -> slice:
        """The ranks of a pipeline."""
        start = int(self.starts[index])
        return slice(start, start + int(self._ranks[index]))


def _fill(pipe: Pipe, first: Floats) -> Floats:
    """What passes the ranks before each rank starts: [ranks, kinds]. ``first``: the first stage of each rank."""
    if pipe.schedule == "interleaved" and pipe.virtual > 1:
        # The time model knows stages of a loop by their mean, which may be less than any of the first ones.
        return np.zeros_like(first)
    return np.concatenate([np.zeros((1, first.shape[1])), np.cumsum(first, axis=0)[:-1]])
