"""What is published about model parallelism, beside what this machine shows.

    python benchmarks/claims.py [--only bubbles,zero,...] [--quick] [--json FILE]

One line a claim: what is said, the published figure, what was measured here, and the verdict, also where it differs.
Parts run one after the other, each in processes of its own, one thread a rank. ``--quick``: sizes of seconds, which
show that the parts run, not what they show.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from claims_experts import balance, placement
from claims_memory import activations, tensor_parallel, zero
from claims_pipeline import bubbles
from claims_ranks import Claim
from claims_wire import compression, parameter_server

PARTS: Mapping[str, Callable[[bool], list[Claim]]] = {
    "bubbles": bubbles,
    "activations": activations,
    "tensor-parallel": tensor_parallel,
    "balance": balance,
    "placement": placement,
    "compression": compression,
    "server": parameter_server,
    "zero": zero,
}


def markdown(claims: list[Claim]) -> str:
    """The table, as it stands in docs/performance.md."""
    lines = ["| claim | published | measured here | verdict |", "| --- | --- | --- | --- |"]
    return "\n".join([*lines, *(f"| {' | '.join(dataclasses.astuple(claim))} |" for claim in claims)])


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="small sizes: that it runs, not what it shows")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(words)
    names = options.only.split(",")
    for name in names:
        if name not in PARTS:
            parser.error(f"no part {name!r}; there are {', '.join(PARTS)}")
    found: dict[str, list[Claim]] = {}
    for name in names:
        # What the parts print on their way is for a person who waits: the table alone goes to standard output.
        with contextlib.redirect_stdout(sys.stderr):
            found[name] = PARTS[name](options.quick)
        if options.json:
            rows = {part: [dataclasses.asdict(claim) for claim in claims] for part, claims in found.items()}
            options.json.write_text(json.dumps({"quick": options.quick, "parts": rows}, indent=1))
    print(markdown([claim for claims in found.values() for claim in claims]))


if __name__ == "__main__":
    main()
