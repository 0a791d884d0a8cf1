"""The parts of the documentation that the code writes: ``python -m docs.generate`` refreshes them.

A generated part stands between ``<!-- generated: NAME -->`` and ``<!-- /generated -->``; `BLOCKS` maps NAME to what
belongs there. With ``--check`` nothing is written; ``tests/test_docs.py`` too fails when a part is stale.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

from plait.comm.collectives import TABLE as COLLECTIVES
from plait.comm.ledger import WIRE
from plait.core import config, errors, legal
from plait.core.events import Bubble, bubble
from plait.core.plan import Plan
from plait.models.config import PRESETS
from plait.parallel import rules
from plait.schedule.check import check
from plait.schedule.generate import generate
from plait.schedule.grid import grid
from plait.schedule.ir import Kind, Schedule
from plait.schedule.lower import lower
from plait.schedule.simulate import Cost, simulate
from plait.telemetry.record import EVAL_KEY, METRIC_KEYS
from plait.train.supervise import StoppedError

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "docs")
SOURCE = ROOT / "src" / "plait"
ROOMS = ("core", "schedule", "models", "comm", "parallel", "checkpoint", "telemetry", "planner", "train")
EXAMPLE = ROOT / "docs" / "zero-bubble.schedule"

_BLOCK = re.compile(r"(<!-- generated: ([a-z0-9-]+) -->\n)(.*?)(<!-- /generated -->)", re.DOTALL)
_WIRE_TEXT = {
    "all_reduce": ("2 (t-1)/t", Fraction(6, 4)),
    "reduce_scatter": ("(t-1)/t", Fraction(3, 4)),
    "all_gather": ("(t-1)/t", Fraction(3, 4)),
    "all_to_all": ("(t-1)/t", Fraction(3, 4)),
    "send": ("1", Fraction(1)),
}
"""Operation -> its share of the tensor's bytes in words, and as a number for t=4, which is held to the ledger."""
_COSTS = {Kind.F: 1, Kind.B: 2}
_SIZES = ((4, 2), (4, 4), (4, 6), (4, 8), (4, 16), (8, 16), (8, 64))


def _table(head: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def _fenced(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```\n"


def _wire_text(operation: str) -> str:
    text, share = _WIRE_TEXT[operation]
    if WIRE[operation](4, 4096) != share * 4096:
        raise ValueError(f"docs/generate.py says {operation} sends {text} of a tensor, comm/ledger.py says otherwise")
    return text


def _moved(move: str) -> str:
    return f"{move.replace('_', '-')}: {_wire_text(move)}" if move in WIRE else f"{move}: 0"


def _collectives() -> str:
    rows: list[tuple[object, ...]] = [
        (
            one.name,
            f"{one.source.name} -> {one.target.name}",
            f"{one.target.dual.name} -> {one.source.dual.name}",
            _moved(one.forward),
            _moved(one.backward),
        )
        for one in COLLECTIVES
    ]
    return _table(("collective", "forward", "backward", "bytes forward", "bytes backward"), rows)


def _wire() -> str:
    rows: list[tuple[object, ...]] = [(name.replace("_", "-"), _wire_text(name)) for name in WIRE]
    return _table(("operation", "bytes a rank sends, as a share of the whole tensor"), rows)


def _legal() -> str:
    return _table(("key", "condition"), [(f"`{rule.axis}`", rule.says) for rule in legal.RULES])


def _parameters() -> str:
    def sections(rule: rules.Rule) -> str:
        if rule.sections is None:
            return ""
        count = len(rule.sections(PRESETS["deepseek-v3"], 2))
        return {3: "q, k, v", 2: "gate, up"}[count]

    rows: list[tuple[object, ...]] = [
        (
            f"`{rule.pattern}`",
            rule.form.value,
            "every rank has all of it"
            if rule.dim is None
            else f"cut on dim {rule.dim}" + (" (on `etp`; dim 0 on `ep`)" if rule.expert else ""),
            sections(rule),
            rule.partial.value if rule.dim is None else "",
        )
        for rule in rules.TABLE
    ]
    return _table(("parameter", "layer form", "on `tp`", "sections", "gradient summed over `tp`"), rows)


def _kv_example() -> str:
    """The rows of a fused q|k|v weight under tp=4 with two KV heads, as `ShardSpec` says."""
    model, plan = PRESETS["tiny"], Plan(tp=4)
    spec = rules.specs(model, plan)["layers.0.attn.qkv.weight"]
    lines = [f"model tiny: {model.num_heads} query heads, {model.num_kv_heads} KV heads of {model.head_dim} rows; tp=4"]
    for rank in range(4):
        pieces = spec.pieces({"tp": 4}, {"tp": rank})
        ranges = "  ".join(
            f"{name} {piece.box[0][0]:>3}:{piece.box[0][1]:<3}" for name, piece in zip("qkv", pieces, strict=True)
        )
        shared = pieces[1].copies[0]
        holders = range(shared.first, shared.first + shared.count)
        lines.append(f"rank {rank}: {ranges} k, v held by ranks {', '.join(map(str, holders))}")
    return _fenced("\n".join(lines))


def _vocabulary_example() -> str:
    spec = rules.spec_of("head.weight", (50257, 768), PRESETS["gpt2"], Plan(tp=4))
    pieces = [spec.pieces({"tp": 4}, {"tp": rank})[0].box[0] for rank in range(4)]
    return _fenced("\n".join(f"rank {r}: tokens {a}:{b} ({b - a})" for r, (a, b) in enumerate(pieces)))


def _bubble(schedule: Schedule) -> Bubble:
    """Unit costs: F=1, B=1, W=1; a backward that is not split takes B + W."""
    costs = [Cost(forward=1, backward=1, weight=1)] * schedule.stages
    return bubble(simulate(schedule, costs), len(schedule.ranks))


def _bubble_words(found: Bubble) -> str:
    whole = found.ranks * found.makespan
    idle = whole - found.compute
    return f"{idle:g}/{found.compute:g} = {found.overhead:.1%} | {idle:g}/{whole:g} = {found.rate:.1%}"


def _draw(name: str, ranks: int, microbatches: int, virtual: int = 1) -> str:
    schedule = generate(name, ranks=ranks, microbatches=microbatches, virtual=virtual)
    found = _bubble(schedule)
    whole = found.ranks * found.makespan
    live = ", ".join(map(str, check(schedule).live))
    sizes = f"{name} pp={ranks} microbatches={microbatches}" + (f" virtual={virtual}" if virtual > 1 else "")
    title = f"{sizes}   (F one slot, B two)"
    facts = (
        f"idle {whole - found.compute:g} of {whole:g} slots: overhead {found.overhead:.1%}, share {found.rate:.1%}; "
        f"live microbatch-stages by rank: {live}"
    )
    return _fenced(f"{title}\n\n{grid(schedule, costs=_COSTS, width=220)}\n\n{facts}")


def _bubbles() -> str:
    rows: list[tuple[object, ...]] = []
    for ranks, microbatches in _SIZES:
        for name, virtual in (("1f1b", 1), ("interleaved", 2)):
            schedule = generate(name, ranks=ranks, microbatches=microbatches, virtual=virtual)
            live = max(check(schedule).live)
            rows.append((ranks, microbatches, virtual, f"{_bubble_words(_bubble(schedule))}", live))
    return _table(("pp", "m", "v", "overhead (idle / compute)", "share (idle / all)", "most live"), rows)


def _zero_bubble() -> str:
    schedule = Schedule.parse(EXAMPLE.read_text(encoding="utf-8"))
    plain = generate("1f1b", ranks=2, microbatches=4)
    lines = []
    for one in (plain, schedule):
        found, live = _bubble(one), check(one).live
        costs = {Kind.F: 1, Kind.B: 1 if one.splits else 2, Kind.W: 1}
        idle = found.ranks * found.makespan - found.compute
        lines += [
            f"{one.name}: {found.makespan:g} slots, idle {idle:g} of {found.ranks * found.makespan:g}; "
            f"live by rank {', '.join(map(str, live))}",
            grid(one, costs=costs),
            "",
        ]
    return _fenced(schedule.text()) + "\n" + _fenced("\n".join(lines))


def _lowered() -> str:
    schedule = generate("1f1b", ranks=2, microbatches=2)
    return _fenced(f"{schedule.text()}\n{lower(schedule).text()}")


def _refused() -> str:
    text = "0: 0F0 0B0 0F1 0B1\n1: 1F1 1B1 1F0 1B0\n"
    try:
        check(Schedule.parse(text))
    except errors.ScheduleError as error:
        return _fenced(f"{text}\n{error}")
    raise ValueError("the schedule that should be refused passed")


def _exit_codes() -> str:
    kinds: list[type[errors.PlaitError]] = [
        each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.PlaitError)
    ]
    rows: list[tuple[object, ...]] = [(0, "done; for `verify`: equal within tolerance")]
    rows.append((errors.PlaitError.exit_code, "`verify`: not equal; any other failure (with its traceback)"))
    for kind in kinds:
        if kind.exit_code not in [row[0] for row in rows]:
            says = (kind.__doc__ or "").partition("\n")[0].rstrip(".")
            rows.append((kind.exit_code, says[:1].lower() + says[1:]))
    rows.append((StoppedError.exit_code, "stopped by SIGTERM or SIGUSR1, with the state saved: `--resume` goes on"))
    rows.append((130, "interrupted with Ctrl-C; nothing is saved"))
    rows.append((129, "the terminal is gone (SIGHUP), or, 131, SIGQUIT; nothing is saved"))
    rows.append((138, "ended by SIGUSR1: its state could not be saved within `run.grace`"))
    rows.append((141, "who read the output has left, as `head` does; all ranks were ended"))
    rows.append((143, "ended by SIGTERM: its state could not be saved within `run.grace`"))
    return _table(("exit code", "meaning"), sorted(rows))


_METRICS = {
    "step": "optimizer step, from 0",
    "loss": "mean loss over the global batch's unmasked targets",
    "grad_norm": "global gradient norm, before clipping",
    "lr": "learning rate",
    "tokens": "tokens of the step",
    "step_time_s": "seconds of the step, on the slowest rank",
    "tokens_per_s": "tokens a second, all ranks together",
    "tokens_per_s_per_device": "the same, a rank",
    "bubble_rate": "1 - compute spans / (ranks x makespan), measured",
    "bubble_rate_predicted": "the simulator's, fed with mean costs of each stage, of this step or an earlier one",
    "comm_fraction": "share of the step that ranks spent in communication calls, in the mean; null on GPUs",
    "comm_bytes": "bytes sent by all ranks, by axis; `world`: what all ranks share",
    "memory_peak_bytes": "a list, one a rank: of the process, on a GPU of its allocator",
    "mfu": "model FLOPs / the device's peak; null where the peak is unknown (`device.json` says)",
}


def _metrics() -> str:
    if tuple(_METRICS) != METRIC_KEYS:
        raise ValueError("docs/generate.py explains other metrics than telemetry/record.py writes")
    rows = [*_METRICS.items(), (EVAL_KEY, "mean loss over the held-out samples, in the lines of steps that evaluate")]
    return _table(("key", "meaning"), [(f"`{name}`", says) for name, says in rows])


def _library() -> str:
    code = (ROOT / "examples" / "library.py").read_text(encoding="utf-8").rstrip()
    return f"The whole of [examples/library.py](examples/library.py):\n\n```python\n{code}\n```\n"


def _rooms() -> str:
    """Every module with the first sentence of its docstring."""

    def says(path: Path) -> str:
        doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        return doc.partition("\n\n")[0].replace("\n", " ")

    lines = ["src/plait/"]
    for path in sorted(path for path in SOURCE.glob("*.py") if path.name != "__main__.py"):
        lines.append(f"  {path.name:<20}{says(path)}")
    for room in ROOMS:
        lines.append(f"  {f'{room}/':<20}{says(SOURCE / room / '__init__.py')}")
        modules = sorted(path for path in (SOURCE / room).glob("*.py") if path.name != "__init__.py")
        lines += [f"    {path.name:<17} {says(path)}" for path in modules]
    return _fenced("\n".join(lines))


def _presets() -> str:
    rows: list[tuple[object, ...]] = [
        (f"`{name}`", c.family, c.hidden_size, c.num_layers, f"{c.num_heads}/{c.num_kv_heads}", c.vocab_size)
        for name, c in PRESETS.items()
    ]
    return _table(("preset", "family", "hidden", "layers", "heads/KV heads", "vocabulary"), rows)


BLOCKS: dict[str, Callable[[], str]] = {
    "configuration": config.markdown,
    "presets": _presets,
    "rooms": _rooms,
    "metrics": _metrics,
    "library": _library,
    "legal-rules": _legal,
    "parameter-rules": _parameters,
    "collectives": _collectives,
    "wire": _wire,
    "kv-heads": _kv_example,
    "vocabulary": _vocabulary_example,
    "gpipe": lambda: _draw("gpipe", 4, 4),
    "1f1b": lambda: _draw("1f1b", 4, 4),
    "1f1b-few": lambda: _draw("1f1b", 4, 2),
    "interleaved": lambda: _draw("interleaved", 2, 4, 2),
    "interleaved-uneven": lambda: _draw("interleaved", 4, 6, 2),
    "bubbles": _bubbles,
    "lowered": _lowered,
    "refused": _refused,
    "zero-bubble": _zero_bubble,
    "exit-codes": _exit_codes,
}
"""Name of a generated part -> what writes it, ending in a newline."""


def pages() -> list[Path]:
    """Every page that may hold generated parts."""
    found: list[Path] = []
    for name in PAGES:
        path = ROOT / name
        found += sorted(path.glob("*.md")) if path.is_dir() else [path]
    return found


def refreshed(text: str) -> str:
    """``text`` with every generated part as the code says now; KeyError for a part that nothing writes."""
    return _BLOCK.sub(lambda found: f"{found[1]}{BLOCKS[found[2]]().strip()}\n{found[4]}", text)


def named(text: str) -> list[str]:
    """The generated parts of a page."""
    return [found[2] for found in _BLOCK.finditer(text)]


def main() -> int:
    """Refresh the pages; with ``--check`` change nothing and return 1 when one is stale."""
    parser = argparse.ArgumentParser(prog="python -m docs.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when a page is stale")
    check_only = parser.parse_args().check
    stale = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        fresh = refreshed(text)
        if fresh != text:
            stale.append(page)
            if not check_only:
                page.write_text(fresh, encoding="utf-8")
    for page in stale:
        print(f"{page.relative_to(ROOT)}: {'stale' if check_only else 'refreshed'}")
    return 1 if check_only and stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
