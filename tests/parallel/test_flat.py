"""Arithmetic of flat buffers."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.comm.group import Alone, Book
from plait.core.shard import Cut, Section, ShardSpec
from plait.parallel.flat import Bucket, Held, counted_ranges, overlap, square_sum
from plait.parallel.fold import Fold
from plait.parallel.grads import Deferred
from plait.parallel.grouping import bucket_groups, decays
from plait.parallel.reducer import Exact


def held(name: str, spec: ShardSpec, at: dict[str, int], sizes: dict[str, int], *, stage: int = 0) -> Held:
    return Held(
        name=name,
        spec=spec,
        shape=spec.local_shape(sizes, at),
        pieces=spec.pieces(sizes, at),
        stage=stage,
        tied=False,
        counted=True,
        uses=1,
        owners=[],
        trained=True,
        deferred=Deferred(),
    )


ALONE = Alone("dp+cp", Book(), torch.device("cpu"))
FOLD = Fold(shards=1, index=0, first=True, replicas=(0,), reducer=Exact(ALONE), across=None, gather=ALONE)


@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20), st.integers(0, 20))
def test_overlap_is_the_intersection(a: int, b: int, c: int, d: int) -> None:
    found = overlap(a, b, slice(c, d))
    both = set(range(a, b)) & set(range(c, d))
    assert (set(range(found.start, found.stop)) if found else set()) == both


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 3), st.integers(0, 2)), max_size=12), st.integers(1, 400))
def test_buckets_hold_everything_once_and_no_more_than_they_may(shapes: list[tuple[int, int, int]], limit: int) -> None:
    ones = [
        held(str(index), ShardSpec(shape=(rows,) * min(dims, 2)), {"dp": 0}, {"dp": 2}, stage=stage)
        for index, (rows, dims, stage) in enumerate(shapes)
    ]
    groups = bucket_groups(ones, limit)
    assert sorted(one.name for group in groups for one in group) == sorted(one.name for one in ones)
    for group in groups:
        assert len({(one.stage, decays(one)) for one in group}) == 1
        assert len(group) == 1 or sum(4 * math.prod(one.shape) for one in group) <= limit
        # Backward completes the last parameters first.
        numbers = [int(one.name) for one in group]
        assert numbers == sorted(numbers, reverse=True)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 5), st.booleans()), min_size=1, max_size=4),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 3),
    st.integers(0, 1),
)
def test_every_logical_element_is_counted_once(
    parameters: list[tuple[int, int, bool]], tp: int, dp: int, level: int
) -> None:
    """Random fused weights (a section of a part a rank, one of two parts) and replicated ones, on all ranks."""
    sizes, counted, wanted = {"dp": dp, "tp": tp}, 0, 0
    specs = []
    for heads, columns, cut in parameters:
        sections = (Section(size=4 * heads), Section(size=2 * heads, parts=min(tp, 2)))
        cuts = (Cut(axis="tp", dim=0, sections=sections),) if cut and tp > 1 else ()
        specs.append(ShardSpec(shape=(6 * heads, columns), cuts=cuts, partial=frozenset({"dp"})))
        wanted += 6 * heads * columns
    for tp_index in range(tp):
        for dp_index in range(dp):
            at = {"dp": dp_index, "tp": tp_index, "cp": 0}
            ones = [held(str(index), spec, at, sizes) for index, spec in enumerate(specs)]
            offsets = [sum(math.prod(one.shape) for one in ones[:index]) for index in range(len(ones))]
            used = sum(math.prod(one.shape) for one in ones)
            shards = dp if level else 1
            length = -(-used // shards) * shards
            index = dp_index if level else 0
            flat = torch.zeros(length)
            shard = slice(index * length // shards, (index + 1) * length // shards)
            for one in ones:
                one.counted = level > 0 or dp_index == 0
            bucket = Bucket(
                key=0,
                held=ones,
                offsets=offsets,
                length=length,
                shard=shard,
                fold=FOLD,
                stage=0,
                gathered=False,
                weights=flat,
                spare=None,
                own=flat[shard],
                master=flat[shard],
                grads=flat,
            )
            ranges = counted_ranges(bucket, at)
            assert all(0 <= one.start < one.stop <= shard.stop - shard.start for one in ranges)
            assert all(a.stop < b.start for a, b in itertools.pairwise(ranges))
            counted += sum(one.stop - one.start for one in ranges)
    assert counted == wanted


def test_square_sum_is_exact_where_one_fp32_sum_is_not() -> None:
    """The norm of a block is rounded to fp32 (6e-8), so its square is off by 1.2e-7 and a bit; sums are in fp64."""
    generator = torch.Generator().manual_seed(0)
    for size in (0, 1, 4095, 4096, 4097, 4_000_000):
        flat = torch.randn(size, generator=generator)
        wanted = float(flat.double().square().sum())
        assert abs(float(square_sum(flat)) - wanted) <= 3e-7 * wanted
