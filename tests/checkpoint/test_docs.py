"""The program in docs/checkpoint.md reads what plait writes, without plait."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch

from tests.checkpoint.ranks import save, state

PAGE = Path(__file__).resolve().parents[2] / "docs/checkpoint.md"


def test_another_program_reads_a_checkpoint_by_the_page(tmp_path: Path) -> None:
    found = re.search(r"<!-- tested: [^>]* -->\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    program = tmp_path / "read.py"
    program.write_text(found[1])
    save(tmp_path, 3, 1)
    command = [sys.executable, "-I", "-W", "error", str(program), str(tmp_path / "step-00000001")]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    seen = {line.split(" ", 1)[0]: line for line in lines}
    assert set(seen) == set(state(1))
    for name, tensor in state(1).items():
        bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
        assert f" {tuple(tensor.shape)} {float(bits.double().sum())}" in seen[name] or abs(
            float(seen[name].rsplit(" ", 1)[1]) - float(bits.double().sum())
        ) <= 1e-9 * float(bits.double().abs().sum())
    damaged = tmp_path / "step-00000001/rank-00001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x77")
    assert subprocess.run(command, capture_output=True, timeout=60).returncode != 0
