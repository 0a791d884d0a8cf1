"""Tables, pictures and the commands: what users and programs read of a plan."""

from __future__ import annotations

import io
import json
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from plait.core.errors import ConfigError, PlanError
from plait.core.events import COMPUTE, Event
from plait.core.plan import Plan
from plait.models.config import PRESETS
from plait.models.families import to_hf
from plait.planner import picture, ranking, show
from plait.planner.commands import fixed, model_named, plan_command, read_plan, simulate_command

REQUEST = {"model": "llama3-8b", "cluster_name": "h100", "gpus": 16, "seq": 4096, "global_batch": 32}


def page(**keys: object) -> str:
    console = Console(file=io.StringIO(), width=160, highlight=False)
    plan_command(**{**REQUEST, **keys}, console=console)  # type: ignore[arg-type]
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_ranking_and_the_plan_file_hold_the_same_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.toml"
    text = page(top=3, output=file)
    for word in (
        "16 x H100-80GB-SXM",
        "dp=16 across network",
        "2bw and compress",
        "MFU",
        "fullest",
        "bubble",
        "why others lost",
        "recompute=full",
    ):
        assert word in text
    plan_command(**REQUEST, top=3, as_json=True)  # type: ignore[arg-type]
    found = json.loads(capsys.readouterr().out)
    assert len(found["plans"]) == 3
    times = [plan["step_time"] for plan in found["plans"]]
    assert times == sorted(times)
    best = found["plans"][0]
    assert found["placement"] == {"dp": "network"}
    assert Plan.parse(best["plan"]) == read_plan(file)
    assert best["low"] < best["step_time"] < best["high"]
    assert best["peak_memory"] <= found["memory_limit"]
    assert len(best["ranks"]) == Plan.parse(best["plan"]).pp
    assert {one["kind"] for one in found["lost"]} >= {"recompute=full", "tp=2"}
    written = file.read_text(encoding="utf-8")
    assert "# predicted:" in written and "--global-batch 32" in written
    assert tomllib.loads(written)["plan"]["precision"] == "bf16"


def test_where_axes_lie(capsys: pytest.CaptureFixture[str]) -> None:
    keys = {"fix": ["tp=2", "pp=4", "dp=2", "order=dp-pp-cp-tp"], "top": 1}
    assert "tp=2 pp=4 within the nvlink domains of 8; dp=2 across network" in page(**keys)
    keys["fix"] = ["tp=2", "pp=4", "dp=2", "order=pp-dp-cp-tp"]
    plan_command(**REQUEST, **keys, as_json=True)  # type: ignore[arg-type]
    assert json.loads(capsys.readouterr().out)["placement"] == {"tp": "nvlink", "dp": "nvlink", "pp": "network"}


def test_what_does_not_fit_is_an_error_that_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    small = {**REQUEST, "cluster_name": "a100-40g", "gpus": 2, "seq": 8192}
    with pytest.raises(PlanError, match=r"no plan for 2 devices fits.*more memory.*what fits"):
        plan_command(**small, as_json=True)  # type: ignore[arg-type]
    found = json.loads(capsys.readouterr().out)
    assert found["plans"] == [] and found["nearest"]["peak_memory"] > found["memory_limit"]


def test_one_plan_in_detail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.toml"
    file.write_text("[plan]\ntp = 2\npp = 4\ndp = 2\nzero = 1\nprecision = 'bf16'\n", encoding="utf-8")
    keys = {"model": "llama3-8b", "cluster_name": "h100", "seq": 4096, "global_batch": 16}
    console = Console(file=io.StringIO(), width=140, highlight=False)
    trace, svg = tmp_path / "trace.json", tmp_path / "step.svg"
    simulate_command(file, **keys, console=console, trace=trace, svg=svg)  # type: ignore[arg-type]
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for word in ("tp exposed", "optimizer", "activations", "forward of microbatch", "rank 3", "F forward"):
        assert word in text
    events = [row for row in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"] if row["ph"] == "X"]
    assert sum(row["cat"] == "F" for row in events) == 4 * 8
    ElementTree.parse(svg)
    simulate_command(file, **keys, as_json=True)  # type: ignore[arg-type]
    found = json.loads(capsys.readouterr().out)
    assert len(found["ranks"]) == 4
    rank = found["ranks"][0]["time"]
    spent = rank["compute"] + sum(rank["exposed"].values()) + rank["bubble"] + rank["optimizer"] + rank["other"]
    assert 0.5 * found["step_time"] < spent < 1.1 * found["step_time"]
    with pytest.raises(PlanError, match="global batch"):
        simulate_command(file, **{**keys, "global_batch": 15})  # type: ignore[arg-type]


def test_models_come_from_presets_folders_and_files(tmp_path: Path) -> None:
    model = PRESETS["llama3-8b"]
    assert model_named("llama3-8b") == model
    (tmp_path / "config.json").write_text(json.dumps(to_hf(model)), encoding="utf-8")
    assert model_named(str(tmp_path)).num_layers == model.num_layers
    assert model_named(str(tmp_path / "config.json")).hidden_size == model.hidden_size
    toml = tmp_path / "model.toml"
    toml.write_text('[model]\npreset = "llama3-8b"\nnum_layers = 5\n', encoding="utf-8")
    assert model_named(str(toml)).num_layers == 5
    with pytest.raises(ConfigError, match="neither a preset"):
        model_named("llama3-9b")
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}', encoding="utf-8")
    with pytest.raises(ConfigError, match="mamba"):
        model_named(str(tmp_path))
    toml.write_text("[model]\npreset = 'llama3-8b'\nlayers = 5\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="layers"):
        model_named(str(toml))


def test_keys_that_are_given() -> None:
    assert fixed(["tp=8", "schedule=gpipe", "recompute='full:0-3 selective:4'"]) == {
        "tp": 8,
        "schedule": "gpipe",
        "recompute": "full:0-3 selective:4",
    }
    assert fixed([]) == {}
    with pytest.raises(ConfigError, match="unknown key 'tq'"):
        fixed(["tq=8"])
    with pytest.raises(ConfigError, match="key=value"):
        fixed(["tp"])


def step(*spans: tuple[int, str, float, float]) -> list[Event]:
    return [
        Event(rank=rank, stream=COMPUTE, kind=kind, name=f"{rank}{kind}<0>", start=start, end=end)
        for rank, kind, start, end in spans
    ]


def test_the_terminal_picture_shows_who_is_busy_when() -> None:
    events = step((0, "F", 0, 2), (1, "F", 2, 4), (1, "B", 4, 8), (0, "B", 8, 10))
    lines = picture.terminal(events, width=27).plain.splitlines()
    assert lines[0] == "rank 0 FFFF············BBBB"
    assert lines[1] == "rank 1 ····FFFFBBBBBBBB····"
    assert "F forward" in lines[2] and "B backward" in lines[2]


def test_the_svg_is_well_formed_and_its_text_is_escaped() -> None:
    events = step((0, "F", 0.0, 2.0), (1, "B", 2.0, 10.0))
    root = ElementTree.fromstring(picture.svg(events, title="a < b & 'c'"))
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "a < b & 'c'" in texts and "rank 1" in texts and "1B<0>" in texts
    boxes = [node for node in root.iter("{http://www.w3.org/2000/svg}rect") if node.get("fill") == "#3b78b8"]
    assert float(boxes[0].get("width") or 0) == pytest.approx(0.2 * (1200 - 64 - 12), abs=1.0)


def test_pictures_of_many_ranks_show_some_of_them() -> None:
    assert picture.shown_ranks(4) == [0, 1, 2, 3]
    chosen = picture.shown_ranks(1000)
    assert chosen[0] == 0 and chosen[-1] == 999 and len(chosen) == picture.ROWS
    shown = show.chosen([1.0] * 40 + [9.0] + [2.0] * 23)
    assert {0, 40, 63} <= set(shown) and len(shown) <= show.RANKS


def test_an_empty_timeline_is_drawn_as_nothing() -> None:
    assert "rank 0" in picture.terminal([], width=40).plain
    ElementTree.fromstring(picture.svg([], title="nothing"))


@pytest.mark.parametrize(
    ("value", "text"), [(12.345, "12.3 s"), (123.4, "123 s"), (0.00456, "4.56 ms"), (2e-7, "0.20 us"), (0.0, "0")]
)
def test_seconds_in_words(value: float, text: str) -> None:
    assert ranking.seconds(value) == text


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_numbers_are_whole_at_any_width(width: int) -> None:
    """Columns go where there is no room; they were cut in the middle of their numbers once."""
    console = Console(file=io.StringIO(), width=width, highlight=False)
    plan_command(**REQUEST, top=3, console=console)  # type: ignore[arg-type]
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\u2026" not in text
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    assert "exposed + hidden" in text
    assert ("emptiest" in text) is (width >= 100)


def test_simulate_refuses_what_is_no_step(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text('[plan]\ntp = 8\nprecision = "fp8"\n')
    with pytest.raises(PlanError, match="fp8"):
        simulate_command(file, model="llama3-8b", cluster_name="a100-80g", seq=512, global_batch=8)
    file.write_text("[plan]\ndp = 8\n")
    with pytest.raises(ConfigError, match="global_batch=100000000000000000003"):
        simulate_command(file, model="llama3-8b", cluster_name="h100", seq=512, global_batch=10**20 + 3)
