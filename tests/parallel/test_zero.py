"""ZeRO levels 0 to 3, with and without blocks (HSDP), beside one process; what stays in memory at each level."""

from __future__ import annotations

import pytest

from tests.parallel.cuts import (
    Run,
    check_equal,
    models,
)
from tests.pool import Pool

MODELS = models()
LEVELS = [0, 1, 2, 3]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("model", ["llama", "gpt2-tied"])
def test_two_ranks(pool: Pool, level: int, model: str) -> None:
    check_equal(pool, f"dp=2 zero={level}", 2, MODELS[model], Run(steps=3))
