from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from plait.checkpoint import catalog, commands, steps
from plait.checkpoint.manifest import seal
from plait.core.errors import ConfigError, WeightsError
from tests.checkpoint.ranks import assert_state, save, state


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Steps 1 to 4 in the checkpoints of a run, the last of them damaged at a byte."""
    for step in range(1, 5):
        save(tmp_path / "run/checkpoints", 2, step, keep=10)
    flip(tmp_path / "run/checkpoints/step-00000004/rank-00001.safetensors")
    return tmp_path / "run/checkpoints"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def names(folder: Path) -> list[str]:
    return [entry.path.name for entry in steps.committed(folder)]


def test_list_names_all_from_old_to_new(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "step-00000003/manifest.json").unlink()
    (folder / "step-00000009.tmp-0123abcd").mkdir()
    (folder / "step-00000008.bad").mkdir()
    rows = catalog.list_(folder)
    assert [(row.name, row.step, row.files) for row in rows] == [
        ("step-00000001", 1, 2),
        ("step-00000002", 2, 2),
        ("step-00000003", 3, 0),
        ("step-00000004", 4, 2),
    ]
    assert rows[0].tensors == len(state(1))
    assert rows[0].bytes == sum(p.stat().st_size for p in (folder / "step-00000001").glob("*.safetensors"))
    assert [row.trouble is None for row in rows] == [True, True, False, True]  # bytes are not read
    assert catalog.list_(folder.parent) == rows  # the run folder means the same
    assert catalog.list_(folder / "step-00000002") == rows[1:2]
    assert commands.list_(folder) == 0
    text = capsys.readouterr().out
    assert "step-00000003" in text
    assert "holds no manifest.json" in text
    commands.list_(folder, as_json=True)
    assert json.loads(capsys.readouterr().out)[1]["step"] == 2


def test_show_has_kinds_files_and_scalars(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = catalog.show(folder)
    assert shown.step == 4
    groups = {group.kind: group for group in shown.groups}
    wanted = [tensor for name, tensor in state(4).items() if name.startswith("weights/")]
    assert groups["weights"].elements == sum(tensor.numel() for tensor in wanted)
    assert groups["weights"].bytes == sum(tensor.nbytes for tensor in wanted)
    assert set(groups) == {"weights", "exp_avg", "router", "optimizer"}
    assert shown.scalars["plan"] == "tp=2 dp=2"
    assert commands.show(folder) == 0
    text = capsys.readouterr().out
    assert "step 4" in text
    assert "rank-00001.safetensors" in text
    assert "plan: tp=2 dp=2" in text


def test_what_would_load(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in state(4).items()}
    fit = catalog.fit(folder / "step-00000004", shapes)
    assert fit.loads
    assert fit.found == {name: tensor.nbytes for name, tensor in state(4).items()}
    del shapes["optimizer/step"]
    fit = catalog.fit(folder / "step-00000004", {**shapes, "weights/rows": (8, 9), "master/x": (3,)})
    assert not fit.loads
    assert fit.missing == ("master/x",)
    assert fit.other == {"weights/rows": ((9, 8), (8, 9))}
    assert fit.left == ("optimizer/step",)
    assert commands.show(folder, wanted={"master/x": (3,)}) == WeightsError.exit_code
    assert "missing: master/x" in capsys.readouterr().out
    assert commands.show(folder, wanted=shapes, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["fit"]["left"] == ["optimizer/step"]


def test_verify_reads_every_byte(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = catalog.verify(folder)
    assert [len(row.damage) for row in rows] == [0, 0, 0, 1]
    assert "rank-00001.safetensors is damaged between bytes 0 and" in rows[3].damage[0]
    assert commands.verify(folder) == WeightsError.exit_code
    text = capsys.readouterr().out
    assert "step-00000001: whole" in text
    assert "is damaged" in text
    assert commands.verify(folder / "step-00000001", as_json=True) == 0
    (folder / "step-00000001/rank-00000.safetensors").unlink()
    assert "is missing" in catalog.verify(folder)[0].damage[0]


def test_prune_keeps_the_newest_good_ones(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "step-00000004/rank-00000.safetensors").unlink()  # does not count as kept, and is not taken away
    (folder / "step-00000009.tmp-0123abcd").mkdir()
    assert commands.prune(folder, keep=1, keep_every=2) == 0
    assert capsys.readouterr().out == "removed step-00000001\n"
    assert names(folder) == ["step-00000002", "step-00000003", "step-00000004"]
    assert commands.prune(folder.parent, keep=1, as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == {"removed": ["step-00000002"]}
    live = "step-00000009.tmp-0123abcd"  # a run may be saving
    assert sorted(os.listdir(folder)) == ["latest.json", "step-00000003", "step-00000004", live]
    assert_state(folder / "step-00000003", 3)
    commands.prune(folder, keep=1)
    assert capsys.readouterr().out == "nothing to remove\n"
    for keep, every in ((0, 0), (-1, 0), (1, -1)):
        with pytest.raises(ConfigError, match="at least"):
            catalog.prune(folder, keep=keep, keep_every=every)
    with pytest.raises(ConfigError, match="is one checkpoint"):
        catalog.prune(folder / "step-00000003", keep=1)


def test_a_second_save_of_a_step_is_the_newer_one(tmp_path: Path) -> None:
    for _ in range(3):
        save(tmp_path, 2, 5, keep=10)
    assert names(tmp_path) == ["step-00000005-3"]
    save(tmp_path, 2, 4, keep=10)  # an older step, saved later, stays where it belongs
    assert names(tmp_path) == ["step-00000004", "step-00000005-3"]


def test_folders_without_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert catalog.list_(tmp_path) == []
    assert commands.list_(tmp_path) == 0
    assert commands.verify(tmp_path) == 0
    assert "holds no checkpoint" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        catalog.show(tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        catalog.list_(tmp_path / "absent")


def test_a_manifest_of_another_program_is_named(folder: Path) -> None:
    path = folder / "step-00000002/manifest.json"
    path.write_bytes(seal({"format": "other"}))
    assert "not a manifest of plait" in str(catalog.list_(folder)[1].trouble)
    shutil.rmtree(folder / "step-00000002")
    (folder / "step-00000002").write_text("a file")
    assert [row.name for row in catalog.list_(folder)] == ["step-00000001", "step-00000003", "step-00000004"]
