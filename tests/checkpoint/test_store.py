from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from plait.checkpoint.manifest import seal
from plait.checkpoint.reshard import flat_to_boxes
from plait.checkpoint.store import WeightFolder, write_manifest, write_shard
from plait.checkpoint.writer import ShardRecord
from plait.core.errors import WeightsError
from plait.core.shard import Box, split

MODEL = {"family": "llama", "hidden_size": 8, "rope_scaling": None}
WEIGHTS = {
    "embed.tokens.weight": torch.arange(80, dtype=torch.float32).view(10, 8),
    "layers.0.attn.qkv.weight": torch.randn(12, 8, generator=torch.Generator().manual_seed(1)).bfloat16(),
    "norm.weight": torch.arange(7, dtype=torch.float64),
    "scale": torch.tensor(3.0, dtype=torch.float16),
}
SHAPES = {name: tuple(tensor.shape) for name, tensor in WEIGHTS.items()}


def at(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(start, stop) for start, stop in box)]


def write(folder: Path, ranks: int = 3, change: float = 0.0) -> list[ShardRecord]:
    """Store WEIGHTS the way ZeRO on ``ranks`` does: flat ranges as boxes, as views of one flat buffer."""
    records: list[ShardRecord] = []
    for rank in range(ranks):
        pieces: dict[str, list[tuple[Box, torch.Tensor]]] = {}
        for name, tensor in WEIGHTS.items():
            start, stop = split(tensor.numel(), ranks, rank)
            flat = (tensor + change).flatten()[start:stop]
            pieces[name] = []
            for box in flat_to_boxes(tuple(tensor.shape), start, stop):
                size = [b - a for a, b in box]
                pieces[name].append((box, flat[: math.prod(size)].view(size)))
                flat = flat[math.prod(size) :]
        records += write_shard(folder, rank, pieces)
    return records


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_manifest(tmp_path / "w", MODEL, SHAPES, write(tmp_path / "w"))
    return tmp_path / "w"


def edit(folder: Path, change: Callable[[dict[str, object]], None]) -> None:
    document = json.loads((folder / "manifest.json").read_text())
    change(document)
    (folder / "manifest.json").write_bytes(seal(document))


def pieces_of(document: dict[str, object], name: str = "embed.tokens.weight") -> list[dict[str, object]]:
    tensors = document["tensors"]
    assert isinstance(tensors, dict)
    found = tensors[name]["pieces"]
    assert isinstance(found, list)
    return found


def test_whole_tensors_come_back_bit_for_bit(folder: Path) -> None:
    stored = WeightFolder(folder)
    assert stored.model == MODEL
    assert set(stored.names) == set(WEIGHTS)
    for name, tensor in WEIGHTS.items():
        found = stored.read(name)
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)
        assert stored.shape(name) == tuple(tensor.shape)


@pytest.mark.parametrize(
    "box", [((0, 10), (0, 8)), ((2, 7), (3, 5)), ((3, 4), (0, 8)), ((9, 10), (7, 8)), ((4, 4), (0, 8))]
)
def test_any_box_of_any_writer(tmp_path: Path, box: Box) -> None:
    for ranks in (1, 2, 5):
        write_manifest(tmp_path / str(ranks), MODEL, SHAPES, write(tmp_path / str(ranks), ranks))
        found = WeightFolder(tmp_path / str(ranks)).read("embed.tokens.weight", box)
        assert torch.equal(found, at(WEIGHTS["embed.tokens.weight"], box))
        assert found.untyped_storage().nbytes() == found.numel() * 4  # not a view that keeps the file mapped


def test_only_the_files_of_a_box_are_opened_to_read_it(folder: Path) -> None:
    stored = WeightFolder(folder)
    document = json.loads((folder / "manifest.json").read_text())
    last = pieces_of(document)[-1]["file"]
    (folder / str(last)).unlink()
    assert stored.read("embed.tokens.weight", ((0, 1), (0, 8))).tolist() == [list(range(8))]
    with pytest.raises(WeightsError, match=str(last)):
        stored.read("embed.tokens.weight")


def test_boxes_and_names_that_are_not_there(folder: Path) -> None:
    stored = WeightFolder(folder)
    with pytest.raises(WeightsError, match="head"):
        stored.read("head.weight")
    for box in (((0, 11), (0, 8)), ((-1, 2), (0, 8)), ((0, 10),), ((3, 2), (0, 8))):
        with pytest.raises(WeightsError, match="not inside"):
            stored.read("embed.tokens.weight", box)


def test_nothing_is_readable_before_the_manifest(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(WeightsError, match="not finished"):
        WeightFolder(tmp_path)


def test_a_second_write_keeps_the_first_until_it_commits(folder: Path) -> None:
    before = {path.name for path in folder.iterdir()}
    records = write(folder, ranks=2, change=1.0)
    assert torch.equal(WeightFolder(folder).read("norm.weight"), WEIGHTS["norm.weight"])
    (folder / "rank-00009-00000000.safetensors.tmp").touch()  # left by a crash
    write_manifest(folder, MODEL, SHAPES, records)
    assert torch.equal(WeightFolder(folder).read("norm.weight"), WEIGHTS["norm.weight"] + 1)
    after = {path.name for path in folder.iterdir()}
    assert after & before == {"manifest.json"}
    assert len(after) == 3


def test_an_incomplete_write_is_not_committed(folder: Path) -> None:
    records = write(folder, change=1.0)
    for bad, word in (
        (records[1:], "embed.tokens.weight.*in no piece"),
        ([*records, records[0]], "embed.tokens.weight.*both hold"),
        ([*records, {**records[0], "tensors": {"other": ([1], "float32")}}], "other"),
        (
            [*records[:-1], {**records[-1], "tensors": {"norm.weight": ([7], "int8")}}],
            r"norm\.weight.*several dtypes: float64, int8",
        ),
    ):
        with pytest.raises(WeightsError, match=word):
            write_manifest(folder, MODEL, SHAPES, bad)
    with pytest.raises(WeightsError, match=r"manifest\.json"):
        write_manifest(folder, {"lr": float("nan")}, SHAPES, records)
    assert torch.equal(WeightFolder(folder).read("norm.weight"), WEIGHTS["norm.weight"])


def test_files_that_went_to_another_nodes_disk_are_not_committed(tmp_path: Path) -> None:
    records = write(tmp_path / "w")
    lost = tmp_path / "w" / records[-1]["file"]
    lost.rename(tmp_path / lost.name)
    with pytest.raises(WeightsError, match=f"{lost.name}.*run.dir must lie on storage that every node sees"):
        write_manifest(tmp_path / "w", MODEL, SHAPES, records)
    assert not (tmp_path / "w" / "manifest.json").exists()
    lost.hardlink_to(tmp_path / lost.name)
    write_manifest(tmp_path / "w", MODEL, SHAPES, records)


def test_writes_that_contradict_themselves(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"norm\.weight.*do not fill"):
        write_shard(tmp_path, 0, {"norm.weight": [(((0, 3),), torch.zeros(4))]})
    with pytest.raises(WeightsError, match=r"norm\.weight.*complex64"):
        write_shard(tmp_path, 0, {"norm.weight": [(((0, 3),), torch.zeros(3, dtype=torch.complex64))]})
    (tmp_path / "file").touch()
    with pytest.raises(WeightsError, match="cannot write"):
        write_shard(tmp_path / "file", 0, {"norm.weight": [(((0, 3),), torch.zeros(3))]})
    assert write_shard(tmp_path, 0, {"norm.weight": [(((3, 3),), torch.zeros(0))]}) == []
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_column_shard_and_tensors_without_elements(tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    records = [
        record
        for rank in range(2)
        for record in write_shard(
            tmp_path, rank, {"w": [(((0, 3), (2 * rank, 2 * rank + 2)), whole[:, 2 * rank : 2 * rank + 2])]}
        )
    ]
    write_manifest(tmp_path, MODEL, {"w": (3, 4), "none": (0, 4)}, json.loads(json.dumps(records)))
    assert torch.equal(WeightFolder(tmp_path).read("w"), whole)
    assert WeightFolder(tmp_path).read("none").shape == (0, 4)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "a/x.safetensors", "x.bin", "..", "", "C:x.safetensors"]
)
def test_file_names_that_leave_the_folder(folder: Path, name: str) -> None:
    def change(document: dict[str, object]) -> None:
        files = document["files"]
        assert isinstance(files, dict)
        files[name] = files.pop(pieces_of(document)[0]["file"])
        pieces_of(document)[0].update(file=name)

    edit(folder, change)
    with pytest.raises(WeightsError, match="plain name"):
        WeightFolder(folder)


@pytest.mark.parametrize("name", ["../x.safetensors", "other.safetensors", 3, None, []])
def test_pieces_in_files_that_are_not_named(folder: Path, name: object) -> None:
    edit(folder, lambda document: pieces_of(document)[0].update(file=name))
    with pytest.raises(WeightsError, match=r"embed\.tokens\.weight.*(none of the files|have to be names)"):
        WeightFolder(folder)


def test_links_out_of_the_folder(folder: Path, tmp_path: Path) -> None:
    inside = next(folder.glob("rank-00001-*"))
    inside.rename(tmp_path / inside.name)
    inside.symlink_to(tmp_path / inside.name)
    with pytest.raises(WeightsError, match="link out"):
        WeightFolder(folder)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda d: d.update(format="other"), "not a manifest"),
        (lambda d: d.update(version=2), "version 2; this plait reads version 1"),
        (lambda d: d.update(tensors=[]), "objects"),
        (lambda d: d.update(scalars=None), "objects"),
        (lambda d: d.update(scalars={}), "hold no model"),
        (lambda d: d["tensors"].update(x=3), "'x'"),
        (lambda d: d["tensors"].update(x={"dtype": "float32", "pieces": []}), "'x': 'shape' is missing"),
        (lambda d: d["tensors"]["scale"].update(dtype="object"), "'scale'.*object"),
        (lambda d: d["tensors"]["scale"].update(dtype=[]), "'scale'"),
        (lambda d: d["tensors"]["norm.weight"].update(shape=[8]), "'norm.weight'.*1 of the 8"),
        (lambda d: d["tensors"]["norm.weight"].update(shape=[-7]), "'norm.weight': -7 is not a size"),
        (lambda d: d["tensors"]["norm.weight"].update(shape=[7.0]), "'norm.weight'.*7.0"),
        (lambda d: pieces_of(d).pop(), "in no piece"),
        (lambda d: pieces_of(d).append(pieces_of(d)[0]), "both hold"),
        (lambda d: pieces_of(d)[0].update(box=[[0, 11], [0, 8]]), "does not fit"),
        (lambda d: pieces_of(d)[0].update(box=[[0, 3]]), "does not fit"),
        (lambda d: pieces_of(d)[0].update(box=[[0, 3, 4], [0, 8]]), "embed"),
        (lambda d: pieces_of(d)[0].update(box=[["0", 3], [0, 8]]), "not a size"),
        (lambda d: pieces_of(d)[0].pop("key"), "'key' is missing"),
        (lambda d: pieces_of(d)[0].update(key="nothing"), "missing or damaged"),
        (lambda d: pieces_of(d)[0].update(key="norm.weight.0"), "the manifest says"),
        (
            lambda d: pieces_of(d)[0].update(key="embed.tokens.weight.1"),
            r"F32 \[1, 3\]; the manifest says F32 \[3, 8\]",
        ),
        (lambda d: d["tensors"]["norm.weight"].update(dtype="float32"), "F64.*the manifest says F32"),
    ],
)
def test_damaged_manifests(folder: Path, change: Callable[[dict[str, object]], None], word: str) -> None:
    edit(folder, change)
    with pytest.raises(WeightsError, match=word) as caught:
        WeightFolder(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000])
def test_manifests_that_are_none(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_text(text)
    with pytest.raises(WeightsError, match=r"manifest\.json"):
        WeightFolder(folder)


@pytest.mark.parametrize("keep", [0, 7, 40, -1])
def test_truncated_files(folder: Path, keep: int) -> None:
    file = next(folder.glob("rank-00001-*"))
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(WeightsError, match=file.name):
        WeightFolder(folder)


def test_a_missing_and_a_swapped_file(folder: Path) -> None:
    file = next(folder.glob("rank-00001-*"))
    tensors = load_file(file)
    save_file({**tensors, "norm.weight.0": tensors["norm.weight.0"].float()}, file)
    with pytest.raises(WeightsError, match=f"{file.name} is missing or damaged: it holds"):
        WeightFolder(folder)
    file.unlink()
    with pytest.raises(WeightsError, match=f"{file.name} is missing"):
        WeightFolder(folder)


def test_the_manifest_is_as_documented(folder: Path) -> None:
    document = json.loads((folder / "manifest.json").read_text())
    assert document["format"] == "plait-checkpoint"
    assert document["version"] == 1
    assert document["step"] is None
    assert document["scalars"] == {"model": MODEL}
    entry = document["tensors"]["norm.weight"]
    assert entry["shape"] == [7]
    assert entry["dtype"] == "float64"
    assert sum(b - a for piece in entry["pieces"] for a, b in piece["box"]) == 7
