"""Given keys that no plan can have together are named, both, with the rule that they break."""

from __future__ import annotations

import pytest

from plait.core.errors import PlanError
from plait.models.config import PRESETS
from plait.planner.clusters import cluster
from plait.planner.commands import fixed
from plait.planner.conflict import conflict
from plait.planner.space import Request, require_some


def request(*fix: str, ranks: int = 16) -> Request:
    given = fixed(fix)
    return Request(
        model=PRESETS["llama3-8b"],
        topology=cluster("h100", ranks),
        world_size=ranks,
        seq=4096,
        global_batch=64,
        precision=str(given.get("precision", "bf16")),
        fix=given,
    )


@pytest.mark.parametrize(
    ("fix", "named", "rule"),
    [
        (("schedule=2bw", "zero=3"), "schedule=2bw with zero=3", "two versions of the weights are kept"),
        (("precision=fp16", "schedule=2bw"), "precision=fp16 with schedule=2bw", "loss scale would be of another step"),
        (("tp=2", "node=4", "pp=2", "compress=half"), "node=4 with compress=half", "one or the other"),
        (("stages=16,16", "pp=4"), "stages=16,16 with pp=4", "2 counts for 4 virtual stages"),
        (("schedule=interleaved", "pp=16", "virtual=3"), "pp=16 with virtual=3", "48 virtual stages for 32 layers"),
        (("micro=64", "dp=2"), "micro=64 with dp=2", "a global batch of 64 is not a multiple of 128"),
        (("dp=3",), "dp=3", "the world size is 16"),
    ],
)
def test_keys_that_exclude_each_other_are_named_with_the_rule(fix: tuple[str, ...], named: str, rule: str) -> None:
    with pytest.raises(PlanError) as caught:
        require_some(request(*fix), False)
    said = str(caught.value)
    assert said.startswith(f"{named} is in no plan for 16 ranks: ")
    assert rule in said
    assert "\n" not in said


def test_keys_that_some_plan_has_are_not_to_blame() -> None:
    assert conflict(request("tp=2", "pp=2", "zero=1")) is None
    assert conflict(request("schedule=zb-v", "pp=4")) is None
    assert conflict(request()) is None
    with pytest.raises(PlanError, match=r"no plan cuts this model over 16 ranks .* with tp=2 given"):
        require_some(request("tp=2"), False)


def test_many_ranks_are_judged_at_once() -> None:
    assert "schedule=2bw with zero=3" in str(conflict(request("schedule=2bw", "zero=3", ranks=16384)))
