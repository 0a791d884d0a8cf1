"""A rank's flat training state, and what data ranks send to sum gradients and to share weights, in closed form.

The buckets are those of `plait.parallel.zero.Zero`: the same parameters, put together by the same function.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from plait.core.compression import Compression
from plait.core.shard import Copies, Piece, ShardSpec
from plait.models.config import parameter_shapes
from plait.parallel.grouping import bucket_groups, bucket_length, decays, is_data, runs
from plait.parallel.layout import build_schedule, placement, stage_layers, stage_parameters
from plait.parallel.rules import DATA_AXES, Form, rule_of, sizes_of, spec_of
from plait.planner.counts_gathers import gathers, units
from plait.planner.counts_tally import Tally
from plait.planner.job import Job

_EMBEDDING = "embed.tokens.weight"


@final
@dataclass(frozen=True, kw_only=True)
class Kept:
    """A parameter on the rank: what `plait.parallel.flat.Held` says of it, without torch."""

    name: str
    spec: ShardSpec
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    stage: int | None
    tied: bool
    dtype: str | None
    trained: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@final
@dataclass(frozen=True, kw_only=True)
class Fold:
    """The data ranks of one kind of tensors: `plait.parallel.fold.Fold`. Each group as (name in the ledger, ranks)."""

    shards: int
    index: int
    block: tuple[str, int]
    across: tuple[str, int] | None


@final
@dataclass(frozen=True, kw_only=True)
class Bin:
    """A bucket: `plait.parallel.flat.Bucket`."""

    key: int
    held: tuple[Kept, ...]
    fold: Fold
    width: int
    """Bytes of a weight."""
    gathered: bool
    """Whether its weights have memory only while they are needed (level 3)."""

    @property
    def length(self) -> int:
        return bucket_length(sum(one.numel for one in self.held), self.fold.shards)

    @property
    def size(self) -> int:
        """Elements of a shard."""
        return self.length // self.fold.shards

    @property
    def trained(self) -> bool:
        return self.held[0].trained

    def stretches(self) -> Iterator[tuple[tuple[Copies, ...], int]]:
        """(holders, elements) of all that this rank's shard has."""
        begin, offset = self.fold.index * self.size, 0
        for one in self.held:
            for copies, run in runs(one.pieces, one.shape):
                start, stop = max(offset + run.start, begin), min(offset + run.stop, begin + self.size)
                if start < stop:
                    yield copies, stop - start
            offset += one.numel


@final
class State:
    """The training state of ``rank`` under ``job``."""

    def __init__(self, job: Job, rank: int) -> None:
        self._job, self._plan, self._mesh = job, job.plan, job.mesh
        self._at = self._mesh.coordinate(rank)
        self._homes = placement(job.plan)
        folds = {expert: self._fold(expert) for expert in (False, True)}
        held = self._held()
        self.bins: list[Bin] = []
        for trained in (True, False):
            chosen = [one for one in held if one.trained == trained]
            groups = bucket_groups(chosen, int(self._plan.bucket_mb * 2**20), by_place=self._plan.zero == 3)
            for group in groups:
                self.bins.append(self._bin(len(self.bins), group, folds[group[0].spec.expert]))
        self.trained = [one for one in self.bins if one.trained]
        self.parameters = sum(one.numel for one in held)

    # --- what is held

    def _held(self) -> list[Kept]:
        """In the order in which the executor's cut meets them."""
        model, plan, homes = self._job.model, self._plan, self._homes
        names = stage_parameters(model, stage_layers(model, plan))
        here = [stage for stage, home in enumerate(homes) if home == self._at["pp"]]
        uses: dict[str, list[int]] = {}
        for stage in here:
            for name in names[stage]:
                uses.setdefault(name, []).append(stage)
        shapes = parameter_shapes(model)
        found = []
        for name, stages in uses.items():
            spec = spec_of(name, shapes[name], model, plan)
            sizes = sizes_of(spec, self._mesh)
            found.append(
                Kept(
                    name=name,
                    spec=spec,
                    shape=spec.local_shape(sizes, self._at),
                    pieces=spec.pieces(sizes, self._at),
                    stage=stages[0] if len(stages) == 1 else None,
                    tied=model.tied and name == _EMBEDDING and homes[0] != homes[-1],
                    dtype="fp32" if ".router." in name else None,
                    trained=not name.endswith(".router.bias"),
                )
            )
        return found

    def _fold(self, expert: bool) -> Fold:
        plan, mesh, at = self._plan, self._mesh, self._at
        apart = expert and plan.ep * plan.etp != plan.tp
        name = "edp" if apart else "+".join(DATA_AXES)
        ranks = mesh.expert_sizes["edp"] if apart else mesh.dp * mesh.cp
        place = at["edp"] if apart else at["dp"] * mesh.cp + at["cp"]
        size = ranks if plan.zero_group is None or plan.zero == 0 else math.gcd(plan.zero_group, ranks)
        cut = size < ranks
        return Fold(
            shards=1 if plan.zero == 0 else size,
            index=0 if plan.zero == 0 else place % size,
            block=(f"{name}/{size}" if cut else name, size),
            across=(f"{name} across {size}", ranks // size) if cut else None,
        )

    def _bin(self, key: int, held: list[Kept], fold: Fold) -> Bin:
        first = held[0]
        return Bin(
            key=key,
            held=tuple(held),
            fold=fold,
            width=4 if self._plan.precision == "fp32" or first.dtype else 2,
            gathered=self._plan.zero == 3 and fold.shards > 1 and (first.trained or decays(first)),
        )

    def bytes(self) -> tuple[int, int, int]:
        """(weights, gradients, optimizer) as `plait.parallel.zero.Zero.state_bytes` has them."""
        versions, level = 2 if self._plan.schedule == "2bw" else 1, self._plan.zero
        weights = sum((one.size if one.gathered else one.length) * one.width for one in self.bins)
        weights += sum(one.length * one.width for one in self.trained) * (versions - 1)
        gradients = sum(4 * (one.size if level >= 2 else one.length) for one in self.trained)
        masters = sum(4 * one.size for one in self.trained if one.width < 4 or versions > 1)
        return weights, gradients, masters + sum(8 * one.size for one in self.trained)

    # --- what is sent

    def count(self, tally: Tally) -> None:
        """Everything that the state costs in a step."""
        for one in self.trained:
            self._reduce(one, tally)
            if one.fold.across is not None:
                _all_reduce(tally, one.fold.across, self._plan.compress, one, one.size)
            if one.fold.shards > 1 and not one.gathered:
                tally.call(one.fold.block[0], "all_gather", one.fold.block[1], one.length * one.width)
        for (axis, _, count), elements in self._partial().items():
            whole = {**self._mesh.sizes, **self._mesh.expert_sizes}[axis]
            tally.call(axis if count == whole else f"{axis}/{count}", "all_reduce", count, 4 * elements)
        if self._job.model.tied and self._at["pp"] in (self._homes[0], self._homes[-1]):
            for one in self.trained:
                if one.held[0].tied:
                    tally.call("tie", "all_reduce", 2, 4 * one.size)
        if self._plan.zero == 3:
            self._gather(tally)

    def _partial(self) -> dict[tuple[str, int, int], int]:
        """(axis, first, count) -> elements of this rank's shards whose gradients are summed over those ranks."""
        sums: dict[tuple[str, int, int], int] = {}
        for one in self.trained:
            for copied, elements in one.stretches():
                for copies in copied:
                    if copies.partial and not is_data(copies.axis):
                        key = (copies.axis, copies.first, copies.count)
                        sums[key] = sums.get(key, 0) + elements
        return sums

    def _reduce(self, one: Bin, tally: Tally) -> None:
        """Sums of a bucket's gradients over the ranks that share state."""
        plan, block = self._plan, one.fold.block
        scatter = one.fold.shards > 1
        # From level 2 on what is shared is reduced whenever it has got gradients, and nothing else is.
        times = 1 if plan.zero < 2 else self._fills(one) if scatter else 0
        if block[1] == 1:
            return
        if plan.node is not None:
            self._by_node(tally, one, times, scatter=scatter)
        elif not scatter:
            _all_reduce(tally, block, plan.compress, one, one.length, times)
        elif plan.compress == "half":
            tally.call(block[0], "all_to_all", block[1], 2 * one.length, times)
        elif plan.compress == "none":
            tally.call(block[0], "reduce_scatter", block[1], 4 * one.length, times)
        else:
            _all_reduce(tally, block, plan.compress, one, one.length, times)

    def _by_node(self, tally: Tally, one: Bin, times: int, *, scatter: bool) -> None:
        """`plait.parallel.reducer.Hierarchical`."""
        name, ranks = one.fold.block
        inner = math.gcd(self._plan.node or 1, ranks)
        within, across = f"{name} within nodes", f"{name} across nodes"
        whole = 4 * (-(-one.length // inner) * inner)
        tally.call(within, "reduce_scatter", inner, whole, times)
        tally.call(across, "reduce_scatter" if scatter else "all_reduce", ranks // inner, whole // inner, times)
        if not scatter:
            tally.call(within, "all_gather", inner, whole, times)

    def _fills(self, one: Bin) -> int:
        """Actions of a step that give the bucket gradients: each is reduced by itself (levels 2 and 3)."""
        splits = build_schedule(self._plan, self._job.microbatches).splits
        last, actions = len(self._homes) - 1, 0
        for stage in sorted({stage for kept in one.held for stage in self._users(kept)}):
            names = [kept.name for kept in one.held if stage in self._users(kept)]
            # A split backward leaves to its W what is a product of an input and an output's gradient.
            late = [name for name in names if _is_product(name, head=self._job.model.tied and stage == last)]
            early = [name for name in names if not _is_product(name, head=False)]
            early = [name for name in early if name != _EMBEDDING or stage == 0]
            actions += bool(late) + bool(early) if stage in splits else 1
        return actions * self._job.microbatches

    def _users(self, kept: Kept) -> tuple[int, ...]:
        """The stages of this rank that use a parameter."""
        return (kept.stage,) if kept.stage is not None else (0, len(self._homes) - 1)

    def _gather(self, tally: Tally) -> None:
        """Weights come for the unit of a stage that needs them."""
        model, plan, at = self._job.model, self._plan, self._at["pp"]
        of = {kept.name: one for one in self.bins if one.gathered for kept in one.held}
        names = stage_parameters(model, stage_layers(model, plan))
        stages = {
            stage: units(names[stage], of, first=stage == 0, head=stage == len(names) - 1, tied=model.tied)
            for stage, home in enumerate(self._homes)
            if home == at
        }
        actions = build_schedule(plan, self._job.microbatches).ranks[at]
        calls = gathers(actions, stages, keep=plan.gather == "step")
        for one in self.bins:
            if calls[one.key]:
                tally.call(one.fold.block[0], "all_gather", one.fold.block[1], one.length * one.width, calls[one.key])


def _is_product(name: str, *, head: bool) -> bool:
    """Whether a parameter's gradient is a product that a fused layer makes (``head``: of the tied head as well)."""
    if name == _EMBEDDING:
        return head
    return (
        not name.endswith("bias")
        and rule_of(name).form in (Form.COLUMN, Form.ROW, Form.MIXTURE)
        and (".router." not in name)
    )


def _all_reduce(tally: Tally, group: tuple[str, int], compress: str, one: Bin, elements: int, times: int = 1) -> None:
    """A sum of fp32 ``elements`` of a bucket over ``group``, as ``compress`` sends it (`plait.parallel.compress`)."""
    (axis, size), kind = group, Compression.parse(compress)
    if kind.kind == "none" or size == 1:
        tally.call(axis, "all_reduce", size, 4 * elements, times)
    elif kind.kind == "half":
        whole = 2 * (-(-elements // size) * size)
        tally.call(axis, "all_to_all", size, whole, times)
        tally.call(axis, "all_gather", size, whole, times)
    elif kind.kind == "topk":
        sent = sum(min(kept.numel, math.ceil(kind.share * kept.numel)) for kept in one.held)
        tally.call(axis, "all_gather", size, 8 * size * sent, times)
    else:
        _low_rank(tally, group, kind.rank, one, elements, times)


def _low_rank(tally: Tally, group: tuple[str, int], rank: int, one: Bin, elements: int, times: int) -> None:
    """The two factors of each matrix, and what is no larger than its factors."""
    left, right, exact = 0, 0, elements
    for kept in one.held:
        if len(kept.shape) < 2 or rank * sum(kept.shape[-2:]) >= math.prod(kept.shape[-2:]):
            continue
        batch, (rows, columns) = math.prod(kept.shape[:-2]), kept.shape[-2:]
        left, right, exact = left + batch * rank * rows, right + batch * rank * columns, exact - kept.numel
        # Both factors, what they leave, and what comes out.
        tally.product(batch * rows, columns, rank, 4 * times)
    tally.call(group[0], "all_reduce", group[1], 4 * (left + exact), times)
    if right:
        tally.call(group[0], "all_reduce", group[1], 4 * right, times)
