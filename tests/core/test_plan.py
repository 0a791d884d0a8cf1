"""Plans: text forms, the mesh they ask for, the rules that refuse them, and the cut of layers to stages."""

from __future__ import annotations

import dataclasses
import itertools
import re
import tomllib

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from plait.core.errors import ConfigError, PlanError
from plait.core.facts import ModelShape
from plait.core.legal import RULES, check
from plait.core.mesh import Mesh
from plait.core.plan import Plan, cut_stages, nearest

SHAPE = ModelShape(
    num_layers=8, num_heads=12, num_kv_heads=4, vocab_size=1003, ffn_size=48, hidden_size=96, max_positions=0
)
EXPERTS = dataclasses.replace(SHAPE, num_experts=8, expert_ffn=32)

sizes = st.integers(1, 64)
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
plans = st.builds(
    Plan,
    tp=sizes,
    pp=sizes,
    dp=st.none() | sizes,
    micro=sizes,
    schedule=st.sampled_from(["gpipe", "1f1b", "interleaved", 'my dir/it\'s "odd".txt']) | texts,
    virtual=sizes,
    stages=st.none() | st.lists(st.integers(0, 9)).map(tuple),
    zero=st.integers(0, 3),
    precision=st.sampled_from(["fp32", "bf16"]) | texts,
    recompute=st.sampled_from(["none", "full", "full:0-3 selective:4-7"]),
    sequence_parallel=st.none() | st.booleans(),
    bucket_mb=st.floats(allow_nan=False, allow_infinity=False),
)


def broken(text: str, *, shape: ModelShape = SHAPE, world: int = 1, batch: int = 8, seq: int = 64) -> str:
    """The message of the PlanError that ``check`` must raise."""
    with pytest.raises(PlanError) as caught:
        check(Plan.parse(text), shape, world_size=world, global_batch=batch, seq=seq)
    return str(caught.value)


def with_sizes(**sizes: int) -> ModelShape:
    return dataclasses.replace(SHAPE, **sizes)


# Text forms


@settings(deadline=None)
@given(plans)
@example(Plan(stages=(), schedule="-"))
def test_text_and_toml_read_back_equal(plan: Plan) -> None:
    assert Plan.parse(str(plan)) == plan
    assert Plan.from_mapping(tomllib.loads(plan.to_toml())) == plan


def test_text_holds_only_what_differs_from_the_default() -> None:
    assert str(Plan()) == ""
    assert str(Plan(tp=2, pp=2, micro=1, stages=(1, 3), sequence_parallel=False)) == (
        "tp=2 pp=2 stages=1,3 sequence_parallel=false"
    )


def test_parse_reads_every_type() -> None:
    plan = Plan.parse("dp=3 stages=8,7,7,8 bucket_mb=1 sequence_parallel=true recompute='full:0-3 selective:4'")
    assert plan.dp == 3
    assert plan.stages == (8, 7, 7, 8)
    assert plan.bucket_mb == 1.0
    assert isinstance(plan.bucket_mb, float)
    assert plan.sequence_parallel is True
    assert [plan.recompute_of(layer) for layer in (0, 3, 4, 5)] == ["full", "full", "selective", "none"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("schedul=1f1b", "unknown key 'schedul' in a plan; nearest: schedule"),
        ("tp=two", "plan key tp = 'two': expected int, found str"),
        ("tp=2.0", "plan key tp = 2.0: expected int"),
        ("tp=true", "plan key tp = True: expected int"),
        ("sequence_parallel=1", "expected bool"),
        ("stages=1,x", "expected list of int"),
        ("bucket_mb=inf", "expected float"),
        ("tp", "'tp' is not of the form key=value"),
        ("tp=1 tp=2", "tp is given twice"),
        ("schedule='1f1b", "No closing quotation"),
        ("tp='2\npp=3'", "expected int"),
    ],
)
def test_bad_text_is_named(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        Plan.parse(text)


# Properties


def test_sequence_parallel_follows_tp_unless_told() -> None:
    assert not Plan().sp
    assert not Plan(sequence_parallel=True).sp
    assert Plan(tp=2).sp
    assert not Plan(tp=2, sequence_parallel=False).sp


def test_recompute_of_a_bare_mode_holds_for_every_layer() -> None:
    assert {Plan(recompute="full").recompute_of(layer) for layer in (0, 99)} == {"full"}


def test_mesh_fills_dp() -> None:
    plan = Plan(tp=2, pp=2)
    assert plan.mesh(8) == Mesh(pp=2, dp=2, cp=1, tp=2, etp=2)
    assert Plan(tp=2, ep=2).mesh(4) == Mesh(dp=2, tp=2, ep=2, etp=1)
    assert Plan(tp=2, ep=2, expert_tp=2).mesh(4) == Mesh(dp=2, tp=2, ep=2, etp=2)
    assert plan.resolve(8) == Plan(tp=2, pp=2, dp=2)
    assert plan.resolve(8).mesh(8) == plan.mesh(8)


@pytest.mark.parametrize(
    ("text", "world", "says"),
    [
        ("tp=2 pp=2", 6, ["world size 6 is not", "world size=4 or world size=8", "tp=1 or tp=3", "pp=1 or pp=3"]),
        ("tp=2 pp=2", 1, ["world size=4"]),
        ("tp=2 dp=3", 8, ["dp=3", "needs 6 ranks", "world size=6", "dp=4"]),
        ("tp=4 dp=1", 2, ["dp=1", "world size=4", "tp=2"]),
        ("tp=0", 4, ["tp=0 is below 1"]),
        ("dp=-1", 4, ["dp=-1 is below 1"]),
        ("tp=2", 0, ["world size=2"]),
    ],
)
def test_mesh_refuses_a_world_that_does_not_fit(text: str, world: int, says: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.parse(text).mesh(world)
    for part in says:
        assert part in str(caught.value)


# Rules


@pytest.mark.parametrize(
    ("text", "shape", "options"),
    [
        ("", SHAPE, {}),
        ("tp=2 pp=2 micro=2", SHAPE, {"world": 8}),
        ("tp=12", with_sizes(num_kv_heads=12), {"world": 12, "seq": 12}),
        ("tp=4", with_sizes(num_kv_heads=2), {"world": 4}),  # P7: fewer KV heads than tp
        ("tp=2", with_sizes(vocab_size=50257), {"world": 2}),  # P6: cut unevenly
        ("tp=2 sequence_parallel=false", SHAPE, {"world": 2, "seq": 63, "batch": 1}),  # P25
        ("pp=4 stages=0,4,4,0", SHAPE, {"world": 4}),  # P10: embedding and head alone
        ("pp=4", with_sizes(num_layers=30), {"world": 4}),  # P8
        ("pp=16", with_sizes(num_layers=42), {"world": 16}),
        ("pp=16 virtual=2 schedule=interleaved", with_sizes(num_layers=80), {"world": 16}),
        ("pp=2 virtual=4 schedule=dir/zb.txt", SHAPE, {"world": 2}),
        ("pp=2 schedule=interleaved", SHAPE, {"world": 2}),
        ("pp=8", SHAPE, {"world": 8, "batch": 2}),  # P9: fewer microbatches than stages
        ("cp=2 tp=2", SHAPE, {"world": 4, "seq": 63, "batch": 1}),  # P25: a share is padded
        ("cp=4 context=ulysses", SHAPE, {"world": 4}),
        ("cp=8 context=gather", SHAPE, {"world": 8}),
        ("ep=4 tp=2 expert_tp=2", EXPERTS, {"world": 8}),
        ("ep=2 zero=3 gather=step zero_group=2", EXPERTS, {"world": 4}),
        ("zero=2 node=2", SHAPE, {"world": 4}),
        ("compress=powersgd:4", SHAPE, {"world": 4}),
        ("pp=2 schedule=zb-v virtual=2", SHAPE, {"world": 2}),
        ("pp=2 schedule=auto virtual=2 live=4", SHAPE, {"world": 2}),
        ("pp=2 schedule=2bw zero=1", SHAPE, {"world": 2}),
        ("recompute='selective:4-7 full:0'", SHAPE, {}),
    ],
)
def test_plans_that_work(text: str, shape: ModelShape, options: dict[str, int]) -> None:
    given = {"world": 1, "batch": 8, "seq": 64, **options}
    check(Plan.parse(text), shape, world_size=given["world"], global_batch=given["batch"], seq=given["seq"])


@pytest.mark.parametrize(
    ("text", "shape", "options", "says"),
    [
        (
            "tp=5",
            with_sizes(num_kv_heads=1, ffn_size=60),
            {"world": 5, "seq": 65},
            ["tp=5: 12 attention heads", "tp=4 or tp=6"],
        ),
        ("tp=4", with_sizes(num_kv_heads=3), {"world": 4}, ["tp=4: 3 KV heads", "tp=3 or tp=6"]),  # P7
        ("tp=4", with_sizes(ffn_size=42), {"world": 4}, ["tp=4: the feed-forward size 42", "tp=2"]),
        ("tp=4", with_sizes(vocab_size=3), {"world": 4}, ["tp=4: a vocabulary of 3", "tp=2"]),
        (
            "tp=2",
            SHAPE,
            {"world": 2, "seq": 63},
            ["1 x 63", "seq=62 or seq=64", "micro=2", "sequence_parallel=false"],
        ),
        ("pp=16", SHAPE, {"world": 16}, ["pp=16", "16 virtual stages for 8 layers", "pp=8"]),
        ("pp=4 virtual=4 schedule=interleaved", SHAPE, {"world": 4}, ["pp=2", "virtual=2"]),
        ("pp=2 stages=4,3", SHAPE, {"world": 2}, ["stages=4,3 sums to 7", "8 layers", "stages=4,4"]),
        ("pp=2 stages=4,2,2", SHAPE, {"world": 2}, ["3 counts for 2 virtual stages"]),
        ("pp=3 stages=4,0,4", SHAPE, {"world": 3}, ["only the first and the last"]),
        ("pp=2 stages=9,-1", SHAPE, {"world": 2}, ["only the first and the last"]),
        ("micro=3", SHAPE, {}, ["micro=3", "micro=2 or micro=4", "global_batch=6 or global_batch=9"]),
        ("micro=2 dp=3", SHAPE, {"world": 3}, ["dp=3", "not a multiple of 6", "dp=2 or dp=4"]),
        ("micro=4", SHAPE, {"batch": 0}, ["global_batch=4"]),
        ("micro=0", SHAPE, {}, ["micro=0 is below 1", "micro=1"]),
        ("schedule=1f2b", SHAPE, {}, ["schedule=1f2b", "1f1b", ".schedule"]),
        ("virtual=2", SHAPE, {}, ["virtual=2", "schedule=interleaved"]),
        ("pp=2 schedule=zb-v", SHAPE, {"world": 2}, ["virtual=1", "virtual=2"]),
        ("pp=2 schedule=zb-h1 virtual=2", SHAPE, {"world": 2}, ["virtual=2", "virtual=1"]),
        ("pp=2 live=3", SHAPE, {"world": 2}, ["live=3", "schedule=auto"]),
        ("pp=2 schedule=auto virtual=2 live=1", SHAPE, {"world": 2}, ["live=1", "live=2"]),
        ("pp=2 schedule=2bw zero=2", SHAPE, {"world": 2}, ["2bw", "zero=1"]),
        ("pp=2 schedule=2bw precision=fp16", SHAPE, {"world": 2}, ["2bw", "precision=bf16"]),
        ("pp=2 schedule=2bw expert_tp=1", EXPERTS, {"world": 2}, ["2bw", "routers", "schedule=1f1b"]),
        ("pp=4 schedule=2bw", SHAPE, {"world": 4, "batch": 3}, ["3 microbatches", "global_batch=4"]),
        ("", with_sizes(max_positions=32), {}, ["seq=64", "32 learned positions", "seq=32"]),
        ("cp=2 context=disc", SHAPE, {"world": 2}, ["context=disc", "context=ring"]),
        ("cp=5 context=ulysses", SHAPE, {"world": 5}, ["12 attention heads", "cp=4 or cp=6", "context=ring"]),
        ("ep=2", SHAPE, {"world": 2}, ["ep=2", "no experts", "ep=1"]),
        ("ep=2", EXPERTS, {}, ["ep=2 with expert_tp=1", "dp x cp x tp is 1", "ep=1"]),
        ("ep=3", EXPERTS, {"world": 3, "batch": 9}, ["ep=3: 8 experts", "ep=2 or ep=4"]),
        ("ep=2 expert_tp=3", EXPERTS, {"world": 6, "batch": 6}, ["width 32", "expert_tp=2 or expert_tp=4"]),
        ("tp=2 sequence_parallel=false", EXPERTS, {"world": 2, "seq": 63}, ["for the experts", "seq=62"]),
        ("zero=1 zero_group=3", SHAPE, {"world": 4}, ["zero_group=3", "zero_group=2 or zero_group=4"]),
        ("zero_group=2", SHAPE, {"world": 4}, ["zero=0 shares nothing", "zero=1"]),
        ("node=3", SHAPE, {"world": 4}, ["node=3", "node=2 or node=4"]),
        ("order=tp-pp-dp-cp", SHAPE, {"world": 4}, ["order=tp-pp-dp-cp", "order=dp-pp-cp-tp"]),
        ("node=2 compress=half", SHAPE, {"world": 4}, ["one or the other", "compress=none"]),
        ("node=2 zero=1 zero_group=2", SHAPE, {"world": 4}, ["both say", "no node"]),
        ("gather=once", SHAPE, {}, ["gather=once", "gather=use"]),
        ("gather=step", SHAPE, {}, ["gather=step", "zero=3"]),
        ("compress=zip", SHAPE, {"world": 2}, ["compress=zip", "compress=half"]),
        ("compress=topk:0.1 zero=2", SHAPE, {"world": 2}, ["topk", "zero=1"]),
        ("compress=topk:0.1 precision=fp16", SHAPE, {"world": 2}, ["topk", "precision=bf16"]),
        ("compress=topk:0.1 zero=1 zero_group=2", SHAPE, {"world": 4}, ["topk", "no zero_group"]),
        ("zero=7", SHAPE, {}, ["no such ZeRO stage"]),
        ("precision=fp12", SHAPE, {}, ["precision=fp12", "precision=fp32 or precision=bf16"]),
        ("recompute=some", SHAPE, {}, ["recompute: 'some'", "selective"]),
        ("recompute=''", SHAPE, {}, ["recompute: ''"]),
        ("recompute=full:4-8", SHAPE, {}, ["4-8", "layers 0-7"]),
        ("recompute=full:3-2", SHAPE, {}, ["3-2"]),
        ("recompute='full:2-7 selective:0-2'", SHAPE, {}, ["layer 2 is named twice"]),
        ("bucket_mb=0", SHAPE, {}, ["bucket_mb=0", "above 0"]),
        ("tp=2", SHAPE, {"world": 3}, ["world size 3"]),
    ],
)
def test_plans_that_cannot_work(text: str, shape: ModelShape, options: dict[str, int], says: list[str]) -> None:
    message = broken(text, shape=shape, **options)
    lines = [line for line in message.splitlines() if "these pass every rule" not in line]
    assert len(lines) == 2, "one rule is broken, and only that one is reported"
    for part in says:
        assert part in message


def test_every_broken_rule_is_listed() -> None:
    message = broken("tp=5 cp=2 zero=4 precision=fp12 micro=3", world=10)
    for part in ("tp=5", "zero=4", "precision=fp12", "micro=3"):
        assert f"\n  {part}" in message


def test_sizes_below_one_are_all_listed_before_anything_divides_by_them() -> None:
    lines = broken("tp=0 pp=-1 micro=0").splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["tp=0", "pp=-1", "micro=0"]


def test_every_rule_of_the_table_concerns_a_key_and_says_something() -> None:
    names = {field.name for field in dataclasses.fields(Plan)} | {"seq"}
    assert all(rule.axis in names and rule.says for rule in RULES)
    assert len({rule.says for rule in RULES}) == len(RULES)


@settings(deadline=None)
@given(
    tp=st.integers(1, 64),
    heads=st.integers(1, 32),
    kv=st.integers(1, 8),
    ffn=st.integers(1, 64),
    vocab=st.integers(1, 20),
)
def test_what_a_tp_message_suggests_works(tp: int, heads: int, kv: int, ffn: int, vocab: int) -> None:
    shape = with_sizes(num_heads=heads * kv, num_kv_heads=kv, ffn_size=ffn, vocab_size=vocab)

    def message(size: int) -> str:
        try:
            plan = Plan(tp=size, sequence_parallel=False)
            check(plan, shape, world_size=size, global_batch=1, seq=1)
        except PlanError as error:
            return str(error)
        return ""

    for suggested in re.findall(r"what works:.*?tp=(\d+)|or tp=(\d+)", message(tp)):
        assert message(int("".join(suggested))) == ""


@settings(deadline=None)
@given(st.integers(-3, 20), st.sets(st.integers(1, 12)))
def test_nearest_is_the_closest_on_each_side(value: int, working: set[int]) -> None:
    below = [n for n in working if n < value]
    above = [n for n in working if n > value]
    assert nearest(value, working.__contains__, high=12) == (
        *([max(below)] if below else []),
        *([min(above)] if above else []),
    )


# The cut


def stage_costs(costs: list[int], cut: tuple[int, ...], first: int, last: int) -> list[int]:
    edges = [0, *itertools.accumulate(cut)]
    sums = [sum(costs[start:stop]) for start, stop in itertools.pairwise(edges)]
    sums[0] += first
    sums[-1] += last
    return sums


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=8).flatmap(
        lambda costs: st.tuples(st.just(costs), st.integers(1, len(costs)), st.integers(0, 9), st.integers(0, 9))
    )
)
def test_cut_is_complete_and_optimal(case: tuple[list[int], int, int, int]) -> None:
    costs, stages, first, last = case
    cut = cut_stages(costs, stages, first, last)
    assert len(cut) == stages
    assert min(cut) >= 1
    assert sum(cut) == len(costs)
    inner = itertools.combinations(range(1, len(costs)), stages - 1)
    every = [tuple(b - a for a, b in itertools.pairwise((0, *edges, len(costs)))) for edges in inner]

    def rank(counts: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        found = stage_costs(costs, counts, first, last)
        return max(found), sum(cost * cost for cost in found), counts

    assert cut == min(every, key=rank)


@pytest.mark.parametrize(("layers", "stages"), [(30, 4), (42, 16), (80, 32), (80, 16)])
def test_no_layer_is_lost(layers: int, stages: int) -> None:  # P8
    for costs in ([1.0] * layers, [0.1] * layers):
        cut = cut_stages(costs, stages)
        assert (len(cut), sum(cut)) == (stages, layers)
        assert max(cut) - min(cut) <= 1, "equal layers are spread evenly, whatever their cost rounds to"


def test_the_slowest_stage_counts_before_balance() -> None:
    assert cut_stages([4, 3, 7, 1], 3) == (2, 1, 1), "4, 3, 8 has the smaller sum of squares, but a slower stage"


def test_heavy_ends_get_fewer_layers() -> None:
    assert cut_stages([1.0] * 30, 4, 1.0, 1.0) == (7, 8, 8, 7)
    assert cut_stages([1.0] * 8, 2, 0.0, 2.0) == (5, 3)


@pytest.mark.parametrize("stages", [0, 5])
def test_cut_refuses_what_cannot_be_filled(stages: int) -> None:
    with pytest.raises(PlanError, match=f"4 layers cannot fill {stages} stages; what works: 1 to 4"):
        cut_stages([1.0] * 4, stages)


@pytest.mark.parametrize(
    ("text", "world_size", "global_batch"),
    [("tp=2 pp=2 micro=4", 6, 16), ("tp=3 pp=1", 3, 16), ("tp=2 pp=2 dp=4 micro=3", 8, 16), ("pp=8", 8, 16)],
)
def test_the_plans_named_last_pass_every_rule(text: str, world_size: int, global_batch: int) -> None:
    shape = ModelShape(
        num_layers=4, num_heads=4, num_kv_heads=2, vocab_size=256, ffn_size=352, hidden_size=128, max_positions=0
    )
    plan = Plan.parse(text)
    with pytest.raises(PlanError) as caught:
        check(plan, shape, world_size=world_size, global_batch=global_batch, seq=128)
    last = str(caught.value).splitlines()[-1]
    assert "pass every rule: " in last
    for other in last.partition("pass every rule: ")[2].split("; "):
        check(Plan.parse(other), shape, world_size=world_size, global_batch=global_batch, seq=128)


def test_no_plan_is_named_where_none_works() -> None:
    shape = ModelShape(
        num_layers=4, num_heads=4, num_kv_heads=4, vocab_size=256, ffn_size=352, hidden_size=128, max_positions=0
    )
    with pytest.raises(PlanError) as caught:
        check(Plan(tp=7, micro=1), shape, world_size=7, global_batch=16, seq=128)
    assert "pass every rule" not in str(caught.value)
