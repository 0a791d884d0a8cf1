"""`Compression`: what a plan's ``compress`` asks of the gradients on the data axes' wire."""

from __future__ import annotations

import re
from dataclasses import dataclass

from plait.core.errors import PlanError

FORMS = ("none", "half", "topk:0.01", "powersgd:4")
"""One example of each form."""


@dataclass(frozen=True, kw_only=True)
class Compression:
    """``kind`` is none, half, topk (the ``share`` of elements that is sent) or powersgd (of ``rank``)."""

    kind: str
    share: float = 1.0
    rank: int = 0

    @property
    def feedback(self) -> bool:
        """Whether what is not sent is kept and added to the next step's gradients.

        Each rank then keeps one fp32 number for every gradient element, in units of the loss scale: so plans that
        shard gradients (zero=2, zero=3) or change the scale (precision=fp16) refuse these kinds.
        """
        return self.kind in ("topk", "powersgd")

    @classmethod
    def parse(cls, text: str) -> Compression:
        """``none``, ``half``, ``topk:SHARE`` (0 < share < 1) or ``powersgd:RANK`` (at least 1); else PlanError."""
        if text in ("none", "half"):
            return cls(kind=text)
        kind, _, value = text.partition(":")
        if kind == "topk" and re.fullmatch(r"[0-9]*\.?[0-9]+(e-?[0-9]+)?", value) and 0 < float(value) < 1:
            return cls(kind=kind, share=float(value))
        if kind == "powersgd" and re.fullmatch(r"[0-9]+", value) and int(value) >= 1:
            return cls(kind=kind, rank=int(value))
        why = {
            "topk": "topk takes the share of elements that is sent, above 0 and below 1",
            "powersgd": "powersgd takes the rank of the approximation, at least 1",
        }.get(kind, "there is no such compression")
        raise PlanError(f"compress={text}: {why}; what works: " + ", or ".join(f"compress={form}" for form in FORMS))


def compress_reason(text: str) -> str | None:
    """Why ``compress=text`` cannot be, or None."""
    try:
        Compression.parse(text)
    except PlanError as error:
        return str(error)
    return None
