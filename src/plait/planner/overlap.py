"""What runs under what: communication that compute hides, and how long a pipeline of uneven stages takes.

Communication beside compute slows it: both share processors and memory (``contention``, seconds a second). A pipeline
is taken by closed forms on the seconds of each stage; they agree with the simulator on equal stages, and on uneven ones
within what its tests say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from plait.planner.fast_simulate import makespan as simulated
from plait.schedule.simulate import Cost


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Seconds of communication: ``exposed`` ones, ``hidden`` ones, and what the hidden ones cost the compute."""

    exposed: float
    hidden: float
    slowing: float

    @property
    def added(self) -> float:
        """Seconds that the communication adds."""
        return self.exposed + self.slowing


def under(seconds: float, window: float, contention: float) -> Share:
    """``seconds`` of communication under ``window`` seconds of compute."""
    hidden = min(seconds, max(window, 0.0))
    return Share(exposed=seconds - hidden, hidden=hidden, slowing=contention * hidden)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """Seconds of one microbatch in each virtual stage (F, B, W), in order; ``transfer`` across a boundary."""

    name: str
    ranks: int
    microbatches: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    transfer: float = 0.0
    blocking: bool = False
    """A rank waits for its transfers instead of computing on."""

    @property
    def virtual(self) -> int:
        return len(self.forward) // self.ranks

    def rank_sums(self) -> list[float]:
        """Seconds that each rank computes for one microbatch."""
        return [
            sum(self.forward[s] + self.backward[s] + self.weight[s] for s in self.stages_of(rank))
            for rank in range(self.ranks)
        ]

    def stages_of(self, rank: int) -> Sequence[int]:
        """Virtual stages of a rank."""
        if self.name in ("zb-v", "dualpipe-v"):
            return (rank, 2 * self.ranks - 1 - rank)
        return range(rank, len(self.forward), self.ranks)


def makespan(pipe: Pipeline) -> float:
    """Seconds from the first forward to the last backward."""
    if pipe.ranks == 1:
        return pipe.microbatches * pipe.rank_sums()[0]
    if pipe.name == "2bw":
        return pipe.microbatches * max(pipe.rank_sums())  # windows without a flush
    if pipe.virtual == 1 and pipe.name in ("1f1b", "gpipe", "interleaved"):
        return _one_for_one(pipe)
    if pipe.name == "interleaved":
        return _interleaved(pipe)
    return _simulated(pipe)


def _one_for_one(pipe: Pipeline) -> float:
    """1F1B of uneven stages: the slowest rank's work, what it waits for at both ends, and the path to it.

    For equal stages and no transfer this is (m + p - 1)(F + B), Narayanan et al. 2021 section 2.2.1.
    """
    ranks, m = pipe.ranks, pipe.microbatches
    forward = pipe.forward
    back = [b + w for b, w in zip(pipe.backward, pipe.weight, strict=True)]
    sums = [f + b for f, b in zip(forward, back, strict=True)]
    hop = pipe.transfer
    if pipe.blocking:
        # A rank sends and receives twice a microbatch, while it does nothing else.
        sums = [one + 2 * hop for one in sums]
    # Neighbours wait for each other's messages in a ring of all stages: 2(p - 1) transfers in p turns.
    turn = sum(sums) / ranks + (0.0 if pipe.blocking else 2 * hop * (ranks - 1) / ranks)
    longest = 0.0
    before = 0.0
    after = sum(sums)
    for rank in range(ranks):
        after -= sums[rank]
        depth = min(m, ranks - rank) - 1
        chain = after + 2 * hop * (ranks - 1 - rank)
        start = max(0.0, chain - depth * forward[rank])
        slowest = max(sums[rank + 1 :], default=0.0)
        end = max(0.0, min(chain - depth * back[rank], depth * (slowest - back[rank])))
        if m <= ranks - rank:
            end = max(0.0, min(end, depth * (slowest - back[rank])))
        longest = max(longest, before + m * max(sums[rank], min(turn, sums[rank] + 2 * hop)) + start + end)
        before += sums[rank] + 2 * hop
    return longest


def _interleaved(pipe: Pipeline) -> float:
    """(p - 1) chunks of idle (Narayanan et al. 2021, section 2.2.2) beside the slowest rank's work."""
    stages = len(pipe.forward)
    chunk = (sum(pipe.forward) + sum(pipe.backward) + sum(pipe.weight)) / stages
    hop = 2 * pipe.transfer
    work = max(pipe.rank_sums()) + (pipe.virtual * hop if pipe.blocking else 0.0)
    steady = pipe.microbatches * work + (pipe.ranks - 1) * (chunk + hop)
    # Fewer microbatches than ranks wait for their turn in every round of the ranks.
    return max(steady, (stages + pipe.microbatches - 1) * (chunk + hop))


@lru_cache(maxsize=1 << 12)
def _simulated(pipe: Pipeline) -> float:
    """Schedules without a closed form here: simulated, and continued by their period."""
    costs = [
        Cost(forward=f, backward=b, weight=w) for f, b, w in zip(pipe.forward, pipe.backward, pipe.weight, strict=True)
    ]
    return simulated(
        pipe.name,
        costs,
        ranks=pipe.ranks,
        microbatches=pipe.microbatches,
        virtual=pipe.virtual,
        transfer=pipe.transfer,
    )
