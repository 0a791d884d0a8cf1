"""`ParallelMoE` on 1, 2 and 4 ranks against `models.moe.MoE` in one process: outputs and the gradient of everything."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plait.comm.group import Group
from plait.comm.world import World
from plait.core.mesh import Mesh
from plait.core.shard import split
from plait.models.batch import Batch
from plait.models.moe import MoE
from plait.models.parts import MoEConfig
from plait.parallel.dispatch import exchange_slots
from plait.parallel.expert import ParallelMoE
from plait.parallel.grads import Deferred, Slot
from plait.parallel.placement import Placement, identity
from plait.parallel.sequence import WholeSamples
from tests.pool import Connect, Pool

EXPERTS, HIDDEN, FFN, SAMPLES, SEQ = 8, 16, 8, 4, 6
MOVED = (3, 6, 0, 5, 7, 1, 2, 4)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One cut and one mixture."""

    dp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    sequence: bool = False
    config: MoEConfig = dataclasses.field(
        default_factory=lambda: MoEConfig(num_experts=EXPERTS, top_k=2, ffn_size=FFN, shared_ffn=12)
    )
    order: tuple[int, ...] | None = None
    shadows: tuple[int, ...] = ()
    favourite: int | None = None
    """The one expert that every row would take first."""
    padding: bool = False
    recompute: bool = False
    microbatches: int = 1
    seq: int = SEQ
    transport: str = "auto"

    @property
    def mesh(self) -> Mesh:
        return Mesh(dp=self.dp, tp=self.tp, ep=self.ep, etp=self.etp)


def mixture(case: Case) -> MoE:
    moe = MoE(HIDDEN, case.config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in moe.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.3 if "router" in name else 0.2))
        if case.favourite is not None:
            moe.router.weight[case.favourite] = 3.0
    return moe


def rows(case: Case) -> tuple[Tensor, Tensor]:
    """Hidden rows and the gradient of the output, of the whole batch."""
    generator = torch.Generator().manual_seed(2)
    x, grad = (torch.randn(SAMPLES * case.seq, HIDDEN, generator=generator) for _ in range(2))
    return (x.abs() if case.favourite is not None else x), grad


def batch(case: Case, samples: slice) -> Batch:
    tokens = torch.zeros(SAMPLES, case.seq, dtype=torch.int64)
    real = torch.ones_like(tokens, dtype=torch.bool)
    real[0, -2:] = False
    real[2, -1:] = False
    total = int(real.sum()) if case.padding else tokens.numel()
    return Batch(
        tokens_BT=tokens[samples],
        targets_BT=tokens[samples],
        sample_B=torch.arange(SAMPLES)[samples],
        step=0,
        real_BT=real[samples] if case.padding else None,
        total=total,
        scale=2.0,
    )


@functools.cache
def reference(case: Case) -> dict[str, Tensor]:
    moe, (x, grad) = mixture(case), rows(case)
    x.requires_grad_()
    out = moe(x, batch(case, slice(None)))
    out.backward(grad)
    found = {name: parameter.grad for name, parameter in moe.named_parameters() if parameter.grad is not None}
    assert x.grad is not None
    return {"out": out.detach(), "x": x.grad, "stats": moe.router.stats, **found}


def local(name: str, whole: Tensor, placement: Placement, ep: Group, etp: Group) -> Tensor:
    """This rank's part of a stack of experts."""
    mine = whole[list(placement.owned(ep.index))]
    if name == "gate_up":
        return torch.cat([part.chunk(etp.size, 1)[etp.index] for part in mine.chunk(2, 1)], 1).contiguous()
    return mine.chunk(etp.size, 2)[etp.index].contiguous()


def build(case: Case, world: World, deferred: Deferred) -> ParallelMoE:
    moe = mixture(case)
    ep, etp = world.group("ep"), world.group("etp")
    cut = ParallelMoE(moe, tp=world.group("tp"), ep=ep, etp=etp, sequence=case.sequence)
    assert [name for name, _ in cut.named_parameters()] == [name for name, _ in moe.named_parameters()]
    placement = Placement(order=case.order or tuple(range(EXPERTS)), ranks=case.ep, shadows=case.shadows)
    cut.place(placement)
    samples = WholeSamples(world.group("tp"), world.group("cp"), torch.arange)
    cut.router.gather, cut.router.mine = samples.gather, samples.mine
    for name in ("gate_up", "down"):
        weight = local(name, getattr(moe.experts, name).detach(), placement, ep, etp)
        setattr(cut.experts, name, nn.Parameter(weight))
        # One contribution a microbatch and the shadows'.
        cut.experts.slots[name] = Slot(torch.full_like(weight, float("nan")), 2, lambda: None, deferred)
    return cut


@contextmanager
def _unrecorded(cut: ParallelMoE) -> Iterator[None]:
    cut.router.recording = False
    yield
    cut.router.recording = True


def run_case(connect: Connect, case: Case) -> dict[str, Any]:
    world = connect(case.mesh, transport=case.transport)
    tp, at, deferred = world.group("tp"), world.at, Deferred()
    cut = build(case, world, deferred)
    share = SAMPLES // case.dp // case.microbatches
    outs, grads, mine = [], [], []
    cut.prepare()
    for number in range(case.microbatches):
        begin = (at["dp"] * case.microbatches + number) * share
        some = batch(case, slice(begin, begin + share))
        here = slice(*split(share * case.seq, tp.size, tp.index))
        x, grad = (whole[begin * case.seq : (begin + share) * case.seq] for whole in rows(case))
        mine.append((begin * case.seq + here.start, begin * case.seq + here.stop))
        x = (x[here] if case.sequence else x).clone().requires_grad_()
        if number == case.microbatches - 1:
            for slot in cut.experts.slots.values():
                slot.arm()
        if case.recompute:
            # What `RecomputedBlock` does: routers do not count again.
            out = checkpoint(cut, x, some, use_reentrant=False, context_fn=lambda: (nullcontext(), _unrecorded(cut)))
        else:
            out = cut(x, some)
        out.backward(grad[here] if case.sequence else grad)
        assert x.grad is not None
        outs.append(out.detach() if case.sequence else out.detach()[here])
        grads.append(x.grad if case.sequence else x.grad[here])
    cut.settle()
    found: dict[str, Any] = {"out": outs, "x": grads, "stats": cut.router.stats, "rows": mine}
    # Rows of a mixture are unique for each rank, so the router's gradient is partial on every axis. The shared expert
    # here is a plain layer: without sequence parallel all ranks of tp have the whole of its gradient.
    assert cut.router.weight.grad is not None
    found["router.weight"] = cut.router.weight.grad
    for name, parameter in [] if cut.shared is None else cut.shared.named_parameters():
        assert parameter.grad is not None
        found[f"shared.{name}"] = parameter.grad / (1 if case.sequence else tp.size)
    for name, slot in cut.experts.slots.items():
        found[f"experts.{name}"] = slot.grad
    found["at"] = at
    found["received"] = world.book.ledger.bytes["ep", "exchange", ""]
    return _numpy(found)


def _numpy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().numpy().copy()
    if isinstance(value, dict):
        return {key: _numpy(one) for key, one in value.items()}
    return [_numpy(one) for one in value] if isinstance(value, list) else value


def assemble(case: Case, results: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Whole tensors from what the ranks have."""
    shape = (SAMPLES * case.seq, HIDDEN)
    whole = {"out": torch.full(shape, float("nan")), "x": torch.full(shape, float("nan"))}
    order = case.order or tuple(range(EXPERTS))
    gate_up, down = torch.zeros(EXPERTS, 2 * FFN, HIDDEN), torch.zeros(EXPERTS, HIDDEN, FFN)
    for result in results:
        for name in ("out", "x"):
            for (begin, end), part in zip(result["rows"], result[name], strict=True):
                whole[name][begin:end] = torch.from_numpy(part)
        for name, value in result.items():
            if name == "stats" or name.startswith(("router", "shared")):
                whole[name] = whole.get(name, torch.zeros(value.shape, dtype=torch.float64)) + torch.from_numpy(value)
        at, each, width = result["at"], EXPERTS // case.ep, FFN // case.etp
        for place in range(each):
            expert = order[at["ep"] * each + place]
            mine = torch.from_numpy(result["experts.gate_up"])[place]
            for section in range(2):
                start = section * FFN + at["etp"] * width
                gate_up[expert, start : start + width] += mine[section * width : (section + 1) * width]
            start = at["etp"] * width
            down[expert, :, start : start + width] += torch.from_numpy(result["experts.down"])[place]
    return {**whole, "experts.gate_up": gate_up, "experts.down": down}


def check(pool: Pool, case: Case) -> list[dict[str, Any]]:
    """Sums of 24 rows in fp32 in another order: a few units of 1e-7, relative to the largest element."""
    results = pool.run(case.mesh.world_size, run_case, case)
    found, wanted = assemble(case, results), reference(dataclasses.replace(case, dp=1, tp=1, ep=1, etp=1))
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        scale = float(value.abs().max())
        torch.testing.assert_close(found[name].to(value.dtype), value, rtol=0, atol=2e-6 * scale, msg=f"{name}, {case}")
    return results


CUTS = {
    "one rank": Case(),
    "ep=2": Case(dp=2, ep=2),
    "ep=4": Case(dp=4, ep=4),
    "ep=2 edp=2": Case(dp=4, ep=2),
    "tp=2": Case(tp=2),
    "tp=2 sp": Case(tp=2, sequence=True),
    "tp=2 ep=2": Case(tp=2, ep=2),
    "tp=2 sp ep=2": Case(tp=2, ep=2, sequence=True),
    "tp=2 etp=2": Case(tp=2, etp=2),
    "tp=2 sp etp=2": Case(tp=2, etp=2, sequence=True),
    "dp=2 tp=2 ep=2 etp=2": Case(dp=2, tp=2, ep=2, etp=2),
    "dp=2 tp=2 sp ep=2 etp=2": Case(dp=2, tp=2, ep=2, etp=2, sequence=True),
    "dp=2 tp=2 sp ep=4": Case(dp=2, tp=2, ep=4, sequence=True),
    "dp=2 tp=2 edp=2 ep=2": Case(dp=2, tp=2, ep=2),
    "uneven rows": Case(tp=4, ep=4, seq=5, microbatches=4),
}


@pytest.mark.parametrize("cut", CUTS)
def test_a_cut_mixture_equals_one_process(pool: Pool, cut: str) -> None:
    check(pool, CUTS[cut])


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_moved_and_shadowed_experts(pool: Pool, transport: str) -> None:
    for cut in (Case(dp=2, ep=2, microbatches=2), Case(dp=4, ep=2), CUTS["dp=2 tp=2 sp ep=2 etp=2"]):
        for order in (None, MOVED):
            for shadows in ((), (5,), (0, 2, 7)):
                check(pool, dataclasses.replace(cut, order=order, shadows=shadows, transport=transport))


def test_every_expert_shadowed_sends_no_rows(pool: Pool) -> None:
    results = check(pool, Case(dp=2, ep=2, shadows=tuple(range(EXPERTS))))
    assert [result["received"] for result in results] == [0, 0]
    assert all(result["received"] > 0 for result in check(pool, Case(dp=2, ep=2)))


@pytest.mark.parametrize("cut", ["ep=2", "ep=4", "dp=2 tp=2 sp ep=2 etp=2"])
def test_ranks_without_rows_run_and_have_zero_gradients(pool: Pool, cut: str) -> None:
    """Case P14: every row takes experts 1 and one other of the first rank's."""
    only = MoEConfig(num_experts=EXPERTS, top_k=1, ffn_size=FFN)
    results = check(pool, dataclasses.replace(CUTS[cut], config=only, favourite=1))
    idle = [result for result in results if result["at"]["ep"] > 0]
    assert idle
    for result in idle:
        assert not result["experts.gate_up"].any()
        assert not result["experts.down"].any()


FULL = MoEConfig(
    num_experts=EXPERTS, top_k=3, ffn_size=FFN, shared_ffn=12, score="sigmoid", scale=2.5, groups=4, top_groups=2,
    capacity_factor=0.75, drop="score", aux_loss=0.1, z_loss=0.01,
)  # fmt: skip
LOSSES = MoEConfig(num_experts=EXPERTS, top_k=2, ffn_size=FFN, normalise=False, aux_loss=0.1, z_loss=0.01)
BY_POSITION = dataclasses.replace(FULL, drop="position", score="softmax", groups=1, top_groups=1, capacity_factor=1.0)


@pytest.mark.parametrize("config", [FULL, LOSSES, BY_POSITION])
@pytest.mark.parametrize("cut", ["ep=2", "tp=2 sp ep=2", "tp=2 etp=2", "dp=2 tp=2 ep=2 etp=2"])
def test_capacity_losses_and_padding_are_those_of_one_process(pool: Pool, cut: str, config: MoEConfig) -> None:
    """Cases P15, P16: the router's gradient, with its losses, on rows that padding is among."""
    for padding in (False, True):
        check(pool, dataclasses.replace(CUTS[cut], config=config, padding=padding))


@pytest.mark.parametrize("cut", ["ep=2", "tp=2 ep=2", "dp=2 tp=2 sp ep=2 etp=2"])
def test_recomputed(pool: Pool, cut: str) -> None:
    check(pool, dataclasses.replace(CUTS[cut], recompute=True))


def run_deferred(connect: Connect) -> tuple[bool, bool]:
    case = Case(dp=2, ep=2)
    world = connect(case.mesh)
    deferred = Deferred()
    cut = build(case, world, deferred)
    x, grad = rows(case)
    half = slice(world.at["dp"] * 12, world.at["dp"] * 12 + 12)
    deferred.on = True
    cut(x[half].clone().requires_grad_(), batch(case, slice(0, 2))).backward(grad[half])
    deferred.on = False
    before = all(bool(slot.grad.isnan().all()) for slot in cut.experts.slots.values())
    for work in deferred.take():
        work()
    return before, not any(bool(slot.grad.isnan().any()) for slot in cut.experts.slots.values())


def test_weight_gradients_wait_in_a_split_backward(pool: Pool) -> None:
    assert pool.run(2, run_deferred) == [(True, True)] * 2


def run_settle_unbuffered(connect: Connect) -> list[float]:
    """Slots that get a buffer when something comes, as ZeRO 2 has them."""
    case = Case(dp=2, ep=2)
    cut = build(case, connect(case.mesh), Deferred())
    for name, weight in (("gate_up", cut.experts.gate_up), ("down", cut.experts.down)):

        def coming(name: str = name, weight: Tensor = weight) -> None:
            cut.experts.slots[name].put(torch.full_like(weight, 3.0))

        cut.experts.slots[name] = Slot(None, 1, lambda: None, Deferred(), coming)
    cut.settle()
    return [float(slot.grad.abs().sum()) for slot in cut.experts.slots.values()]


def test_settling_without_shadows_is_a_contribution_of_nothing(pool: Pool) -> None:
    assert pool.run(2, run_settle_unbuffered) == [[0.0, 0.0]] * 2


def run_moving(connect: Connect, size: int) -> bool:
    group = connect(Mesh(dp=size, ep=size)).group("ep")
    whole = torch.arange(EXPERTS * 6.0).view(EXPERTS, 2, 3)
    before, after = identity(EXPERTS, size), Placement(order=MOVED, ranks=size)
    mine = whole[list(before.owned(group.index))]
    there = exchange_slots(group, mine, before, after)
    assert torch.equal(there, whole[list(after.owned(group.index))])
    return torch.equal(exchange_slots(group, there, after, before), mine)


@pytest.mark.parametrize("size", [2, 4])
def test_experts_move_there_and_back(pool: Pool, size: int) -> None:
    assert all(pool.run(size, run_moving, size))


def run_evaluation(connect: Connect, case: Case) -> Any:
    """Forward alone, then with other weights after `prepare`: shadows must follow."""
    world = connect(case.mesh)
    cut = build(case, world, Deferred()).eval()
    x, _ = rows(case)
    share = SAMPLES // case.dp * SEQ
    mine = x[world.at["dp"] * share : (world.at["dp"] + 1) * share]
    outs = []
    with torch.no_grad():
        for _ in range(2):
            cut.prepare()
            outs.append(cut(mine, batch(case, slice(0, SAMPLES // case.dp))).numpy().copy())
            cut.experts.down.mul_(2.0)
    return outs


def test_shadows_follow_their_owners_weights_in_evaluation(pool: Pool) -> None:
    config = MoEConfig(num_experts=EXPERTS, top_k=2, ffn_size=FFN)
    case = Case(dp=2, ep=2, shadows=(1, 6), order=MOVED, config=config)
    wanted = reference(Case(config=config))["out"]
    for number in range(2):
        whole = torch.cat([torch.from_numpy(outs[number]) for outs in pool.run(2, run_evaluation, case)])
        torch.testing.assert_close(whole, wanted * 2.0**number, rtol=1e-5, atol=1e-6)
