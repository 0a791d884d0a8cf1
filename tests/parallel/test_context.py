"""Context parallel beside one process: the cut of a batch, blocks of attention and their merge, three ways to attend.

**Tolerance.** In fp64 blocks change the order of additions alone: sqrt(n) u with n <= 64 keys and u = 1e-16, times the
few operations of the merge; 1e-13 leaves room for cp = 4. In fp32 (u = 6e-8) the same gives 1e-5, as in `cuts`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from plait.comm.world import World
from plait.core.errors import PlanError
from plait.core.mesh import Mesh
from plait.models.attention import Attend
from plait.models.batch import IGNORE, Batch
from plait.models.config import ModelConfig
from plait.models.decoder import Block, Decoder
from plait.models.init import InitSource, initialise
from plait.parallel.block_attention import Sum, attend, attend_backward, merge
from plait.parallel.chunks import kv_heads_of, padded, pieces, zigzag
from plait.parallel.context import CONTEXTS, context_attend, order, take
from plait.parallel.recompute import RecomputedAttend, RecomputedBlock
from plait.parallel.ring_attention import RingAttend
from plait.parallel.zigzag import in_order, out_of_order
from tests.parallel.cuts import GPT2, LLAMA, Run, count, global_batch, one_process, relative, rows
from tests.pool import Connect, Pool

# The cut of a batch


@given(st.integers(1, 40), st.integers(1, 5), st.sampled_from(CONTEXTS), st.integers(1, 4), st.booleans())
@settings(deadline=None)
def test_parts_make_up_the_batch(seq: int, size: int, context: str, multiple: int, packed: bool) -> None:
    tokens = torch.arange(1, 2 * seq + 1).view(2, seq)
    documents = torch.arange(seq).div(3, rounding_mode="floor").expand(2, seq) if packed else None
    positions = torch.arange(seq).remainder(3).expand(2, seq) if packed else None
    whole = Batch(
        tokens_BT=tokens,
        targets_BT=tokens + 100,
        sample_B=torch.tensor([4, 9]),
        step=3,
        documents_BT=documents,
        positions_BT=positions,
        total=77,
        scale=8.0,
    )
    parts = [take(whole, size, index, context, multiple=multiple) for index in range(size)]
    length = padded(seq, size, context, multiple)
    assert seq <= length < seq + 2 * size * multiple
    assert {part.tokens_BT.shape for part in parts} == {(2, length // size)}
    assert length // size % multiple == 0
    where = order(length, size, context)
    index = torch.cat([part.indices_T() for part in parts])
    assert torch.equal(index, where)
    assert torch.equal(where.sort().values, torch.arange(length))

    def put_together(name: str) -> Tensor:
        gathered = torch.cat([getattr(part, name) for part in parts], 1)
        found = torch.empty_like(gathered)
        found[:, where] = gathered
        return found

    assert torch.equal(put_together("tokens_BT")[:, :seq], tokens)
    targets = put_together("targets_BT")
    assert torch.equal(targets[:, :seq], tokens + 100)
    assert (targets[:, seq:] == IGNORE).all()
    if packed:
        assert torch.equal(put_together("documents_BT")[:, :seq], documents)
        assert (put_together("documents_BT")[:, seq:] == -1).all()
        assert torch.equal(put_together("positions_BT")[:, :seq], positions)
    if length > seq:
        assert torch.equal(put_together("real_BT"), (torch.arange(length) < seq).expand(2, length))
        assert int(put_together("positions_BT").max()) < seq, "padding must not ask for positions a model lacks"
    else:
        assert parts[0].real_BT is None
        assert packed or parts[0].positions_BT is None
    for part in parts:
        assert torch.equal(part.sample_B, whole.sample_B)
        assert (part.step, part.total, part.scale) == (3, 77, 8.0)


def test_padding_of_samples_that_were_padded_before_stays_padding() -> None:
    real = torch.tensor([[True, True, True, False, False], [True, True, True, True, True]])
    zeros = torch.zeros(2, 5, dtype=torch.int64)
    whole = Batch(tokens_BT=zeros, targets_BT=zeros, sample_B=torch.arange(2), step=0, real_BT=real)
    found = torch.empty(2, 8, dtype=torch.bool)
    found[:, order(8, 2, "ring")] = torch.cat([take(whole, 2, i, "ring").real_BT for i in range(2)], 1)  # type: ignore[arg-type]
    assert found.tolist() == [[True] * 3 + [False] * 5, [True] * 5 + [False] * 3]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_parts_in_order_and_back(size: int) -> None:
    whole = torch.randn(2, 3, 4 * size, 5)
    where = order(4 * size, size, "ring")
    parts = torch.stack([part for part in whole[:, :, where].chunk(size, 2)])
    assert torch.equal(in_order(parts, 3), whole)
    assert torch.equal(out_of_order(whole, size, 2), parts)


# Which calls cover what is seen


@given(
    st.integers(1, 4), st.integers(1, 4), st.one_of(st.none(), st.integers(1, 40)), st.booleans(), st.data()
)  # fmt: skip
@settings(deadline=None, max_examples=300)
def test_pieces_cover_what_is_seen_once(size: int, chunk: int, window: int | None, packed: bool, data: Any) -> None:
    """Local keys, then those of every other rank one after the other, or gathered at once."""
    index = data.draw(st.integers(0, size - 1))
    queries = zigzag(size, index)
    reach = 2 * size * chunk if window is None else window
    ring = [(list(zigzag(size, other)), False) for other in range(size) if other != index]
    for buffers in ([(list(queries), True), *ring], [(list(queries), True), (list(range(2 * size)), False)]):
        covered = torch.zeros(2 * chunk, 2 * size * chunk, dtype=torch.int64)
        of_query = torch.cat([torch.arange(one * chunk, (one + 1) * chunk) for one in queries])
        seen = (of_query[:, None] >= torch.arange(2 * size * chunk)) & (
            of_query[:, None] - torch.arange(2 * size * chunk) < reach
        )
        for keys, local in buffers:
            of_key = torch.cat([torch.arange(one * chunk, (one + 1) * chunk) for one in keys])
            found = pieces(queries, keys, chunk, window=reach, packed=packed, local=local)
            for piece in found:
                q, k = of_query[piece.rows], of_key[piece.columns]
                here = seen[q.new_tensor(range(*piece.rows.indices(2 * chunk)))][:, k]
                if piece.causal:
                    assert torch.equal(here, torch.ones_like(here).tril())
                elif not piece.masked:
                    assert here.all()
                    assert not packed
                covered[piece.rows, k] += here.long() if piece.causal or piece.masked else 1
        assert torch.equal(covered, seen.long())


@pytest.mark.parametrize("size", [2, 4, 8])
def test_every_rank_has_the_same_work_and_no_mask(size: int) -> None:
    chunk = 16
    for index in range(size):
        queries = zigzag(size, index)
        for step in range(size):
            keys = zigzag(size, (index - step) % size)
            (piece,) = pieces(queries, keys, chunk, window=2 * size * chunk, packed=False, local=step == 0)
            assert not piece.masked
            pairs = (piece.rows.stop - piece.rows.start) * (piece.columns.stop - piece.columns.start)
            assert pairs == (4 if piece.causal else 2) * chunk**2, "causal calls do half of their pairs"


def test_a_window_skips_what_it_hides() -> None:
    """8 ranks, a window of one chunk: a query chunk sees two chunks of sixteen."""
    total = 0
    for index in range(8):
        for step in range(8):
            keys = zigzag(8, (index - step) % 8)
            for piece in pieces(zigzag(8, index), keys, 4, window=4, packed=False, local=step == 0):
                total += (piece.rows.stop - piece.rows.start) * (piece.columns.stop - piece.columns.start)
    assert total == 31 * 4**2, "each chunk sees itself and the one before"


# Blocks and their merge


def explicit(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Output and LSE of a block in fp64, 0 and -inf for queries that see nothing."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~seen, -math.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("widths", [(8, 8), (12, 8), (8, 12)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("kind", ["full", "causal", "masked", "blind"])
def test_a_block_with_its_gradients(widths: tuple[int, int], kv_heads: int, kind: str) -> None:
    """Long enough for several of the kernel's own blocks (512 keys)."""
    torch.manual_seed(0)
    queries, keys = 40, 40 if kind == "causal" else 1100
    q = torch.randn(2, 4, queries, widths[0], dtype=torch.double)
    k = torch.randn(2, kv_heads, keys, widths[0], dtype=torch.double)
    v = torch.randn(2, kv_heads, keys, widths[1], dtype=torch.double)
    seen = torch.ones(1, 1, queries, keys, dtype=torch.bool)
    if kind == "causal":
        seen = seen.tril()
    elif kind != "full":
        # The first blocks of some queries are hidden whole; of others, all is.
        seen = torch.rand(2, 1, queries, keys) < 0.5
        seen[:, :, :20, :600] = False
        if kind == "blind":
            seen[:, :, 5:9] = False
    scale = 1 / math.sqrt(widths[0])
    mask = None if kind in ("full", "causal") else seen
    out, lse = attend(q, k, v, mask, causal=kind == "causal", scale=scale)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted_out, wanted_lse = explicit(*leaves, seen)  # type: ignore[call-arg]
    torch.testing.assert_close(out, wanted_out)
    torch.testing.assert_close(lse, wanted_lse)
    if kind == "blind":
        return  # of the softmax over all keys, no query sees nothing: backward is only ever asked for that
    grad = torch.randn_like(out)
    found = attend_backward(grad, q, k, v, out, lse, mask, causal=kind == "causal", scale=scale)
    torch.testing.assert_close(found, torch.autograd.grad((wanted_out * grad).sum(), leaves))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["full", "causal", "masked"])
def test_calls_of_gpu_kernels_fit_their_signatures(dtype: torch.dtype, kind: str) -> None:
    """Shapes alone, on the meta device, which takes the kernels of GPUs: grouped heads, narrow values, odd lengths."""
    queries, keys = 30, 30 if kind == "causal" else 77
    q = torch.empty(2, queries, 8, 64, dtype=dtype, device="meta").transpose(1, 2)
    k = torch.empty(2, 4, keys, 64, dtype=dtype, device="meta")
    v = torch.empty(2, 4, keys, 48, dtype=dtype, device="meta")
    seen = torch.empty(2, 1, queries, keys, dtype=torch.bool, device="meta") if kind == "masked" else None
    out, lse = attend(q, k, v, seen, causal=kind == "causal", scale=0.1)
    assert (out.shape, out.dtype) == ((2, 8, queries, 48), dtype)
    assert (lse.shape, lse.dtype) == ((2, 8, queries), torch.float32)
    grads = attend_backward(torch.empty_like(out), q, k, v, out, lse, seen, causal=kind == "causal", scale=0.1)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]


def test_merge_is_one_softmax_and_safe_where_nothing_is_seen() -> None:
    """Scores spread over 1e4, blocks that hide everything on either side or on both (case P23)."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 8, dtype=torch.double) for n in (12, 30, 30))
    q *= 1e4
    seen = torch.rand(1, 1, 12, 30) < 0.5
    seen[:, :, 0:3, :10] = False
    seen[:, :, 2:5, 10:20] = False
    seen[:, :, 7:9] = False
    wanted_out, wanted_lse = explicit(q, k, v, seen)
    total = Sum(q, 8)
    for begin in (0, 10, 20):
        part = slice(begin, begin + 10)
        total.add(slice(0, 12), *explicit(q, k[:, :, part], v[:, :, part], seen[..., part]))
    out, lse = total.total()
    torch.testing.assert_close(out, wanted_out)
    torch.testing.assert_close(lse, wanted_lse)
    assert (out[:, :, 7:9] == 0).all()
    assert lse[:, :, 7:9].isneginf().all()


def test_merge_does_not_overflow() -> None:
    out, lse = torch.zeros(1, 1, 1, 2), torch.tensor([[[3e38]]])
    merge(out, lse, torch.ones(1, 1, 1, 2), torch.tensor([[[-3e38]]]))
    assert out.tolist() == [[[[0.0, 0.0]]]]
    merge(out, lse, torch.ones(1, 1, 1, 2), torch.tensor([[[3e38]]]))
    assert out.tolist() == [[[[0.5, 0.5]]]]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "wanted"),
    [
        (8, 8, 4, [0, 1, 2, 3, 4, 5, 6, 7]),
        (8, 2, 4, [0, 0, 1, 1]),
        (8, 1, 4, [0, 0, 0, 0]),
        (6, 3, 2, [0, 0, 1, 1, 2, 2]),
    ],
)
def test_key_heads_of_ulysses(heads: int, kv_heads: int, size: int, wanted: list[int]) -> None:
    assert kv_heads_of(heads, kv_heads, size) == wanted
    # What a rank's attention makes of them: its query head h uses key head h // (query heads / key heads).
    mine, given = heads // size, len(wanted) // size
    for rank, head in itertools.product(range(size), range(mine)):
        assert wanted[rank * given + head // (mine // given)] == (rank * mine + head) // (heads // kv_heads)


# Three ways to attend beside one process


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention. ``spread``: what the queries are multiplied with; ``value_width`` 0: as wide as the keys."""

    samples: int = 2
    heads: int = 8
    kv_heads: int = 8
    seq: int = 32
    window: int | None = None
    packed: bool = False
    dtype: torch.dtype = torch.float64
    spread: float = 1.0
    value_width: int = 0


class WideAttend(Attend):
    """`Attend` for values of another width, in fp64: the reference."""

    def forward(self, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, batch: Batch) -> Tensor:
        seq = q_BHTE.shape[2]
        seen = self.visible(batch, seq)
        seen = torch.ones(seq, seq, dtype=torch.bool).tril() if seen is None else seen
        return explicit(q_BHTE, k_BKTE, v_BKTE, seen)[0]


def whole_case(case: Case) -> tuple[list[Tensor], Tensor, Batch]:
    """q, k, v, the gradient of the output, the batch: of whole samples."""
    generator = torch.Generator().manual_seed(case.seq)
    width = 8

    def draw(heads: int, wide: int) -> Tensor:
        # As attention gets them: [B, T, H, E] seen as [B, H, T, E].
        return torch.randn(case.samples, case.seq, heads, wide, generator=generator, dtype=torch.double).transpose(1, 2)

    value_width = case.value_width or width
    inputs = [draw(case.heads, width) * case.spread, draw(case.kv_heads, width), draw(case.kv_heads, value_width)]
    documents = None
    if case.packed:
        ends = torch.rand(case.samples, case.seq, generator=generator) < 0.15
        documents = ends.long().cumsum(1)
    tokens = torch.zeros(case.samples, case.seq, dtype=torch.int64)
    batch = Batch(
        tokens_BT=tokens, targets_BT=tokens, sample_B=torch.arange(case.samples), step=0, documents_BT=documents
    )
    return [x.to(case.dtype) for x in inputs], draw(case.heads, value_width).to(case.dtype), batch


def gradients(attend: Attend, inputs: list[Tensor], grad: Tensor, batch: Batch) -> list[Tensor]:
    """Output and gradients of q, k, v."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attend(*leaves, batch)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


Squares = tuple[float, float, int]
"""|a - b|^2, |b|^2 and the number of elements."""


def squares(a: Tensor, b: Tensor) -> Squares:
    return float((a.double() - b).square().sum()), float(b.square().sum()), b.numel()


def apart(parts: list[Squares]) -> float:
    """|a - b| beside |b|, or beside 1 an element where b vanishes (a window of one key has no gradient of queries)."""
    error, size, number = map(sum, zip(*parts, strict=True))
    return math.sqrt(error / max(size, number))


def run_case(world: World, context: str, case: Case) -> list[Squares]:
    """Beside one process in fp64: this rank's part of the output and the gradients of q, k, v; padding is left out."""
    group = world.group("cp")
    inputs, grad, batch = whole_case(case)
    wanted = gradients(WideAttend(case.window), [x.double() for x in inputs], grad, batch)
    part = take(batch, group.size, group.index, context)
    length = padded(case.seq, group.size, context)
    index = part.indices_T()

    def mine(x: Tensor, filler: float) -> Tensor:
        return torch.nn.functional.pad(x, (0, 0, 0, length - case.seq), value=filler)[:, :, index]

    inner = WideAttend(case.window) if case.value_width else Attend(case.window)
    attend = context_attend(context, inner, group, world.wire)
    # Padding holds what it likes: here 1s. It gets no gradient from the loss.
    found = gradients(attend, [mine(x, 1.0) for x in inputs], mine(grad, 0.0), part)
    world.wire.flush()
    real = index < case.seq
    assert all(x.isfinite().all() for x in found)
    return [squares(a[:, :, real], mine(b, 0.0)[:, :, real]) for a, b in zip(found, wanted, strict=True)]


def run_cases(connect: Connect, size: int, cases: list[Case], transport: str = "auto") -> dict[Any, list[Squares]]:
    world = connect(Mesh(cp=size), transport=transport)
    return {(context, case): run_case(world, context, case) for context in CONTEXTS for case in cases}


def errors(results: list[dict[Any, list[Squares]]]) -> dict[Any, list[float]]:
    """Of each case: errors of the whole output, and of the whole gradients of q, k and v."""
    return {
        key: [apart(list(parts)) for parts in zip(*(result[key] for result in results), strict=True)]
        for key in results[0]
    }


CASES = [
    Case(window=window, packed=packed, kv_heads=kv_heads, seq=seq)
    for window, packed, kv_heads, seq in itertools.product((None, 1, 5, 17), (False, True), (1, 2, 8), (32, 41))
] + [Case(seq=1), Case(seq=7, packed=True), Case(value_width=6, kv_heads=4), Case(value_width=6, seq=37, window=9)]


@pytest.mark.parametrize("size", [2, 4])
def test_attention_and_gradients_equal_one_process(pool: Pool, size: int) -> None:
    """Windows, packed documents (P24), grouped heads, narrow values (MLA), lengths that do not divide (P25)."""
    for key, found in errors(pool.run(size, run_cases, size, CASES)).items():
        assert max(found) < 1e-13, (key, found)


def test_an_odd_ring_over_gloo(pool: Pool) -> None:
    cases = [Case(heads=6, kv_heads=3), Case(heads=6, kv_heads=2, packed=True, window=9, seq=29)]
    for key, found in errors(pool.run(3, run_cases, 3, cases, "gloo")).items():
        assert max(found) < 1e-13, (key, found)


@pytest.mark.parametrize("size", [2, 4])
def test_fp32(pool: Pool, size: int) -> None:
    cases = [Case(dtype=torch.float32, seq=64), Case(dtype=torch.float32, seq=61, packed=True, window=20, kv_heads=2)]
    for key, found in errors(pool.run(size, run_cases, size, cases)).items():
        assert max(found) < 1e-5, (key, found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_scores_spread_over_ten_thousand_with_blocks_hidden_whole(pool: Pool, dtype: torch.dtype) -> None:
    """P23: a window and short documents hide most blocks, softmax is one-hot.

    Scores of 1e4 in fp32 carry errors of 1e4 u = 6e-4, which is what their exponentials are wrong by, relatively.
    """
    cases = [Case(spread=3e3, dtype=dtype, window=window, packed=packed) for window in (None, 3) for packed in (0, 1)]
    limit = 1e-9 if dtype is torch.float64 else 5e-3
    for key, found in errors(pool.run(4, run_cases, 4, cases)).items():
        assert max(found) < limit, (key, found)


def test_bf16_error_does_not_grow_with_the_ring(pool: Pool) -> None:
    """P22: blocks of a longer ring are rounded to bf16 once each, and averaged in fp32.

    Ulysses adds key heads' gradients, one rounded sum of bf16 from each rank that was sent the head.
    """
    case = Case(dtype=torch.bfloat16, seq=128, kv_heads=2)
    inputs, grad, batch = whole_case(case)
    wanted = gradients(WideAttend(None), [x.double() for x in inputs], grad, batch)
    alone = gradients(Attend(None), inputs, grad, batch)
    floor = [apart([squares(a, b)]) for a, b in zip(alone, wanted, strict=True)]
    for size in (2, 4, 8):
        for key, found in errors(pool.run(size, run_cases, size, [case])).items():
            worse = [error / alone for error, alone in zip(found, floor, strict=True)]
            assert max(worse) < 1.25, (size, key, worse)


# Whole models


def run_model(
    connect: Connect, size: int, context: str, config: ModelConfig, run: Run, recompute: str
) -> tuple[float, dict[str, Any], dict[Any, int]]:
    """Loss and gradients of a decoder whose samples the ranks share; what was sent."""
    world = connect(Mesh(cp=size))
    group = world.group("cp")
    model = Decoder(config, seed=7)
    initialise(model, InitSource(config, 3))
    for name, block in list(model.layers.items()):
        assert isinstance(block, Block)
        attend = context_attend(context, block.attn.attend, group, world.wire)
        block.attn.attend = RecomputedAttend(attend.window, attend) if recompute == "selective" else attend
        if recompute == "full":
            model.layers[name] = RecomputedBlock(block)
    whole = global_batch(config, 0, run)
    total = torch.zeros(())
    # Two microbatches, as a pipeline runs them: both forwards, then both backwards.
    losses = []
    for begin in (0, 4):
        part = take(rows(whole, slice(begin, begin + 4)), size, group.index, context, multiple=2)
        losses.append(model.loss(model(None, part), part.targets_BT.flatten()) / count(whole))
    for loss in losses:
        loss.backward()
        total += loss.detach()
    world.wire.flush()
    sent = dict(world.book.ledger.bytes)
    grads = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        grads[name] = group.all_reduce(parameter.grad.clone()).wait().numpy()
    return float(group.all_reduce(total.clone()).wait()), grads, sent


WINDOWED = dataclasses.replace(LLAMA, sliding_window=5, window_from=2, qk_norm=True)
GPT2_FULL = dataclasses.replace(GPT2, max_positions=17)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(
    ("config", "run", "recompute"),
    [
        (LLAMA, Run(), "none"),
        (LLAMA, Run(seq=17, documents=True), "full"),
        (WINDOWED, Run(seq=13), "selective"),
        (WINDOWED, Run(documents=True, empty=1), "none"),
        (GPT2_FULL, Run(seq=17), "full"),
        (GPT2, Run(documents=True), "none"),
    ],
    ids=[
        "llama",
        "packed-uneven-full",
        "window-uneven-selective",
        "window-packed",
        "gpt2-all-positions",
        "gpt2-packed",
    ],
)
def test_loss_and_every_gradient_equal_one_process(
    pool: Pool, context: str, config: ModelConfig, run: Run, recompute: str
) -> None:
    """With dropout and learned positions (gpt2), every position the model has in use, microbatches in flight."""
    wanted = one_process(config, run)
    for size in (2, 4):
        results = pool.run(size, run_model, size, context, config, run, recompute)
        for loss, grads, _ in results:
            assert loss == pytest.approx(wanted["losses"][0], rel=1e-5)
            worst = max((relative(torch.from_numpy(grads[name]), grad), name) for name, grad in wanted["grads"].items())
            assert worst[0] < 1e-5, (size, worst)


def test_what_is_sent(pool: Pool) -> None:
    """A ring sends keys and values c-1 times forward; backward once more, and fp32 gradients as often."""
    size, parts = 4, 2 * 4 * 16 // 4 * 8 * 2
    """2 microbatches of 4 samples of 16 tokens, 2 key heads of 8, over 4 ranks; elements of keys."""
    message = 2 * parts * 4 * LLAMA.num_layers
    for _, _, sent in pool.run(size, run_model, size, "ring", LLAMA, Run(), "none"):
        assert sent == {("cp", "send", ""): 3 * (size - 1) * message}
    for _, _, sent in pool.run(size, run_model, size, "gather", LLAMA, Run(), "none"):
        assert sent[("cp", "all_gather", "")] == 2 * (size - 1) * message
        assert sent[("cp", "reduce_scatter", "")] == (size - 1) * message


# Failures


def run_late(connect: Connect, transport: str) -> str:
    world = connect(Mesh(cp=2), timeout=1.0, transport=transport)
    group = world.group("cp")
    inputs, _, batch = whole_case(Case())
    if group.index == 1:
        group.barrier()  # a rank that does something else: its neighbour waits in vain
        return ""
    world.book.doing = "F of stage 0, microbatch 3"
    part = take(batch, 2, 0, "ring")
    index = part.indices_T()
    RingAttend(None, group, world.wire)(*(x[:, :, index] for x in inputs), part)
    return ""


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_a_time_out_names_its_cause(pool: Pool, transport: str) -> None:
    found = pool.run(2, run_late, transport, expect_failure=True)
    assert "RankError" in found[0]
    for words in ("the keys and values of context rank 1", "F of stage 0, microbatch 3", "rank 1"):
        assert words in found[0]


def run_refused(connect: Connect) -> None:
    world = connect(Mesh(cp=2))
    case = Case(heads=3, kv_heads=3)
    inputs, _, batch = whole_case(case)
    part = take(batch, 2, world.at["cp"], "ulysses")
    attend = context_attend("ulysses", Attend(None), world.group("cp"), world.wire)
    with pytest.raises(PlanError, match=r"context=ulysses with cp=2: 3 attention heads .* what works: cp of \[1, 3\]"):
        attend(*(x[:, :, part.indices_T()] for x in inputs), part)


def test_ulysses_refuses_heads_that_do_not_divide(pool: Pool) -> None:
    pool.run(2, run_refused)
