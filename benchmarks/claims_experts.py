"""Claims on experts: how even their load is with and without balancing, and what placement by load brings."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from claims_ranks import Claim, train

BALANCING: dict[str, dict[str, object]] = {
    "none": {},
    "aux_loss=0.01": {"moe.aux_loss": 0.01},
    "aux_loss=0.1": {"moe.aux_loss": 0.1},
    "bias_balance": {"moe.bias_balance": True, "moe.bias_rate": 0.01},
}
PUBLISHED = "45% without, 8% with"
LAST = 20


def spread(balancing: dict[str, object], steps: int) -> dict[str, float]:
    """``moe-tiny`` on the default data: std over mean of the experts' loads, means over layers and the last steps.

    ``first``: in the first step; ``window``: of the loads summed over the last steps (what stays uneven when the
    chance of single batches is averaged out).
    """
    settings = {"model.preset": "moe-tiny", "plan.tp": 1, "plan.pp": 1, "plan.dp": 2, "plan.ep": 2, "plan.micro": 8}
    rows = train({**settings, "train.steps": steps, **balancing})
    layers = range(len(rows[0]["moe"]))
    sums = [
        [sum(load) for load in zip(*(row["moe"][at]["load"] for row in rows[-LAST:]), strict=True)] for at in layers
    ]
    return {
        "first": statistics.mean(layer["spread"] for layer in rows[0]["moe"]),
        "last": statistics.mean(layer["spread"] for row in rows[-LAST:] for layer in row["moe"]),
        "window": statistics.mean(statistics.pstdev(load) / statistics.mean(load) for load in sums),
        "loss": statistics.mean(row["loss"] for row in rows[-LAST:]),
    }


def balance(quick: bool) -> list[Claim]:
    """Utilisation spread of a trained preset, by kind of balancing."""
    steps = 3 if quick else 300
    found = {name: spread(one, steps) for name, one in list(BALANCING.items())[: 2 if quick else None]}
    base = found["none"]["last"]
    claims = []
    for name, row in found.items():
        if name == "none":
            verdict = "as published" if 0.4 <= base <= 0.5 else f"{'more' if base > 0.5 else 'less'} uneven"
        else:
            extra = row["loss"] - found["none"]["loss"]
            verdict = f"{row['last'] / base:.0%} of the spread is left (published: 18%); loss {extra:+.3f}"
        shown = f"{row['last']:.0%} a step, {row['window']:.0%} over {LAST} steps"
        claims.append(
            Claim(
                claim=f"spread of experts' load (std/mean), {steps} steps of moe-tiny, balancing: {name}",
                published=PUBLISHED,
                measured=f"{shown} (first step {row['first']:.0%})",
                verdict=verdict,
            )
        )
    return claims


def placement(quick: bool) -> list[Claim]:
    """Experts on the ranks they were born on, moved by load, and with the hottest on every rank: a skewed stream."""
    repeats, layers = (2, 1) if quick else (9, 8)
    script = Path(__file__).with_name("experts.py")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        command = [sys.executable, script, "--parts", "placement", f"--repeats={repeats}", f"--layers={layers}"]
        subprocess.run([*command, "--json", path], check=True, stdout=sys.stderr)
        rows = {row["way"]: row for row in json.loads(path.read_text())["rows"]}
    static = rows["static"]
    return [
        Claim(
            claim=f"spread of ranks' load and step time, skewed stream, placement: {way}",
            published="evener and faster (no figure)",
            measured=f"spread {static['spread']:.0%} -> {row['spread']:.0%}, "
            f"step {static['clock']['seconds']:.2f} -> {row['clock']['seconds']:.2f} s ({row['clock']['speed']:.2f} x)",
            verdict="as claimed" if row["spread"] < static["spread"] and row["clock"]["speed"] > 1 else "not faster",
        )
        for way, row in rows.items()
        if way != "static"
    ]
