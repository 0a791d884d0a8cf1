"""The search against every legal plan of small requests."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator

import pytest

from plait.core.errors import PlanError
from plait.core.legal import check, divisors
from plait.core.mesh import ORDERS
from plait.core.plan import Plan
from plait.models.config import ModelConfig, MoEConfig
from plait.parallel.layout import model_shape
from plait.planner.cost import predict
from plait.planner.losers import order, simplicity
from plait.planner.memory import memory
from plait.planner.search import search
from plait.planner.space import MODES, SCHEDULES, ZEROS, Request
from plait.planner.why import Candidate
from tests.planner.searches import DENSE, EXPERTS, NARROW, nodes_of, request


def everything(asked: Request) -> Iterator[Plan]:
    """Every plan of the axes' values that the rule table accepts; nothing of the search's own ways."""
    world, layers = asked.world_size, asked.model.num_layers
    experts = asked.shape.num_experts
    for tp, pp, cp in itertools.product(divisors(world), repeat=3):
        if world % (tp * pp * cp):
            continue
        dp = world // (tp * pp * cp)
        virtuals = {
            "interleaved": [v for v in range(2, layers + 1)],
            "zb-v": [2],
            "dualpipe-v": [2],
        }
        for schedule in SCHEDULES if pp > 1 else ("1f1b",):
            for virtual, micro, sp, context, ep, zero, mode in itertools.product(
                virtuals.get(schedule, [1]),
                divisors(asked.global_batch),
                (True, False) if tp > 1 else (None,),
                ("ring", "ulysses", "gather") if cp > 1 else ("ring",),
                divisors(experts) if experts else (1,),
                ZEROS if dp * cp > 1 else (0,),
                MODES,
            ):
                for etp in divisors(tp) if experts else (tp if ep == 1 else 1,):
                    keys = {"tp": tp, "pp": pp, "cp": cp, "dp": dp, "schedule": schedule, "virtual": virtual}
                    keys |= {"micro": micro, "sequence_parallel": sp if sp is False else None, "context": context}
                    keys |= {"ep": ep, "zero": zero, "recompute": mode, "precision": "bf16"}
                    keys["expert_tp"] = None if etp == (tp if ep == 1 else 1) else etp
                    plan = Plan(**keys)  # type: ignore[arg-type]
                    try:
                        check(
                            plan,
                            model_shape(asked.model),
                            world_size=world,
                            global_batch=asked.global_batch,
                            seq=asked.seq,
                        )
                    except PlanError:
                        continue
                    # State of four data ranks may be shared by two of them: what lies on a node in these tests.
                    groups = (None, 2) if zero and dp * cp == 4 else (None,)
                    for laid, group in itertools.product(ORDERS, groups):
                        yield dataclasses.replace(plan, order=laid, zero_group=group)


@pytest.mark.parametrize(
    ("model", "gpus", "share", "domain", "seq"),
    [(DENSE, 4, 0.25, 4, 4096), (NARROW, 4, 0.9, 2, 8192), (EXPERTS, 2, 0.6, 2, 4096)],
    ids=("dense", "nodes", "experts"),
)
def test_nothing_legal_is_faster(model: ModelConfig, gpus: int, share: float, domain: int, seq: int) -> None:
    """Among uniform plans the best are those of brute force; stage cuts and layer-wise recomputation only add."""
    asked = request(model, gpus, topology=nodes_of(domain, gpus, 0.1), max_memory=share, seq=seq)
    forms: dict[Plan, Candidate] = {}
    for plan in everything(asked):
        report = memory(asked.job(plan))
        if report.fullest.peak > asked.memory:
            continue
        one = Candidate(plan=plan, prediction=predict(asked.job(plan)), memory=report)
        # Of each plan the best way to lie on the nodes, and of equals the usual one.
        usual = forms.setdefault(dataclasses.replace(plan, order=ORDERS[0], zero_group=None), one)
        if one.prediction.step_time < usual.prediction.step_time:
            forms[dataclasses.replace(plan, order=ORDERS[0], zero_group=None)] = one
    fitting = sorted(forms.values(), key=order)
    for name in ("order", "zero_group"):
        assert any(getattr(one.plan, name) != getattr(Plan(), name) for one in fitting) == (domain < gpus)
    found = search(
        model, asked.topology, world_size=gpus, seq=seq, global_batch=4, max_memory=share, top=40, losers=False
    )
    plain = [one for one in found.ranked if one.plan.stages is None and ":" not in one.plan.recompute]
    wanted = [one.plan for one in fitting[: len(plain)]]
    assert len(plain) >= min(5, len(fitting))
    assert [one.plan for one in plain] == wanted
    assert found.ranked[0].prediction.step_time <= fitting[0].prediction.step_time
    assert all(one.memory.fullest.peak <= asked.memory for one in found.ranked)


@pytest.mark.parametrize("seed", range(5))
def test_nothing_legal_is_faster_in_random_requests(seed: int) -> None:
    """Small models of all kinds on nodes of all sizes, with room for some of their plans."""
    draw = random.Random(seed)
    experts = MoEConfig(num_experts=draw.choice((2, 4)), top_k=1, ffn_size=512, dense_layers=draw.choice(((), (0,))))
    model = dataclasses.replace(
        DENSE,
        family=("llama", "mixtral")[seed % 2],
        moe=(None, experts)[seed % 2],
        vocab_size=draw.choice((1000, 8000)),
        hidden_size=draw.choice((512, 1024)),
        num_layers=draw.choice((2, 3)),
        num_heads=8,
        num_kv_heads=draw.choice((2, 4)),
        ffn_size=2048,
        tied=draw.random() < 0.3,
    )
    gpus = (4, 2)[seed % 2]
    domain = draw.choice((2, gpus))
    asked = request(
        model,
        gpus,
        topology=nodes_of(domain, gpus, draw.choice((0.05, 0.3, 1.0))),
        seq=draw.choice((1024, 4096, 8192)),
        global_batch=draw.choice((2, 3)),
    )
    plans = [
        plan
        for plan in everything(asked)
        if domain < gpus or (plan.order == ORDERS[0] and plan.zero_group is None)  # nothing to lie on
    ]
    peaks = [memory(asked.job(plan)).fullest.peak for plan in plans]
    limit = min(peaks) + (max(peaks) - min(peaks)) * draw.uniform(0.02, 0.7)
    asked = dataclasses.replace(asked, max_memory=limit / asked.topology.device.memory)
    forms: dict[Plan, tuple[float, Plan]] = {}
    for plan, peak in zip(plans, peaks, strict=True):
        if peak <= asked.memory:
            one = (predict(asked.job(plan)).step_time, plan)
            form = dataclasses.replace(plan, order=ORDERS[0], zero_group=None)
            forms[form] = min(forms.get(form, one), one, key=lambda pair: pair[0])
    fitting = sorted(forms.values(), key=lambda pair: (pair[0], *simplicity(pair[1])))
    found = search(
        model,
        asked.topology,
        world_size=gpus,
        seq=asked.seq,
        global_batch=asked.global_batch,
        max_memory=asked.max_memory,
        losers=False,
    )
    plain = [one.plan for one in found.ranked if one.plan.stages is None and ":" not in one.plan.recompute]
    assert plain or any(":" in one.plan.recompute for one in found.ranked)
    assert plain == [plan for _, plan in fitting[: len(plain)]]
