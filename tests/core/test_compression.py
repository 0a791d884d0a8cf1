"""The text of ``plan.compress``."""

from __future__ import annotations

import pytest

from plait.core.compression import Compression, compress_reason
from plait.core.errors import PlanError


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("none", Compression(kind="none")),
        ("half", Compression(kind="half")),
        ("topk:0.01", Compression(kind="topk", share=0.01)),
        ("topk:1e-3", Compression(kind="topk", share=0.001)),
        ("powersgd:4", Compression(kind="powersgd", rank=4)),
    ],
)
def test_texts(text: str, wanted: Compression) -> None:
    assert Compression.parse(text) == wanted
    assert compress_reason(text) is None
    assert wanted.feedback == (wanted.kind in ("topk", "powersgd"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("topk:0", "topk takes the share"),
        ("topk:1", "topk takes the share"),
        ("topk:nan", "topk takes the share"),
        ("topk", "topk takes the share"),
        ("powersgd:0", "powersgd takes the rank"),
        ("powersgd:1.5", "powersgd takes the rank"),
        ("half:2", "no such compression"),
        ("", "no such compression"),
    ],
)
def test_bad_texts_are_refused_with_what_works(text: str, why: str) -> None:
    reason = compress_reason(text)
    assert reason is not None
    assert reason.startswith(f"compress={text}: ")
    assert why in reason
    assert "compress=topk:0.01" in reason
    with pytest.raises(PlanError):
        Compression.parse(text)
