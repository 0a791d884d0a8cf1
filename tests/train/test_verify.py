"""``plait verify`` passes what is right under every kind of plan, and names what is wrong."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from plait.core.config import Config, load
from plait.parallel import apply, cut, rules
from plait.train import step as stepping
from plait.train import verify
from plait.train.compare import HEAD, Report, Step, compare
from plait.train.data import write_tokens
from plait.train.launch import Worker
from plait.train.verify_table import document, show
from tests.pool import Connect, Pool

SHAPES: dict[str, tuple[int, ...]] = {
    "embed.tokens.weight": (20, 8),
    **{f"layers.{layer}.{name}": (8, 8) for layer in range(4) for name in ("attn.qkv.weight", "mlp.down.weight")},
    **{f"layers.{layer}.norm1.weight": (8,) for layer in range(4)},
    "norm.weight": (8,),
    "head.weight": (20, 8),
}
SHAPES = dict(sorted(SHAPES.items(), key=lambda item: (item[0] != "embed.tokens.weight", item[0])))
PLACES = ["embed", "layers.0", "layers.1", "layers.2", "layers.3"]


# --- the comparison alone


@dataclasses.dataclass(kw_only=True)
class Side:
    """One step's values, to be spoilt."""

    loss: float
    hidden: dict[str, list[float]]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    updates: dict[str, Tensor]
    norm: float | None = None
    rounding: dict[str, float] = dataclasses.field(default_factory=dict)

    def step(self) -> Step:
        norm = math.sqrt(sum(float(value.double().square().sum()) for value in self.gradients.values()))
        return Step(
            loss=self.loss,
            norm=norm if self.norm is None else self.norm,
            hidden=self.hidden,
            gradient=self.gradients.__getitem__,
            weight=self.weights.__getitem__,
            update=self.updates.__getitem__,
            rounding=self.rounding,
        )


def side(step: int, noise: float = 0.0) -> Side:
    exact, rounding = torch.Generator().manual_seed(step), torch.Generator().manual_seed(100 + step)

    def draw(shape: tuple[int, ...]) -> Tensor:
        value = torch.randn(shape, generator=exact)
        return value * (1 + noise * torch.randn(shape, generator=rounding))

    gradients = {name: draw(shape) for name, shape in SHAPES.items()}
    hidden = {place: [float(draw(()).square()) + 100.0, *draw((4,)).tolist()] for place in PLACES}
    noise = min(noise, 1e-7)  # updates are fp32 in any precision
    weights = {name: torch.ones(shape) for name, shape in SHAPES.items()}
    updates = {name: draw(shape) * 1e-3 for name, shape in SHAPES.items()}
    return Side(loss=5.0 - step, hidden=hidden, gradients=gradients, weights=weights, updates=updates)


def result(spoil: Callable[[Side, int], None], *, precision: str = "fp32", noise: float = 1e-7) -> Report:
    cut = [side(step, noise) for step in range(3)]
    for number, one in enumerate(cut):
        spoil(one, number)
    reference = [side(step).step() for step in range(3)]
    return compare(reference, [one.step() for one in cut], SHAPES, precision=precision, layers=4)


def test_rounding_passes() -> None:
    report = result(lambda cut, step: None)
    assert report.passed
    assert report.divergence is None
    assert result(lambda cut, step: None, precision="bf16", noise=2**-8).passed
    assert not result(lambda cut, step: None, precision="fp32", noise=2**-8).passed


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_parameter_that_was_not_summed_is_named(precision: str) -> None:
    """A norm's gradient of one tp rank alone: everything else, and the loss of this step, is right (P27)."""

    def spoil(cut: Side, step: int) -> None:
        cut.gradients["layers.2.norm1.weight"] *= 0.5

    report = result(spoil, precision=precision)
    assert not report.passed
    step, what, worst = report.worst
    assert (step, what, worst.name) == (0, "gradient", "layers.2.norm1.weight")
    assert worst.error == pytest.approx(0.5, rel=1e-4)
    found = report.divergence
    assert found is not None
    assert (found.step, found.way, found.place, found.names) == (0, "backward", "layers.2", ("layers.2.norm1.weight",))


def test_gradients_that_are_a_factor_too_large_diverge_at_the_loss() -> None:
    """The loss never divided by the number of microbatches: losses agree, gradients are 4 times too large."""

    def spoil(cut: Side, step: int) -> None:
        for value in cut.gradients.values():
            value *= 4

    found = result(spoil).divergence
    assert found is not None
    assert (found.way, found.place, found.names) == ("backward", HEAD, ("head.weight", "norm.weight"))


def test_backward_that_goes_wrong_in_a_layer_spoils_those_before_it() -> None:
    def spoil(cut: Side, step: int) -> None:
        for name in SHAPES:
            if name.startswith(("embed", "layers.0", "layers.1")):
                cut.gradients[name] += 0.1

    found = result(spoil).divergence
    assert found is not None
    assert (found.way, found.place) == ("backward", "layers.1")


def test_forward_that_goes_wrong_in_a_layer_is_found_though_all_gradients_are_off() -> None:
    def spoil(cut: Side, step: int) -> None:
        cut.loss += 0.01
        for place in PLACES[3:]:
            cut.hidden[place] = [value + 0.3 for value in cut.hidden[place]]
        for value in cut.gradients.values():
            value += 0.1

    found = result(spoil).divergence
    assert found is not None
    assert (found.step, found.way, found.place) == (0, "forward", "layers.2")


def test_a_wrong_loss_with_right_activations_is_the_head() -> None:
    def spoil(cut: Side, step: int) -> None:
        cut.loss *= 1.001

    found = result(spoil).divergence
    assert found is not None
    assert (found.way, found.place) == ("forward", HEAD)


def test_a_norm_that_counts_an_element_twice_is_found() -> None:
    def spoil(cut: Side, step: int) -> None:
        cut.norm = cast(float, cut.step().norm) * 1.0001

    report = result(spoil)
    assert not report.passed
    assert report.divergence is not None
    assert report.divergence.place == "the global gradient norm"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_never_passes(value: float) -> None:
    def spoil(cut: Side, step: int) -> None:
        cut.gradients["norm.weight"][3] = value

    report = result(spoil)
    assert not report.passed
    assert report.worst[2].name == "norm.weight"
    text = json.dumps(document(report, load(None).plan), allow_nan=False)
    assert '"error": null' in text


def test_every_step_counts() -> None:
    def spoil(cut: Side, step: int) -> None:
        if step == 2:
            cut.gradients["head.weight"] *= 1 + 1e-4

    report = result(spoil)
    assert not report.passed
    assert report.worst[0] == 2
    assert report.divergence is not None
    assert report.divergence.step == 2


def test_an_update_that_is_not_adamws_is_found_when_gradients_are_right() -> None:
    """Decay on norms: 1e-4 of the weight on top of an update of 1e-3."""

    def spoil(cut: Side, step: int) -> None:
        cut.updates["layers.1.norm1.weight"] -= 1e-4 * cut.weights["layers.1.norm1.weight"]

    report = result(spoil)
    assert report.worst[:2] == (0, "update")
    found = report.divergence
    assert found is not None
    assert (found.way, found.place, found.names) == ("update", "layers.1", ("layers.1.norm1.weight",))


def test_an_update_below_the_rounding_of_its_weight_is_not_compared() -> None:
    """A learning rate of 1e-7 on weights of 1: the new weight is the old one, or the next number."""

    def spoil(cut: Side, step: int) -> None:
        cut.updates["norm.weight"][0] += 6e-8

    assert result(spoil).passed


def test_a_gradient_that_is_zero_but_for_rounding_is_not_relative_to_itself() -> None:
    """A key bias under softmax: what is left of it is rounding, wholly different on the two sides."""
    cut, one = side(0, 1e-7), side(0)
    for each, seed in ((cut, 1), (one, 2)):
        noise = torch.randn(8, generator=torch.Generator().manual_seed(seed))
        each.gradients["layers.1.norm1.weight"] = 1e-9 * noise
    report = compare([one.step()], [cut.step()], SHAPES, precision="fp32", layers=4)
    assert report.passed
    # As soon as it is not negligible beside the others, it counts.
    cut.gradients["layers.1.norm1.weight"] *= 1e5
    assert not compare([one.step()], [cut.step()], SHAPES, precision="fp32", layers=4).passed


def test_where_one_rounding_changes_much_more_is_allowed() -> None:
    """And only there: a layer whose gradient rounding amplifies is no excuse for another."""
    one, cut = side(0), side(0, 1e-7)
    for name in ("layers.1.norm1.weight", "layers.2.norm1.weight"):
        cut.gradients[name] *= 1.0002
    one.rounding = {"layers.1.norm1.weight": 1e-4 * float(one.gradients["layers.1.norm1.weight"].norm())}
    report = compare([one.step()], [cut.step()], SHAPES, precision="fp32", layers=4)
    assert [check.name for check in report.steps[0].gradients if not check.passed] == ["layers.2.norm1.weight"]


def test_long_lists_are_shown_by_layer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from plait.train import verify_table

    monkeypatch.setattr(verify_table, "ROWS", 5)
    report = result(lambda cut, step: cut.gradients["layers.2.norm1.weight"].mul_(0.5) if step == 0 else None)  # type: ignore[arg-type,return-value]
    show(report, Console(width=110, highlight=False))
    text = capsys.readouterr().out
    assert "layers.2 (3, worst)" in text
    assert "5.0e-01 !" in text
    assert "worst parameter: layers.2.norm1.weight, its gradient at step 1" in text
    assert "backward diverges first at layers.2" in text


# --- whole runs


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text-like tokens with separators (id 0)."""
    path = tmp_path_factory.mktemp("verify") / "tokens.bin"
    ids = np.random.default_rng(0).zipf(1.5, 4000) % 67
    write_tokens(path, [ids], dtype="uint16", vocab_size=67, tokenizer=None)
    return path


def small(tokens: Path, *sets: str) -> Config:
    sizes = (
        "model.hidden_size=32", "model.num_layers=3", "model.num_heads=4", "model.num_kv_heads=2", "model.ffn_size=48",
        "model.vocab_size=67", "data.seq=16", "train.global_batch=8", f"data.tokens={tokens}", "plan.tp=1", "plan.pp=1",
        "plan.micro=2", "optimizer.warmup=0",
    )  # fmt: skip
    return load(None, [*sizes, *sets])


def rank_in_pool(connect: Connect, arguments: list[Any], size: int, fault: str) -> None:
    """`verify.run_rank` on a worker of the test session, with one of plait's own lines broken."""
    worker = SimpleNamespace(place=SimpleNamespace(world_size=size, local_rank=connect.rank), connect=connect)
    table, first_token, make_optimizer = rules.TABLE, cut._first_token, stepping.make_optimizer

    def decays_all(config: Config, parallel: apply.Parallel) -> torch.optim.AdamW | None:
        optimizer = make_optimizer(config, parallel)
        for group in optimizer.param_groups if optimizer is not None else []:
            group["weight_decay"] = config.optimizer.weight_decay
        return optimizer

    try:
        if fault == "norm is not summed":
            broken = rules.Rule(pattern="layers.1.norm2.weight", form=rules.Form.PLAIN)
            rules.TABLE = (broken, *table)  # type: ignore[misc]
        elif fault == "targets are off":
            cut._first_token = lambda config, world: first_token(config, world) + world.at["tp"]
        elif fault == "norms decay":
            stepping.make_optimizer = decays_all
        verify.run_rank(cast(Worker, worker), *arguments)
    finally:
        rules.TABLE = table  # type: ignore[misc]
        cut._first_token, stepping.make_optimizer = first_token, make_optimizer


@pytest.fixture
def by_pool(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Ranks come from the test session's workers; set ``["fault"]`` to break them."""
    chosen = {"fault": ""}

    def launch(function: str, *, processes: int, args: list[Any], **_: Any) -> None:
        assert function == "plait.train.verify:run_rank"
        pool.run(processes, rank_in_pool, args, processes, chosen["fault"])

    monkeypatch.setattr(verify, "launch", launch)
    yield chosen


EXPERTS = 'model.moe={"num_experts"=4, "top_k"=2, "ffn_size"=24}'
PLANS = {
    "tp-pp": ["plan.tp=2", "plan.pp=2"],
    "gpt2-tied-dropout-zero": ["model.preset=gpt2-tiny", "model.num_kv_heads=4", "model.dropout=0.1", "plan.pp=2",
                               "plan.dp=2", "plan.zero=1"],
    "documents-recompute": ["data.separator=0", "plan.tp=2", "plan.recompute=full:0-1 selective:2", "model.tied=true"],
    "interleaved-frozen": ["plan.pp=2", "plan.virtual=2", "plan.schedule=interleaved", "model.num_layers=4",
                           'train.freeze=["layers.0.*", "embed.*"]'],
    "no-sequence-parallel": ["plan.tp=2", "plan.sequence_parallel=false", "plan.dp=2", "optimizer.clip=0"],
    "bf16": ["plan.tp=2", "plan.pp=2", "plan.precision=bf16"],
    "fp16": ["plan.tp=2", "plan.dp=2", "plan.precision=fp16"],
    "uneven-context": ["data.seq=15", "plan.cp=2", "plan.tp=2", "plan.micro=4"],
    "zero-bubble-zero-3": ["plan.pp=2", "plan.dp=2", "plan.virtual=2", "plan.schedule=zb-v", "plan.zero=3",
                           "model.num_layers=4"],
    "two-versions": ["plan.pp=2", "plan.schedule=2bw"],
    "searched": ["plan.pp=2", "plan.schedule=auto"],
    "half-on-the-wire": ["plan.dp=2", "plan.compress=half"],
    "experts": ["model.preset=moe-tiny", EXPERTS, "plan.dp=2", "plan.tp=2", "plan.ep=2", "moe.aux_loss=0.01",
                "moe.bias_balance=true", "moe.capacity_factor=1.5"],
}  # fmt: skip


@pytest.mark.parametrize("name", list(PLANS))
def test_plans_are_equal_to_one_process(
    name: str, tokens: Path, by_pool: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify.run(small(tokens, *PLANS[name]), as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] is True
    assert found["diverges"] is None
    assert len(found["steps"]) == 3
    losses = [(row["loss"]["plan"], row["loss"]["one_process"]) for row in found["steps"]]
    assert losses[0] != losses[1]
    names = [row["name"] for row in found["parameters"]]
    assert "norm.weight" in names
    assert ("embed.tokens.weight" in names) is (name != "interleaved-frozen")
    assert all(len(row["gradient"]) == len(row["update"]) == 3 for row in found["parameters"])


def test_a_norm_that_is_not_summed_over_tp_fails_and_is_named(
    tokens: Path, by_pool: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    by_pool["fault"] = "norm is not summed"
    config = small(tokens, "plan.tp=2", "plan.pp=2")
    assert verify.run(config, steps=2, as_json=True) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["worst"]["name"] == "layers.1.norm2.weight"
    assert found["diverges"] == {
        "step": 0, "way": "backward", "place": "layers.1", "parameters": ["layers.1.norm2.weight"],
    }  # fmt: skip
    first = {row["name"]: row["gradient"][0]["passed"] for row in found["parameters"]}
    assert [name for name, passed in first.items() if not passed] == ["layers.1.norm2.weight"]


def test_a_loss_that_is_wrong_fails_at_the_head(
    tokens: Path, by_pool: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    by_pool["fault"] = "targets are off"
    assert verify.run(small(tokens, "plan.tp=2"), steps=1) == 1
    text = capsys.readouterr().out
    assert "NOT equal to one process" in text
    assert f"forward diverges first at {HEAD}, in step 1" in text


def test_decay_on_norms_fails_as_an_update(
    tokens: Path, by_pool: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    by_pool["fault"] = "norms decay"
    assert verify.run(small(tokens, "plan.dp=2", "plan.zero=1"), steps=1, as_json=True) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["diverges"]["way"], found["diverges"]["place"]) == ("update", "layers.0")
    assert all(check["passed"] for row in found["parameters"] for check in row["gradient"])
    off = [row["name"] for row in found["parameters"] if not row["update"][0]["passed"]]
    assert off == [row["name"] for row in found["parameters"] if len(row["shape"]) == 1]


def test_the_command_starts_its_own_workers(tokens: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify.run(small(tokens, "plan.tp=2", "plan.pp=2"), steps=2) == 0
    text = capsys.readouterr().out
    assert "equal to one process within tolerance" in text
    assert "layers.2.mlp.gate_up.weight" in text
