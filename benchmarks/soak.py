"""A run of hundreds of steps whose ranks keep failing, beside one that nothing disturbs: both have to end alike.

    python benchmarks/soak.py [--steps 300] [--faults 15] [--seed 1] [--ranks 4] [--json FILE]

Faults are drawn from the seed: kind, step, rank, and where in a step or a save. Kinds (`KINDS`): SIGKILL, SIGSTOP, an
exception, an exit, SIGKILL and a full disk in the middle of a save, a NaN in one rank's gradients, and a place for a
rank that is taken away and given back later, so that the plan changes twice.

A NaN belongs to the data, so both runs meet it and leave that step out (run.nan=skip). Losses, norms, weights and
moments have to be the same bits for as long as the plan has never changed. From then on the order of additions differs:
the bound is `ROUNDINGS` times what the same run differs by, undisturbed, under the plan that took over. Nothing may be
left: processes, temporary folders, half checkpoints, memory files.

One line a fault: what was done, what was noticed and after how many seconds, and how long after the fault the run had
taken a step again. Exit code 1 where something is not as it has to be.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from plait.checkpoint.reader import Checkpoint, latest
from plait.core.config import Config, load
from plait.core.plan import Plan
from plait.telemetry.record import read_metrics
from plait.train.data import write_tokens
from plait.train.elastic import SLOTS
from plait.train.events_log import EVENTS, LoggedEvent, read
from plait.train.restart import CHECKPOINTS, supervise
from plait.train.run import claim_folder
from soak_faults import EVERY, KINDS, RANK, Fault, draw, write_slots

ROUNDINGS = 16.0
"""As in `plait verify`: tolerance in units of what rounding alone changes."""
NOTICED = {"nan": ("skip",), "save-full": ("checkpoint",), "slot": ("plan",), "slot back": ("recalled",)}
"""The event that follows a fault; a failure for those that are not here."""
SETTINGS = (
    "model.hidden_size=32 model.num_layers=4 model.num_heads=4 model.num_kv_heads=2 model.ffn_size=48 data.seq=16 "
    "train.global_batch=12 train.eval_every=50 train.eval_batches=2 data.held_out=0.1 optimizer.lr=0.003 "
    # Far above the rounding noise of gradients that are zero in exact arithmetic: tests/parallel/cuts.py.
    "optimizer.eps=1e-4 optimizer.warmup=2 plan.micro=1 plan.zero=1 run.nan=skip run.threads=1 run.device=cpu "
    f"checkpoint.every={EVERY} run.replicas=7"
).split()


def config(folder: Path, tokens: Path, steps: int, *more: str) -> Config:
    own = (f"run.dir={folder}", f"data.tokens={tokens}", f"train.steps={steps}")
    return claim_folder(load(None, [*SETTINGS, *own, *more]))


def run(settings: Config, ranks: int, faults: list[Fault]) -> float:
    """Train among ``faults``; seconds. What the supervisor says goes to ``supervisor.log``."""
    folder = settings.run.dir
    assert folder is not None
    (folder / "faults.json").write_text(json.dumps(faults), encoding="utf-8")
    (folder / "ranks").write_text(str(ranks), encoding="ascii")
    write_slots(folder, without=None, ranks=ranks)
    os.environ[SLOTS] = str(folder / "slots")
    begin = time.monotonic()
    with (folder / "supervisor.log").open("w", encoding="utf-8") as log, contextlib.redirect_stderr(log):
        supervise(settings, ranks, as_json=True, function=RANK)
    return time.monotonic() - begin


# --- what came of it


def follow(folder: Path, faults: list[Fault]) -> list[dict[str, Any]]:
    """For each fault: whether it struck, the event that followed, and the seconds until that and until a step."""
    events = read(folder / EVENTS)
    done = [float(line.split()[0]) for line in (folder / "steps.log").read_text(encoding="ascii").splitlines()]
    rows: list[dict[str, Any]] = []
    for number, fault in enumerate(faults):
        mark = folder / f"struck-{number}"
        row: dict[str, Any] = {**fault, "struck": mark.exists(), "noticed": None, "after": None, "step_after": None}
        if mark.exists():
            at = float(mark.read_text(encoding="ascii"))
            kinds = NOTICED.get(fault["kind"], ("failure",))
            event = next((one for one in events if one.kind in kinds and one.time >= at and fits(one, fault)), None)
            if event is not None:
                row |= {"noticed": words(event), "after": event.time - at}
                row["step_after"] = next((step - at for step in done if step > event.time), None)
        rows.append(row)
    return rows


def alarms(folder: Path, faults: list[Fault]) -> list[str]:
    """Failures that no fault explains: hangs of ranks that did not hang, deaths that nobody planned."""
    planned = sum(fault["kind"] not in NOTICED for fault in faults)
    failures = [words(one) for one in read(folder / EVENTS) if one.kind == "failure"]
    return [] if len(failures) == planned else [f"{len(failures)} failures for {planned} faults: {failures}"]


def fits(event: LoggedEvent, fault: Fault) -> bool:
    return event.kind not in ("skip", "checkpoint") or event.fields["step"] == fault["step"]


def words(event: LoggedEvent) -> str:
    fields = event.fields
    if event.kind == "failure":
        return f"rank {fields['rank']}: {fields['cause']}" + (f"; {fields['diagnosis']}" if fields["diagnosis"] else "")
    told = {"plan": "plan", "checkpoint": "error", "skip": "grad_norm", "recalled": "places"}
    return f"{event.kind}: {fields[told[event.kind]]}"


def first_change(folder: Path, steps: int) -> int:
    """Steps that the run has taken before its plan ever changed."""
    resumes, changed = [one for one in read(folder / EVENTS) if one.kind in ("plan", "resume")], False
    for event in resumes:
        if changed and event.kind == "resume":
            return int(event.fields["step"])
        changed = changed or event.kind == "plan"
    return steps


def distance(folder: Path, other: Path, since: int) -> dict[str, float]:
    """Largest relative differences of two runs: of losses and norms before step ``since`` and from there on, and of
    each kind of tensor in their last checkpoints."""
    rows, others = read_metrics(folder / "metrics.jsonl"), read_metrics(other / "metrics.jsonl")
    if [row["step"] for row in rows] != [row["step"] for row in others]:
        return {"rows": math.inf}
    found = {"before": 0.0, "after": 0.0}
    for row, same in zip(rows, others, strict=True):
        when = "before" if row["step"] < since else "after"  # type: ignore[operator]
        for key in ("loss", "grad_norm", "lr", "eval_loss"):
            found[when] = max(found[when], _relative(row.get(key), same.get(key)))
    mine, theirs = (Checkpoint.open(_newest(one), verify=True) for one in (folder, other))
    names = [name for name in mine.names if not name.startswith("own/")]
    if set(names) != {name for name in theirs.names if not name.startswith("own/")}:
        return {"names": math.inf}
    for name in names:
        a, b = mine.read(name), theirs.read(name)
        error = 0.0 if torch.equal(a, b) else float((a - b).norm() / b.norm().clamp_min(1e-30))
        kind = name.partition("/")[0]
        found[kind] = max(found.get(kind, 0.0), error)
    return found


def _newest(folder: Path) -> Path:
    path = latest(folder / CHECKPOINTS)
    assert path is not None, folder
    return path


def _relative(a: Any, b: Any) -> float:
    if a == b:
        return 0.0
    return math.inf if a is None or b is None else abs(a - b) / abs(b)


def left_behind(private: Path, shared: set[str], *folders: Path) -> list[str]:
    """Processes, memory files, temporary folders and half files that the runs have left."""
    # torch makes its compiler's cache there, one for all programs of a user.
    found = [f"temporary {path.name}" for path in private.iterdir() if not path.name.startswith("torchinductor_")]
    found += [f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - shared if f"-{os.getpid()}-" in name]
    found += [str(path) for folder in folders for path in folder.rglob("*.tmp*")]
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"TMPDIR={private}\0".encode() in (process / "environ").read_bytes():
                found.append(f"process {process.name}")
    return found


def soak(
    folder: Path, *, steps: int, faults: int, seed: int, ranks: int, kinds: tuple[str, ...], timeout: float
) -> dict[str, Any]:
    """Both runs, and the comparison; ``wrong`` lists what is not as it has to be."""
    private, shared = folder / "private", set(os.listdir("/dev/shm"))
    private.mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(private)
    tokens = folder / "text.bin"
    letters = random.Random(0)
    text = [letters.choice(b"abcdefgh  ") for _ in range(1 << 14)]
    write_tokens(tokens, [text], dtype="uint16", vocab_size=256, tokenizer="bytes")
    planned = draw(faults, steps, ranks, seed, kinds)
    plan = ("plan.tp=1", "plan.pp=2", f"plan.dp={ranks // 2}")
    more = (f"run.timeout={timeout}", f"run.max_restarts={2 * faults}")
    nans = [fault for fault in planned if fault["kind"] == "nan"]
    calm, wild = folder / "calm", folder / "wild"
    seconds = {"undisturbed": run(config(calm, tokens, steps, *plan, *more), ranks, nans)}
    seconds["disturbed"] = run(config(wild, tokens, steps, *plan, *more), ranks, planned)
    rows = follow(wild, planned)
    since = first_change(wild, steps)
    found = distance(wild, calm, since)
    wrong = [f"{row['kind']} at step {row['step']}: not noticed" for row in rows if row["noticed"] is None]
    rounding: dict[str, float] = {}
    if since < steps:
        other = next(str(one.fields["plan"]) for one in read(wild / EVENTS) if one.kind == "plan")
        settings = dataclasses.replace(config(folder / "other", tokens, steps, *more), plan=Plan.parse(other))
        size = next(int(one.fields["ranks"]) for one in read(wild / EVENTS) if one.kind == "plan")
        seconds["other plan"] = run(settings, size, nans)
        rounding = distance(folder / "other", calm, 0)
    for what, error in found.items():
        bound = 0.0 if since == steps or what == "before" else ROUNDINGS * rounding.get(what, 0.0)
        if not error <= bound:
            wrong.append(f"{what}: differs by {error:.1e}, bound {bound:.1e}")
    wrong += alarms(wild, planned)
    wrong += [f"left behind: {what}" for what in left_behind(private, shared, calm, wild)]
    return {
        "steps": steps,
        "seed": seed,
        "ranks": ranks,
        "faults": rows,
        "plan_changed_at": since if since < steps else None,
        "difference": found,
        "rounding": rounding,
        "seconds": seconds,
        "wrong": wrong,
        "load_average": os.getloadavg()[0],
    }


def show(report: dict[str, Any]) -> None:
    """The report in words."""
    for row in report["faults"]:
        where = f"step {row['step']:3d}  rank {row['rank']}  {row['kind']:9s} {row['phase']:16s}"
        if row["noticed"] is None:
            print(f"{where} NOT NOTICED{'' if row['struck'] else ' (it never struck)'}")
            continue
        again = f"{row['step_after']:5.1f}" if row["step_after"] is not None else "    -"
        print(f"{where} noticed after {row['after']:5.2f} s, a step after {again} s  {row['noticed']}")
    print(", ".join(f"{what} {seconds:.0f} s" for what, seconds in report["seconds"].items()))
    changed = report["plan_changed_at"]
    print("the plan never changed" if changed is None else f"the plan changed first at step {changed}")
    for what, error in report["difference"].items():
        rounding = report["rounding"].get(what)
        beside = (
            "" if rounding is None or what == "before" else f", an undisturbed run of the other plan {rounding:.1e}"
        )
        print(f"  {what:11s} largest relative difference {error:.1e}{beside}")
    for trouble in report["wrong"]:
        print(f"WRONG  {trouble}")
    print("all as it has to be" if not report["wrong"] else f"{len(report['wrong'])} things are wrong")


def main() -> None:
    """Run, print, and end with 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--faults", type=int, default=15)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=4, help="an even number")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--timeout", type=float, default=20.0, help="run.timeout of the runs, in seconds")
    parser.add_argument("--folder", type=Path, help="empty folder to keep the runs in; a temporary one without")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    kinds = tuple(given.kinds.split(","))
    if not set(kinds) <= set(KINDS):
        raise SystemExit(f"kinds are {', '.join(KINDS)}")
    with tempfile.TemporaryDirectory(prefix="plait-soak-") as name:
        folder = (given.folder or Path(name)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        report = soak(
            folder,
            steps=given.steps,
            faults=given.faults,
            seed=given.seed,
            ranks=given.ranks,
            kinds=kinds,
            timeout=given.timeout,
        )
    show(report)
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    raise SystemExit(bool(report["wrong"]))


if __name__ == "__main__":
    main()
