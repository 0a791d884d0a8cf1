"""plait as a library: its public names, and the example."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import plait
from plait.core.config import load
from plait.train.run import prepare

ROOT = Path(__file__).resolve().parents[1]


def test_public_names_are_sorted_and_there() -> None:
    assert plait.__all__ == sorted(plait.__all__)
    assert set(plait.__all__) == set(plait._HOMES)
    for name in plait.__all__:
        home = sys.modules[plait._HOMES[name]] if getattr(plait, name) is not None else None
        assert getattr(home, name) is getattr(plait, name)
    assert set(plait.__all__) <= set(dir(plait))
    with pytest.raises(AttributeError, match="no attribute 'parallelise'"):
        _ = plait.parallelise  # type: ignore[attr-defined]


def test_the_version_is_the_packages() -> None:
    assert f'version = "{plait.__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_importing_plait_loads_no_torch() -> None:
    code = "import sys, plait; plait.Plan.parse('tp=2'), plait.PRESETS; assert not {'torch', 'numpy'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": f"{ROOT}/src"}, check=True)


def test_the_example_trains_on_four_ranks() -> None:
    env = {**os.environ, "PYTHONPATH": f"{ROOT}/src", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/library.py")], env=env, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    losses = [float(text) for text in re.findall(r"step \d+  loss ([\d.]+)", done.stdout)]
    assert len(losses) == 10
    assert losses[0] == pytest.approx(5.59, abs=0.05)  # log(256) = 5.55: nothing is known yet
    assert losses[-1] < losses[0] - 1


_RUNS = sorted(set((ROOT / "examples").glob("*.toml")) - {ROOT / "examples/cluster.toml"})


@pytest.mark.parametrize("file", _RUNS, ids=lambda file: file.stem)
def test_example_run_files_work(file: Path) -> None:
    config = load(file)
    missing = {"llama-hf": ["model.hf=none", "data.tokens=none"], "multi-node": ["data.tokens=none"]}
    processes = ["run.processes=16"] if file.stem == "multi-node" else []
    freeze = ["train.freeze=[]"] if file.stem == "llama-hf" else []
    setup = prepare(load(file, [*missing.get(file.stem, []), *processes, *freeze]))
    assert setup.world_size == (16 if processes else 4)
    assert config.plan.precision in (file.read_text() if config.plan.precision == "bf16" else "fp32")


def test_the_tiny_example_is_the_default() -> None:
    assert load(ROOT / "examples/tiny.toml") == load(None)
