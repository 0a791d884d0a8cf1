"""What a person sees of a run: a live display on a terminal, plain lines in a log, JSON lines for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from plait.models.config import parameter_count
from plait.telemetry import report
from plait.telemetry.record import EVAL_KEY
from plait.train.run import Setup

REFRESH_SECONDS = 0.25
PLAIN_LINES = 20
"""Lines of a run's log, roughly."""
_BARS = "▁▂▃▄▅▆▇█"
_MEMORY_RANKS = 8
"""Ranks whose memory is shown one by one; of more, the least and the most."""


@final
class _Terminal(Console):
    """rich's own, except that a reader who has left is an error like any other: rank 0 must not end as if it failed."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich calls this while it handles one


@final
class Progress:
    """Shows rows of ``metrics.jsonl`` as they come; silent where ``shown`` is off. A context manager, also again: it
    goes on with what it has seen."""

    def __init__(self, setup: Setup, *, shown: bool, as_json: bool, console: Console | None = None) -> None:
        self._setup = setup
        self._shown = shown
        self._json = as_json
        self._console = console if console is not None else _Terminal(highlight=False)
        self._live: Live | None = None
        self._begin = monotonic()
        self._drawn = 0.0
        self._losses: list[float] = []
        self._rates: list[float] = []
        self._row: Mapping[str, Any] = {}
        self._from = 0
        """The first step that this process has seen: above 0 in a run that went on."""
        self._eval: float | None = None

    def __enter__(self) -> Progress:
        if not self._losses:
            self._begin = monotonic()
        if self._shown and not self._json and self._console.is_terminal:
            self._live = Live(Text("first step"), console=self._console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, row: Mapping[str, Any]) -> None:
        """One step has ended."""
        if not self._shown:
            return
        self._row = row
        if not self._losses:
            self._from = int(row["step"])
        self._losses.append(row["loss"])
        self._rates.append(row["tokens_per_s"])
        self._eval = row.get(EVAL_KEY, self._eval)
        last = row["step"] + 1 == self._setup.config.train.steps
        if self._json:
            print(json.dumps(row), flush=True)
        elif self._live is not None:
            # Drawn from here, not from a thread: the rank that draws also computes.
            if last or monotonic() - self._drawn >= REFRESH_SECONDS:
                self._live.update(self.picture(), refresh=True)
                self._drawn = monotonic()
        elif last or row["step"] % max(1, self._setup.config.train.steps // PLAIN_LINES) == 0 or EVAL_KEY in row:
            self._console.print(self._line(), soft_wrap=True)
            sys.stdout.flush()

    def done(self, folder: Path) -> None:
        """The run has ended and left ``folder``."""
        if not self._shown:
            return
        self.__exit__(None, None, None)
        if self._json:
            compared = [asdict(row) | {"error": row.error} for row in report.read(folder).compared]
            result = {"run_dir": str(folder), "steps": self._row["step"] + 1, "from_step": self._from}
            print(json.dumps(result | {"loss": self._losses[-1], "compared": compared}), flush=True)
        else:
            found = report.read(folder)
            self._console.print(report.table(found.compared))
            first = found.loss[0] if found.loss is not None else self._losses[0]
            self._console.print(self._summary(folder, first), soft_wrap=True)

    def picture(self) -> RenderableType:
        """The live display."""
        row, steps = self._row, self._setup.config.train.steps
        done = row["step"] + 1
        spent = monotonic() - self._begin
        bar = Table.grid(padding=(0, 2), expand=True)
        bar.add_column(ratio=1)
        for _ in range(3):
            bar.add_column(no_wrap=True)
        left = f"{_clock(spent / len(self._losses) * (steps - done))} left"
        bar.add_row(ProgressBar(total=steps, completed=done), f"step {done}/{steps}", f"{_clock(spent)}", left)
        cells = Table.grid(padding=(0, 3))
        cells.add_row(
            _cell("loss", f"{row['loss']:.3f}"),
            Text(sparkline(self._losses, 24), style="cyan"),
            _cell("held out", "–" if self._eval is None else f"{self._eval:.3f}"),
            _cell("norm", f"{row['grad_norm']:.2f}"),
            _cell("lr", f"{row['lr']:.1e}"),
        )
        speeds = Table.grid(padding=(0, 3))
        speeds.add_row(
            _cell("tokens/s", f"{row['tokens_per_s']:,.0f}"),
            _cell("bubble", f"{_percent(row['bubble_rate'])} (simulated {_percent(row['bubble_rate_predicted'])})"),
            _cell("communication", _percent(row["comm_fraction"])),
            *([] if row["mfu"] is None else [_cell("MFU", _percent(row["mfu"]))]),
        )
        return Group(bar, cells, speeds, _cell("memory a rank", _memory(row["memory_peak_bytes"])))

    def _line(self) -> str:
        row = self._row
        held_out = f"  held out {row[EVAL_KEY]:.3f}" if EVAL_KEY in row else ""
        return (
            f"step {row['step'] + 1}/{self._setup.config.train.steps}  loss {row['loss']:.3f}{held_out}"
            f"  norm {row['grad_norm']:.2f}  lr {row['lr']:.1e}  {row['tokens_per_s']:,.0f} tokens/s"
            f"  bubble {_percent(row['bubble_rate'])} (simulated {_percent(row['bubble_rate_predicted'])})"
            f"  comm {_percent(row['comm_fraction'])}  memory {_memory(row['memory_peak_bytes'])}"
        )

    def _summary(self, folder: Path, first: float) -> Text:
        """``first``: the loss of the run's first step."""
        rates = sorted(self._rates)
        name, spent = _short(folder), _clock(monotonic() - self._begin)
        took = f"in {spent}" if not self._from else f"(from step {self._from} on in {spent})"
        lines = Text.assemble(
            ("done ", "bold green"),
            f"{self._row['step'] + 1} steps {took}, loss {first:.3f} → ",
            (f"{self._losses[-1]:.3f}", "bold"),
            f", median {rates[len(rates) // 2]:,.0f} tokens/s",
        )
        found = (
            (name, "config.toml  metrics.jsonl  checkpoints/  weights/  and what else the run left"),
            (f"plait report {name}", "promise beside fact, and what happened"),
            (f"plait verify {name}/config.toml", "does this cut compute what one process computes?"),
            (f"plait convert {name} {name}/hf", "weights for Hugging Face"),
            (f"{name}/trace.json", "one step, for ui.perfetto.dev"),
        )
        width = max(len(command) for command, _ in found)
        for command, meaning in found:
            lines.append(f"\n  {command:{width}}", "cyan").append(f"   {meaning}")
        return lines


def heading(setup: Setup) -> Text:
    """What is about to run, and where."""
    head = Text.assemble(
        ("plait ", "bold"),
        f"{setup.model.family}, {parameter_count(setup.model):,} parameters · ",
        (str(setup.plan) or "one rank", "bold cyan"),
        f" · {setup.world_size} {'rank' if setup.world_size == 1 else 'ranks'}",
    )
    folder = setup.config.run.dir
    return head if folder is None else head.append(f"\n{_short(folder)}", "dim")


def sparkline(values: list[float], width: int) -> str:
    """``values`` as at most ``width`` bars, each the mean of its share of them."""
    count = min(width, len(values))
    means = [sum(part) / len(part) for part in (_share(values, count, i) for i in range(count))]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def _share(values: list[float], parts: int, index: int) -> list[float]:
    return values[index * len(values) // parts : (index + 1) * len(values) // parts]


def _cell(name: str, value: str) -> Text:
    return Text.assemble((f"{name} ", "dim"), (value, "bold"))


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _memory(peaks: list[int]) -> str:
    megabytes = [f"{peak / 1e6:,.0f}" for peak in peaks]
    if len(peaks) > _MEMORY_RANKS:
        return f"{min(peaks) / 1e6:,.0f} to {max(peaks) / 1e6:,.0f} MB a rank"
    return " | ".join(megabytes) + " MB"


def _short(path: Path) -> str:
    """``path`` as a person here would type it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
