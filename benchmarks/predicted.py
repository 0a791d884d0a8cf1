"""Predicted beside measured on this machine: step time and peak memory of plans on 1, 2 and 4 processes.

    python benchmarks/predicted.py [--rounds 3] [--steps 2] [--patience 5] [--cluster FILE] [--save FILE] [--json FILE]

Calibrates (or reads a cluster file), predicts every plan, then runs them all in turn, round after round, through
plait's own step. A plan's time is the median of the steps in which other programs took next to nothing, where
there are enough of them, else its fastest step. Memory is the fullest rank's peak of tensor bytes, told in the first
round; beside it stands what its resident memory rose by, which is more: glibc keeps freed blocks. The last lines say
how far off predictions are, whether they rank the plans right, and what the planner's choice loses to the best; and the
same of predictions from the estimate that stands in where nothing is calibrated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))

from plait.core.cluster_file import dump, load
from plait.core.plan import Plan
from plait.core.topology import Topology
from plait.planner.cost import predict
from plait.planner.host import estimate
from plait.planner.job import Job
from plait.planner.local import doubt, practice
from plait.planner.memory import memory
from plait.train import calibrate
from plait.train.launch import launch
from predicted_rank import BATCH, MODEL, SEQ

PLANS = {
    1: ("micro=2", "micro=8", "micro=2 recompute=full"),
    2: (
        "dp=2 micro=2",
        "dp=2 micro=4 zero=1",
        "dp=2 micro=2 zero=3",
        "tp=2 micro=2",
        "tp=2 micro=8",
        "pp=2 micro=1",
        "pp=2 micro=4",
        "pp=2 micro=8",
        "pp=2 micro=1 schedule=zb-h1",
        "pp=2 virtual=2 schedule=interleaved micro=2",
        "pp=2 micro=2 recompute=full",
        "cp=2 micro=2",
    ),
    4: (
        "dp=4 micro=2",
        "tp=2 dp=2 micro=2",
        "pp=2 dp=2 micro=1",
        "tp=2 pp=2 micro=2",
        "tp=4 micro=2",
        "pp=4 micro=1",
        "pp=4 micro=4",
    ),
}
"""Processes -> plans."""
QUIET = 0.1
"""Cores that other programs may take during a step that counts."""
LEAST_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """One plan on a number of processes, what was predicted, and what was measured."""

    processes: int
    plan: str
    predicted: float
    predicted_memory: float
    measured: float
    memory: float
    resident: float
    foreign: float
    """Cores that others took, the median of the steps that count."""

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def run_plans(
    rounds: int, steps: int, patience: float, plans: dict[int, list[str]]
) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """(processes, plan) -> what each round measured."""
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds):
            for processes, texts in plans.items():
                # Every other round backwards, so that no plan always follows the same one.
                order = texts if turn % 2 == 0 else texts[::-1]
                path = Path(folder) / "rows.json"
                args = [order, steps, patience, turn == 0, str(path)]
                launch("predicted_rank:run_rank", processes=processes, args=args, device="cpu", timeout=300.0)
                for text, row in zip(order, json.loads(path.read_text(encoding="utf-8")), strict=True):
                    found.setdefault((processes, text), []).append(row)
                print(f"round {turn + 1} of {rounds}, {processes} processes", file=sys.stderr, flush=True)
    return found


def job_of(text: str, processes: int, topology: Topology | None) -> Job:
    """``topology`` None: of an estimate."""
    here = estimate(processes) if topology is None else topology.with_devices(processes)
    plan = Plan.parse(text).resolve(processes)
    return Job(model=MODEL, plan=plan, topology=here, seq=SEQ, global_batch=BATCH, practice=practice(here))


def memory_of(job: Job) -> float:
    """Bytes of the fullest rank."""
    return memory(job).fullest.peak


def case_of(key: tuple[int, str], rows: Sequence[dict[str, Any]], topology: Topology | None) -> Case:
    processes, text = key
    job = job_of(text, processes, topology)
    steps = sorted(tuple(step[:2]) for row in rows for step in row["steps"])
    quiet = [step for step in steps if step[1] <= QUIET]
    counted = quiet if len(quiet) >= LEAST_STEPS else steps[:1]
    return Case(
        processes=processes,
        plan=text,
        predicted=predict(job).step_time,
        predicted_memory=memory_of(job),
        measured=statistics.median(seconds for seconds, _ in counted),
        memory=rows[0]["memory"],
        resident=rows[0]["resident"],
        foreign=statistics.median(foreign for _, foreign in counted),
    )


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation of two lists without ties."""
    ranks = [[sorted(values).index(value) for value in values] for values in (a, b)]
    n = len(a)
    return 1 - 6 * sum((x - y) ** 2 for x, y in zip(*ranks, strict=True)) / (n * (n * n - 1))


def verdict(cases: Sequence[Case]) -> dict[str, Any]:
    errors = [abs(case.error) for case in cases]
    chosen = min(cases, key=lambda case: case.predicted)
    best = min(cases, key=lambda case: case.measured)
    sizes = [abs(case.predicted_memory / case.memory - 1) for case in cases]
    return {
        "plans": len(cases),
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "spearman": spearman([c.predicted for c in cases], [c.measured for c in cases]),
        "chosen": f"{chosen.processes}: {chosen.plan}",
        "best": f"{best.processes}: {best.plan}",
        "regret": chosen.measured / best.measured - 1,
        "median_memory_error": statistics.median(sizes),
    }


def show(cases: Sequence[Case], said: dict[str, Any]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in (
        "ranks",
        "plan",
        "measured\ns",
        "predicted\ns",
        "error",
        "memory\nMB",
        "predicted\nMB",
        "resident\nMB",
    ):
        table.add_column(name, justify="left" if name == "plan" else "right")
    table.add_column("others\ncores", justify="right")
    for case in cases:
        table.add_row(
            str(case.processes),
            case.plan,
            f"{case.measured:.3f}",
            f"{case.predicted:.3f}",
            f"{case.error:+.1%}",
            f"{case.memory / 1e6:,.0f}",
            f"{case.predicted_memory / 1e6:,.0f}",
            f"{case.resident / 1e6:,.0f}",
            f"{case.foreign:.2f}",
        )
    Console(width=130).print(table)
    for title, values in (("calibrated", said), ("from an estimate", said["estimated"])):
        words = [f"{name} {_word(value)}" for name, value in values.items() if not isinstance(value, dict)]
        print(f"{title}: {', '.join(words)}")


def _word(value: str | float) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _calibrated(file: Path | None) -> Topology:
    """The cluster of ``file``; without one, this machine as it is measured now."""
    if file is not None:
        return load(file)
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "cluster.toml"
        calibrate.run(found, device="cpu")
        return load(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--patience", type=float, default=5.0, help="seconds a step waits for the machine to be quiet")
    parser.add_argument("--cluster", type=Path, help="a cluster file of this machine; without it, calibrates")
    parser.add_argument("--only", default="", help="plans whose text contains this")
    parser.add_argument("--save", type=Path, help="keep the cluster file here")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    plans = {n: [text for text in texts if args.only in text] for n, texts in PLANS.items()}
    plans = {n: texts for n, texts in plans.items() if texts}
    topology = _calibrated(args.cluster)
    if args.save is not None:
        args.save.write_text(dump(topology), encoding="utf-8")
    rows = run_plans(args.rounds, args.steps, args.patience, plans)
    cases = [case_of(key, found, topology) for key, found in rows.items()]
    said = verdict(cases)
    said["estimated"] = verdict([case_of(key, found, None) for key, found in rows.items()])
    show(cases, said)
    if note := doubt(job_of(cases[0].plan, cases[0].processes, topology).topology):
        print(f"cluster: {note}")
    if args.json is not None:
        document = {
            "verdict": said,
            "cases": [vars(case) for case in cases],
            "rows": [[*k, v] for k, v in rows.items()],
        }
        args.json.write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
