"""Compressed sums against plain ones: what is rounded, what is kept back, and what is sent."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.comm.world import World
from plait.core.mesh import Mesh
from plait.parallel.compress import Half, PowerSGD, TopK, parse
from plait.parallel.reducer import Exact, Hierarchical, Reducer, node_groups
from tests.parallel.cuts import Run, assemble, cut_run, models, one_process, relative
from tests.pool import Connect, Pool

SHAPES = ((24, 20), (7,), (3, 16, 12), (2, 2), (5, 30))
"""Two matrices, a stack of three, a vector, and a matrix whose factors would be no smaller."""
PADDING = 9
SIZES = [math.prod(shape) for shape in SHAPES]
PLACES = [(sum(SIZES[:i]), shape) for i, shape in enumerate(SHAPES)]
LENGTH = sum(SIZES) + PADDING


def layout(key: int) -> list[tuple[int, tuple[int, ...]]]:
    return PLACES


def gradients(size: int, seed: int, *, rank: int | None = None, length: int = LENGTH) -> list[Tensor]:
    """One bucket a rank, zeros in the padding; with ``rank``, all matrices are the same products of that rank, times
    numbers that differ from rank to rank."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(length, generator=generator) for _ in range(size)]
    for row in rows:
        row[sum(SIZES) :] = 0
    if rank is not None:
        for offset, shape in PLACES:
            if len(shape) > 1:
                left = torch.randn(*shape[:-1], rank, generator=generator)
                right = torch.randn(*shape[:-2], rank, shape[-1], generator=generator)
                for index, row in enumerate(rows):
                    row[offset : offset + math.prod(shape)] = (left @ right).flatten() * (index + 1)
    return rows


def run_choice(connect: Connect) -> list[str]:
    world = connect(Mesh(dp=2))
    texts = ("none", "half", "topk:0.1", "powersgd:2")
    chosen = [parse(text)(world.group("dp", "cp"), layout) for text in texts]
    alone = [parse(text)(world.group("tp"), layout) for text in texts]
    assert all(isinstance(one, Exact) for one in alone), "a group of one sends nothing, and loses nothing"
    return [type(one).__name__ for one in chosen]


def test_the_text_names_the_reducer(pool: Pool) -> None:
    assert pool.run(2, run_choice) == [["Exact", "Half", "TopK", "PowerSGD"]] * 2


# --- sums


def sums(connect: Connect, size: int, make: Callable[[World], Reducer], rows: list[list[Tensor]]) -> Any:
    """(sums of each step, bytes sent, kept) on this rank; ``rows``: a step's buckets, one a rank."""
    world = connect(Mesh(dp=size))
    reducer = make(world)
    world.book.ledger.clear()
    found = []
    for step in rows:
        flat = step[world.rank].clone()
        assert reducer.all_reduce(0, flat).wait() is flat
        found.append(flat.numpy())
    kept = reducer._kept[0].numpy() if isinstance(reducer, TopK | PowerSGD) else None
    return found, dict(world.book.ledger.bytes), kept


def check(results: list[Any]) -> tuple[list[Tensor], dict[Any, int], list[Tensor]]:
    """All ranks must have the same bits; (sums, bytes, what each rank has kept)."""
    for found, sent, _ in results:
        assert sent == results[0][1]
        for mine, first in zip(found, results[0][0], strict=True):
            assert (mine == first).all()
    kept = [torch.from_numpy(row[2]) for row in results if row[2] is not None]
    return [torch.from_numpy(one) for one in results[0][0]], results[0][1], kept


def run_half(connect: Connect, size: int, length: int) -> Any:
    rows = [gradients(size, 1, length=length)]
    return sums(connect, size, lambda world: Half(world.group("dp", "cp")), rows)


@pytest.mark.parametrize(("size", "length"), [(2, LENGTH + 1), (3, LENGTH), (4, LENGTH + 3)])
def test_half_rounds_every_term_once_and_sums_in_fp32(pool: Pool, size: int, length: int) -> None:
    (found,), sent, _ = check(pool.run(size, run_half, size, length))
    wanted = torch.zeros(length)
    for row in gradients(size, 1, length=length):
        wanted += row.bfloat16()
    assert torch.equal(found, wanted.bfloat16().float())
    padded = -(-length // size) * size
    part = (size - 1) * padded * 2 // size
    assert sent == {("dp+cp", "all_to_all", ""): part, ("dp+cp", "all_gather", ""): part}, "half of an fp32 all-reduce"


def run_half_scattered(connect: Connect, size: int) -> None:
    world = connect(Mesh(dp=size))
    reducer, rows = Half(world.group("dp", "cp")), gradients(size, 2, length=size * 400)
    mine = slice(world.rank * 400, (world.rank + 1) * 400)
    wanted = torch.zeros(400)
    for row in rows:
        wanted += row[mine].bfloat16()
    for inside in (True, False):
        flat = rows[world.rank].clone()
        out = flat[mine] if inside else torch.empty(400)
        assert torch.equal(reducer.reduce_scatter(0, flat, out).wait(), wanted)
        assert torch.equal(out, wanted)


def test_half_scattered_keeps_its_sums_in_fp32(pool: Pool) -> None:
    pool.run(3, run_half_scattered, 3)


def run_half_across(connect: Connect) -> dict[str, int]:
    world = connect(Mesh(dp=4))
    inner, outer = node_groups(world, ("dp", "cp"), 2)
    rows = gradients(4, 3, length=64)
    flat = rows[world.rank].clone()
    Hierarchical(inner, Half(outer)).all_reduce(0, flat).wait()
    nodes = [(rows[0] + rows[1]).bfloat16().float(), (rows[2] + rows[3]).bfloat16().float()]
    assert torch.equal(flat, (nodes[0] + nodes[1]).bfloat16().float())
    return world.book.ledger.by_axis()


def test_half_across_nodes_only(pool: Pool) -> None:
    assert pool.run(4, run_half_across) == [{"dp+cp within nodes": 256, "dp+cp across nodes": 64}] * 4


# --- error feedback

STEPS = 3
MAKERS: dict[str, Callable[[World], Reducer]] = {
    "topk": lambda world: TopK(world.group("dp", "cp"), layout, share=0.1),
    "powersgd": lambda world: PowerSGD(world.group("dp", "cp"), layout, rank=2),
}


def run_feedback(connect: Connect, size: int, kind: str, seeds: list[int], rank: int | None) -> Any:
    return sums(connect, size, MAKERS[kind], [gradients(size, seed, rank=rank) for seed in seeds])


@pytest.mark.parametrize("kind", MAKERS)
def test_what_is_not_sent_is_kept(pool: Pool, kind: str) -> None:
    """After every number of steps: all that was sent and all that is kept is all the gradients. fp32 rounding only."""
    found, _, kept = check(pool.run(3, run_feedback, 3, kind, [1, 2, 3], None))
    total = torch.stack([torch.stack(gradients(3, seed)).sum(0) for seed in (1, 2, 3)]).sum(0)
    assert torch.allclose(torch.stack(found).sum(0) + torch.stack(kept).sum(0), total, atol=1e-5)
    assert torch.stack(kept).abs().max() > 0.1, "this sent everything"
    assert (found[0][sum(SIZES) :] == 0).all()


def test_topk_sends_the_largest_of_every_tensor(pool: Pool) -> None:
    (found,), sent, _ = check(pool.run(2, run_feedback, 2, "topk", [1], None))
    wanted, count = torch.zeros(LENGTH), 0
    for row in gradients(2, 1):
        for (offset, _), size in zip(PLACES, SIZES, strict=True):
            part = row[offset : offset + size]
            number = math.ceil(0.1 * size)
            least = part.abs().sort(descending=True).values[number - 1]
            wanted[offset : offset + size] += torch.where(part.abs() >= least, part, 0)
            count += number
    assert torch.equal(found, wanted)
    assert sent == {("dp+cp", "all_gather", ""): 8 * count // 2}, "an index and a value of each"


def test_everything_is_sent_at_last(pool: Pool) -> None:
    """Steps without gradients send what earlier ones kept: 0.1 of every tensor a step is all of it in 10."""
    size = 2
    found, _, kept = check(pool.run(size, run_drain, size))
    assert (torch.stack(kept) == 0).all()
    assert torch.allclose(torch.stack(found).sum(0), torch.stack(gradients(size, 1)).sum(0), atol=1e-6)


def run_drain(connect: Connect, size: int) -> Any:
    rows = [gradients(size, 1), *[[torch.zeros(LENGTH)] * size] * 9]
    return sums(connect, size, MAKERS["topk"], rows)


def test_powersgd_is_exact_where_the_rank_suffices(pool: Pool) -> None:
    """Gradients of rank 2 on all ranks, with one column space: one step finds it, whatever it starts from."""
    (found,), sent, kept = check(pool.run(2, run_feedback, 2, "powersgd", [1], 2))
    wanted = torch.stack(gradients(2, 1, rank=2)).sum(0)
    assert torch.allclose(found, wanted, atol=2e-4 * float(wanted.abs().max()))
    assert torch.stack(kept).abs().max() < 2e-4 * float(wanted.abs().max())
    exact = 7 + 4 + PADDING
    factors = 2 * ((24 + 20) + 3 * (16 + 12) + (5 + 30))
    assert sent == {("dp+cp", "all_reduce", ""): 2 * 4 * (exact + factors) // 2}


def test_powersgd_vectors_and_small_matrices_are_exact(pool: Pool) -> None:
    found, _, _ = check(pool.run(2, run_feedback, 2, "powersgd", [1, 2], None))
    for seed, sums in zip((1, 2), found, strict=True):
        wanted = torch.stack(gradients(2, seed)).sum(0)
        for (offset, shape), size in zip(PLACES, SIZES, strict=True):
            part = slice(offset, offset + size)
            assert torch.equal(sums[part], wanted[part]) == (shape in ((7,), (2, 2)))


def run_warm(connect: Connect) -> list[float]:
    """How much of one and the same matrix is missed, step by step, without feedback's help."""
    world = connect(Mesh(dp=2))
    reducer = MAKERS["powersgd"](world)
    assert isinstance(reducer, PowerSGD)
    (row, _) = gradients(2, 5)
    missed = []
    for _ in range(8):
        flat = row.clone()
        reducer.all_reduce(0, flat).wait()
        reducer._kept[0].zero_()
        missed.append(float((flat / 2 - row).norm()))
    return missed


def test_powersgd_goes_on_from_the_last_step(pool: Pool) -> None:
    """Power iteration on a matrix that stays: the error falls towards that of the best approximation of this rank."""
    missed, other = pool.run(2, run_warm)
    assert missed == other
    (row, _) = gradients(2, 5)
    best = 0.0
    for offset, shape in (place for place in PLACES if len(place[1]) > 1 and place[1] != (2, 2)):
        values = torch.linalg.svdvals(row[offset : offset + math.prod(shape)].view(shape))
        best += float(values[..., 2:].square().sum())
    assert missed[0] > 1.05 * math.sqrt(best)
    assert math.sqrt(best) <= missed[-1] < 1.01 * math.sqrt(best)


def run_silent(connect: Connect, kind: str) -> list[float]:
    """A gradient of zeros (experts without tokens), then one that is not."""
    rows = [[torch.zeros(LENGTH)] * 2, gradients(2, 1, rank=2), [torch.zeros(LENGTH)] * 2, gradients(2, 2, rank=2)]
    found, _, _ = sums(connect, 2, MAKERS[kind], rows)
    return [float(abs(one).max()) for one in found]


def test_powersgd_after_a_gradient_of_zeros(pool: Pool) -> None:
    for largest in pool.run(2, run_silent, "powersgd"):
        assert largest[0] == 0
        assert all(math.isfinite(one) for one in largest)
        wanted = [float(torch.stack(gradients(2, seed, rank=2)).sum(0).abs().max()) for seed in (1, 2)]
        assert largest[1] == pytest.approx(wanted[0], rel=1e-3)
        assert largest[3] == pytest.approx(wanted[1], rel=1e-3)


def run_embedding(connect: Connect) -> float:
    """After a step of zeros, a gradient whose first rows are zero: those of tokens that never come."""
    world = connect(Mesh(dp=2))
    reducer = PowerSGD(world.group("dp", "cp"), lambda key: [(0, (20, 12))], rank=2)
    gradient = torch.zeros(20, 12)
    reducer.all_reduce(0, gradient.flatten()).wait()
    gradient[5:] = torch.outer(torch.arange(15.0), torch.arange(12.0))
    flat = gradient.flatten().clone()
    reducer.all_reduce(0, flat).wait()
    return float((flat.view(20, 12) - 2 * gradient).abs().max() / gradient.abs().max())


def test_powersgd_finds_its_way_out_of_zeros(pool: Pool) -> None:
    assert max(pool.run(2, run_embedding)) < 1e-5


def run_scattered(connect: Connect, kind: str) -> None:
    world = connect(Mesh(dp=2))
    whole, parts = MAKERS[kind](world), MAKERS[kind](world)
    for seed in (1, 2):
        rows = [torch.cat([row, torch.zeros(LENGTH % 2)]) for row in gradients(2, seed)]
        flat = rows[world.rank].clone()
        whole.all_reduce(0, flat).wait()
        half = flat.numel() // 2
        mine = slice(world.rank * half, (world.rank + 1) * half)
        for inside in (True,) if seed == 1 else (False,):
            other = rows[world.rank].clone()
            out = other[mine] if inside else torch.empty(half)
            assert parts.reduce_scatter(0, other, out).wait() is out
            assert torch.equal(out, flat[mine])


@pytest.mark.parametrize("kind", MAKERS)
def test_scattered_sums_are_parts_of_the_whole(pool: Pool, kind: str) -> None:
    pool.run(2, run_scattered, kind)


def run_buckets(connect: Connect, kind: str) -> None:
    """The same tensor with the same gradient, alone in its bucket or among others: copies on other axes stay equal."""
    world = connect(Mesh(dp=2))
    group = world.group("dp", "cp")
    offset, shape = PLACES[2]
    size = math.prod(shape)

    def places(key: int) -> list[tuple[int, tuple[int, ...]]]:
        return PLACES if key == 0 else [(0, shape)]

    reducer = parse({"topk": "topk:0.1", "powersgd": "powersgd:2"}[kind])(group, places)
    for seed in (1, 2):
        among = gradients(2, seed)[world.rank]
        alone = among[offset : offset + size].clone()
        for pending in [reducer.all_reduce(0, among), reducer.all_reduce(7, alone)]:
            pending.wait()
        assert torch.equal(among[offset : offset + size], alone)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_tensor_is_treated_alike_in_any_bucket(pool: Pool, kind: str) -> None:
    pool.run(2, run_buckets, kind)


# --- in a run

NEAR = {"half": 1e-2, "topk:0.2": 1.0, "powersgd:2": 1.0}
"""bf16 rounds a gradient's terms by 2^-9 each, far below this; the others send a part, and are not near at all."""


@pytest.mark.parametrize("compress", NEAR)
@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("tp=2 dp=2", "qwen3"),
        ("tp=2 dp=2 sequence_parallel=false zero=1", "gpt2-tied"),
        ("pp=2 dp=2", "llama-tied"),
        ("pp=2 dp=2 zero=1 bucket_mb=0.01", "llama"),
    ],
)
def test_copies_stay_equal(pool: Pool, text: str, model: str, compress: str) -> None:
    """All ranks agree, and all copies of a weight (of heads, norms, tied ends) are the same bits after three steps."""
    config, run = models()[model], Run(steps=3)
    results = pool.run(4, cut_run, f"{text} compress={compress}", 4, config, run)
    for result in results:
        assert result["losses"] == results[0]["losses"]
        assert result["norms"] == results[0]["norms"]
    wanted = one_process(config, run)
    grads = assemble(config, [result["grads"] for result in results])
    weights = assemble(config, [result["weights"] for result in results])
    worst = max(relative(grads[name], grad) for name, grad in wanted["grads"].items())
    assert 1e-4 < worst < NEAR[compress] * 1.01, "the plan's compression has to be on"
    # A step of AdamW moves a weight by about the rate at most: three of 1e-3, on either side.
    for name, value in wanted["weights"].items():
        assert float((weights[name] - value).abs().max()) < 2 * 3 * 1e-3 * 1.1
