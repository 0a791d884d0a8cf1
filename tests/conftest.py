"""Fixtures of the whole suite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The workers that every test of several ranks shares."""
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder beside the repository with cases and published figures; absent on most machines."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not (folder / "cases").is_dir():
        pytest.skip("no ../shared beside this checkout")
    return folder
