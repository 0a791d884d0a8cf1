"""The benchmarks run: not what they show, which is a matter of minutes on a quiet machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


def _python(*words: str) -> str:
    done = subprocess.run([sys.executable, *words], cwd=FOLDER, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_claims_give_a_line_each_and_state_is_within_5_percent_of_the_formula(tmp_path: Path) -> None:
    out = tmp_path / "claims.json"
    text = _python("claims.py", "--quick", "--only", "zero", "--json", str(out))
    claims = json.loads(out.read_text())["parts"]["zero"]
    assert [claim["claim"].partition(",")[0] for claim in claims] == ["bytes of state a rank"] * 2
    assert all(claim["verdict"].startswith("within ") for claim in claims), claims
    assert len(text.splitlines()) == 2 + len(claims)


def test_formulas_of_the_claims() -> None:
    found = _python(
        "-c",
        "import json\n"
        "from claims_memory import formula as memory\n"
        "from claims_pipeline import formula as bubble\n"
        "print(json.dumps([[memory(4, level, 2, kind) for level in range(4)] for kind in ('fp32', 'bf16')]))\n"
        "print(json.dumps([bubble('1f1b', 1, 4), bubble('interleaved', 2, 4), bubble('zb-h1', 1, 4)]))\n",
    ).splitlines()
    assert json.loads(found[0]) == [[64, 48, 40, 32], [72, 48, 40, 36]]
    assert json.loads(found[1]) == [1 / 5, 1 / 9, 1 / 13]


def test_every_row_of_the_peers_names_a_plan_of_its_ranks() -> None:
    found = _python(
        "-c",
        "from peers_rows import ROWS\n"
        "from plait.core.plan import Plan\n"
        "names = [row.name for row in ROWS]\n"
        "assert len(set(names)) == len(names)\n"
        "for row in ROWS:\n"
        "    plan = Plan.parse(row.plan).resolve(row.ranks)\n"
        "    assert all(make().ranks in (1, row.ranks) for make in row.peers), row.name\n"
        "print(len(names))\n",
    )
    assert int(found) >= 18
