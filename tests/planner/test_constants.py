"""Constants live in one file: no other module of the time model holds a number that is not one of structure."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import plait.planner
from plait.planner import constants
from plait.planner.constants import CONSTANTS, DEFAULT, FIT_SOURCES, Table, family_of
from plait.planner.cost import predict
from tests.planner.jobs import job

PLANNER = Path(plait.planner.__file__).parent
TIME = (
    "ops",
    "layers",
    "kernels",
    "wires",
    "overlap",
    "stages",
    "hiding",
    "weights",
    "pace",
    "updates",
    "offload",
    "cost",
)
"""Modules that predict a time."""
STRUCTURE = frozenset({0, 0.5, 1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 12, 14, 16, 38, 128})
"""Halves and doubles, the bytes and passes of named operators, FLOPs of a product, a head of 128."""


def numbers(module: str) -> set[float]:
    tree = ast.parse((PLANNER / f"{module}.py").read_text(encoding="utf-8"))
    shifts = {id(side) for node in ast.walk(tree) if _shift(node) for side in (node.left, node.right)}
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and type(node.value) in (int, float) and id(node) not in shifts
    }


def _shift(node: ast.AST) -> bool:
    """``1 << 14``: the size of a cache."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.LShift)


@pytest.mark.parametrize("module", TIME)
def test_no_fitted_number_outside_the_file(module: str) -> None:
    assert numbers(module) <= STRUCTURE


def used() -> set[str]:
    """Names that the modules look up, without families and frameworks."""
    text = "".join((PLANNER / f"{module}.py").read_text(encoding="utf-8") for module in TIME)
    return (
        set(re.findall(r'\.(?:of|within)\(\s*"([a-z0-9_]+)"', text))
        | set(re.findall(r'"([a-z_]+)" if ', text))
        | set(re.findall(r'else "([a-z_]+)"', text))
    )


def test_every_constant_is_used_and_says_where_it_is_from() -> None:
    names = {name.partition(".")[0] for name in CONSTANTS}
    assert names - used() == set()
    for name, constant in CONSTANTS.items():
        assert constant.unit, name
        assert constant.meaning, name
        assert constant.source, name


def test_at_most_half_of_the_sources_are_fitted_on() -> None:
    assert len(FIT_SOURCES) == len(set(FIT_SOURCES)) <= 7


def test_families() -> None:
    assert family_of("GB200") == "GB200"
    assert family_of("B200") == "B200"
    assert family_of("H100-80GB-SXM") == "H100"
    assert family_of("GH200-96GB") == "GH200"
    assert family_of("TPU-v5e") == "TPU"
    assert family_of("TPU-v6e") == "TPU-V6E"
    assert family_of("something new") == "gpu"
    assert family_of("host", "cpu") == "cpu"


def test_a_family_takes_its_own_value_then_that_of_its_like() -> None:
    table = Table({"gemm_share.H100": 0.5, "gemm_share": 0.25})
    assert table.of("gemm_share", "H100") == 0.5
    assert table.of("gemm_share", "GH200") == 0.5, "as H100"
    assert table.of("gemm_share", "unheard of") == 0.25
    assert table.of("gemm_share") == 0.25
    with pytest.raises(KeyError):
        table.of("no such constant")


def test_changing_a_constant_changes_the_prediction() -> None:
    base = predict(job("tp=8"))
    for name in ("gemm_share.H100", "memory_share", "link_share.H100", "flash_forward", "optimizer_share"):
        value = DEFAULT.of(*name.split("."))
        slower = predict(job("tp=8"), DEFAULT.replace({name: value / 2}))
        assert slower.step_time > base.step_time, name


def test_the_default_table_holds_the_file() -> None:
    assert all(
        DEFAULT.of(*name.split(".", 1)) == constant.value for name, constant in CONSTANTS.items() if name.count(".") < 2
    )
    assert set(constants.ALIKE.values()) <= {name.split(".", 1)[1] for name in CONSTANTS if "." in name}
