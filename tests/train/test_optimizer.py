from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.errors import ConfigError
from plait.train.optimizer import SCHEDULES, learning_rate


def rates(steps: int, **changes: object) -> list[float]:
    options: dict[str, object] = {"schedule": "constant", "lr": 1.0, "warmup": 0, "min_lr_ratio": 0.1, "decay": 0.2}
    return [learning_rate(step, steps=steps, **{**options, **changes}) for step in range(steps + 2)]  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warmup_is_linear_from_its_first_share(schedule: str) -> None:
    assert rates(20, schedule=schedule, lr=2.0, warmup=4)[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]


def test_constant_stays() -> None:
    assert rates(3) == [1.0] * 5


def test_cosine_passes_its_closed_form_points() -> None:
    found = rates(10, schedule="cosine", warmup=2)
    assert found[2] == 1.0
    assert found[4] == pytest.approx(0.1 + 0.9 * (2 + 2**0.5) / 4)  # a quarter: (1 + cos 45 degrees) / 2
    assert found[6] == pytest.approx(0.55)
    assert found[10:] == pytest.approx([0.1, 0.1])


def test_wsd_is_flat_then_a_line() -> None:
    found = rates(10, schedule="wsd", warmup=2, decay=0.4, min_lr_ratio=0.2)
    assert found[1:7] == [1.0] * 6
    assert found[7:] == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.2])


def test_wsd_decay_leaves_the_warmup_alone() -> None:
    found = rates(10, schedule="wsd", warmup=6, decay=1.0)
    assert found[:6] == pytest.approx([i / 6 for i in range(1, 7)])
    assert found[6] == 1.0
    assert rates(5, schedule="wsd", decay=0.0)[4] == 1.0


@given(st.sampled_from(SCHEDULES), st.integers(1, 50), st.integers(0, 60), st.floats(0, 1), st.floats(0, 1))
def test_rates_are_positive_and_fall_after_the_warmup(
    schedule: str, steps: int, warmup: int, ratio: float, decay: float
) -> None:
    found = rates(steps, schedule=schedule, warmup=warmup, min_lr_ratio=ratio, decay=decay)
    assert all(0 < rate <= 1 + 1e-12 for rate in found[:steps])
    after = found[warmup:]
    assert all(a >= b - 1e-12 for a, b in pairwise(after))


def test_unknown_schedule() -> None:
    with pytest.raises(ConfigError, match=r"'cosin'.*constant, cosine, wsd"):
        rates(3, schedule="cosin")
