"""docs/cases.md names a test for every case of the lists of failures that users of other systems met."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROW = re.compile(r"^\| ([PF]\d+) \| [^|]+ \| (`.+`) \|$", re.MULTILINE)


def rows() -> list[tuple[str, list[str]]]:
    """(case, node ids of its tests), in the order of the page."""
    page = (ROOT / "docs/cases.md").read_text(encoding="utf-8")
    return [(case, re.findall(r"`([^`]+)`", tests)) for case, tests in ROW.findall(page)]


def defined(file: Path) -> set[str]:
    """Names of a module's tests."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {one.name for one in tree.body if isinstance(one, ast.FunctionDef) and one.name.startswith("test_")}


def test_every_case_of_the_lists_has_its_row(shared: Path) -> None:
    lists = [(shared / "cases" / name).read_text(encoding="utf-8") for name in ("parallel.md", "faults.md")]
    wanted = [case for text in lists for case in re.findall(r"^([PF]\d+) ", text, re.MULTILINE)]
    assert len(wanted) == 48
    assert [case for case, _ in rows()] == wanted


def test_every_test_of_the_page_exists() -> None:
    assert len(rows()) == 48
    for case, tests in rows():
        for test in tests:
            file, _, name = test.partition("::")
            assert name in defined(ROOT / file), f"{case}: {test}"
