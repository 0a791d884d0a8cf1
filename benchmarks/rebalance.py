"""Step time with one slow rank: its layers moved away (run.rebalance) beside a run that leaves the stage cut alone.

    python benchmarks/rebalance.py [--ranks 2] [--slow 1] [--factor 2] [--rounds 3] [--steps 60] [--every 15]
        [--set SECTION.KEY=VALUE ...] [--json FILE]

A pipeline of ``--ranks`` ranks and 16 layers on this machine. Whatever rank ``--slow`` computes takes ``--factor``
times as long: it sleeps after each action, as a rank on a slower device would still be busy. The runs ``fixed`` (cut as
planned) and ``moving`` (run.rebalance) alternate, in turned order from round to round; ``even`` is the run without a
slow rank, which neither can reach. Shown are medians of the steps of the last third, by which the cut has changed, the
promised share of the step that is saved, and the seconds from the saved state until its ranks have taken it up under
the new cut. Losses of ``moving`` and ``fixed`` have to agree; exit code 1 where they differ by more than `AGREE`, or
where no layer moved.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait.core.config import Config, load, loads
from plait.parallel.pipeline import Executor
from plait.telemetry.record import read_metrics
from plait.train import trainer
from plait.train.events_log import EVENTS, read
from plait.train.launch import Worker
from plait.train.recut import REBALANCED
from plait.train.restart import supervise
from plait.train.run import claim_folder

RANK = f"{os.path.abspath(__file__)}:run_rank"
SLOW = "slow.json"
SETTINGS = (
    "model.preset=tiny model.hidden_size=256 model.ffn_size=704 model.num_layers=16 data.seq=128 train.global_batch=8 "
    "train.eval_every=0 optimizer.schedule=constant optimizer.lr=0.0001 run.threads=1 run.device=cpu plan.tp=1 "
    "plan.micro=1"
)
"""At the usual learning rate this model's loss swings, and the last bit of a norm becomes a difference of percents."""
KINDS = ("even", "fixed", "moving")
AGREE = 1e-5
"""Largest relative difference of two losses: another cut adds squares of the gradient norm in another order."""


def run_rank(worker: Worker, text: str, as_json: bool) -> None:
    """`plait.train.trainer.run_rank`, where the rank that the run's folder names computes slowly."""
    folder = loads(text).run.dir
    assert folder is not None
    slow = json.loads((folder / SLOW).read_text(encoding="utf-8"))
    compute = Executor._compute

    def slowly(self: Executor, *arguments: Any, **options: Any) -> None:
        begin = time.perf_counter()
        compute(self, *arguments, **options)
        time.sleep((slow["factor"] - 1) * (time.perf_counter() - begin))

    # The rank's process is its own: what is changed in it here ends with it.
    if worker.place.rank == slow["rank"]:
        Executor._compute = slowly  # type: ignore[method-assign, assignment]
    trainer.run_rank(worker, text, as_json)


def measure(folder: Path, given: argparse.Namespace, kind: str) -> dict[str, Any]:
    """One run: median seconds of its last steps, its losses, and its change of the cut, if any."""
    every = given.every if kind == "moving" else 0
    own = (f"run.dir={folder}", f"train.steps={given.steps}", f"plan.pp={given.ranks}", f"run.rebalance={every}")
    config: Config = claim_folder(load(None, [*SETTINGS.split(), *own, *given.set]))
    slow = {"rank": given.slow, "factor": 1.0 if kind == "even" else given.factor}
    (folder / SLOW).write_text(json.dumps(slow), encoding="utf-8")
    with (folder / "output.log").open("w", encoding="utf-8") as log, contextlib.redirect_stderr(log):
        supervise(config, given.ranks, as_json=True, function=RANK)
    rows = read_metrics(folder / "metrics.jsonl")
    seconds = [float(str(row["step_time_s"])) for row in rows]
    events = read(folder / EVENTS)
    changes = [one for one in events if one.kind == REBALANCED]
    found: dict[str, Any] = {
        "kind": kind,
        "step": statistics.median(seconds[-(given.steps // 3) :]),
        "losses": [row["loss"] for row in rows],
        "changes": [dict(one.fields) for one in changes],
    }
    if changes:
        found["before"] = statistics.median(seconds[2 : int(changes[0].fields["step"])])
        back = next(one.time for one in events if one.kind == "resume" and one.time > changes[0].time)
        found["switch"] = back - changes[0].time
    return found


def words(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Seconds of a step in each of ``runs``, and what moving layers saves."""
    told = ", ".join(f"{kind} {runs[kind]['step'] * 1e3:.1f} ms" for kind in KINDS)
    return f"{told}: moving against fixed {runs['moving']['step'] / runs['fixed']['step'] - 1:+.0%}"


def main() -> None:
    """Measure, print, and end with 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--slow", type=int, default=1, help="the slow rank")
    parser.add_argument("--factor", type=float, default=2.0, help="how many times longer it computes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=15, help="run.rebalance of the moving run")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: list[dict[str, Any]] = []
    wrong = False
    for number in range(given.rounds):
        kinds = KINDS if number % 2 == 0 else KINDS[::-1]
        with tempfile.TemporaryDirectory(prefix="plait-rebalance-") as name:
            one = {kind: measure(Path(name) / kind, given, kind) for kind in kinds}
        found += one.values()
        pairs = zip(one["moving"].pop("losses"), one["fixed"].pop("losses"), strict=True)
        apart = max(abs(mine - theirs) / theirs for mine, theirs in pairs)
        one["even"].pop("losses")
        moving, changes = one["moving"], one["moving"]["changes"]
        wrong = wrong or apart > AGREE or not changes
        told = [f"{each['old']} -> {each['new']}, promised {each['gain']:.0%} less" for each in changes]
        print(f"round {number + 1}: {words(one)} ({'; '.join(told) or 'no layer moved'})")
        print(f"  taken up in {moving.get('switch', 0.0):.2f} s, losses differ by {apart:.1e}", flush=True)
    steps = {kind: statistics.median(one["step"] for one in found if one["kind"] == kind) for kind in KINDS}
    print(f"median: {words({kind: {'step': value} for kind, value in steps.items()})}")
    if given.json is not None:
        report = {"runs": found, "median": steps, "load_average": os.getloadavg()[0]}
        given.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
