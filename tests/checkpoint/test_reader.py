"""Any boxes of a checkpoint, whoever wrote them; damage found and passed over; the newest that every rank can read."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from plait.checkpoint import ranges
from plait.checkpoint.disk import BLOCK
from plait.checkpoint.ranges import Read, chunks
from plait.checkpoint.reader import Checkpoint, Request, agree_latest, latest
from plait.checkpoint.saver import Saver
from plait.checkpoint.state import Piece, Snapshot
from plait.core.errors import WeightsError
from plait.core.shard import Box, full, split
from tests.checkpoint.ranks import SCALARS, Alone, OneThread, assert_state, save, state, together


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2, saved by three ranks."""
    folder = tmp_path_factory.mktemp("made")
    for step in (1, 2):
        save(folder, 3, step)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of `made` to be damaged."""
    shutil.copytree(made, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def at(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(start, stop) for start, stop in box)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_round_trip_of_every_form(ranks: int, tmp_path: Path) -> None:
    for saved in save(tmp_path, ranks, 1, asynchronous=False):
        assert saved.error is None
    assert_state(tmp_path / "step-00000001", 1)


def test_files_are_what_safetensors_reads(made: Path) -> None:
    """Another program needs no more than the manifest: its keys, or its bytes."""
    opened = Checkpoint.open(made / "step-00000002")
    for name, tensor in opened.manifest.tensors.items():
        for piece in tensor.pieces:
            block = load_file(made / "step-00000002" / piece.file)[piece.key]
            whole = state(2)[name]
            assert torch.equal(block, at(whole, piece.box))
            raw = (made / "step-00000002" / piece.file).read_bytes()[piece.offset : piece.offset + block.nbytes]
            assert raw == block.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_what_it_says_of_itself(made: Path) -> None:
    opened = Checkpoint.open(made / "step-00000002")
    assert opened.step == 2
    assert opened.scalars == {**SCALARS, "step": 2}
    assert set(opened.names) == set(state(2))
    for name, tensor in state(2).items():
        assert opened.shape(name) == tuple(tensor.shape)
        assert opened.dtype(name) == tensor.dtype
    with pytest.raises(WeightsError, match="holds no tensor 'weights/other'"):
        opened.read("weights/other")


def test_boxes_one_after_the_other(made: Path) -> None:
    opened = Checkpoint.open(made / "step-00000001")
    rows = state(1)["weights/rows"]
    boxes: list[Box] = [((2, 7), (3, 5)), ((9, 9), (0, 8)), ((8, 9), (7, 8)), ((0, 9), (0, 8))]
    wanted = torch.cat([at(rows, box).reshape(-1) for box in boxes])
    assert torch.equal(opened.read("weights/rows", boxes), wanted)
    assert opened.read("weights/rows", []).shape == (0,)
    assert opened.read("weights/none").shape == (0, 4)
    into = torch.full((wanted.numel(),), 9.0)
    assert opened.read("weights/rows", boxes, out=into) is into
    assert torch.equal(into, wanted)
    half = opened.read("weights/rows", [full((9, 8))], out=torch.empty(9, 8, dtype=torch.bfloat16))
    assert torch.equal(half, rows.bfloat16())
    for bad in (((0, 10), (0, 8)), ((-1, 2), (0, 8)), ((3, 2), (0, 8)), ((0, 9),)):
        with pytest.raises(WeightsError, match="is not inside weights/rows"):
            opened.read("weights/rows", [bad])
    for out in (torch.empty(3), torch.empty(9, 16)[:, ::2]):
        with pytest.raises(WeightsError, match="weights/rows: boxes of 72 elements do not go into"):
            opened.read("weights/rows", out=out)


def test_every_element_is_counted(made: Path) -> None:
    opened = Checkpoint.open(made / "step-00000001")
    requests = [
        Request(name=name, boxes=[full(tuple(t.shape))], out=torch.empty_like(t)) for name, t in state(1).items()
    ]
    assert opened.load(requests) == sum(tensor.numel() for tensor in state(1).values())
    for request, tensor in zip(requests, state(1).values(), strict=True):
        assert torch.equal(request.out, tensor)


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_any_block_of_any_piece(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Strided blocks in every way that they are cut into reads: small limits stand for large tensors."""
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    path = tmp_path_factory.getbasetemp() / "block.bin"
    path.write_bytes(bytes(24) + whole.numpy().tobytes())
    box = tuple(tuple(sorted((data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, size))))) for size in shape)
    box = tuple((low, max(low + 1, high)) for low, high in box)
    wanted = at(whole, box)
    strides = tuple(whole.stride())
    start = sum(low * stride for (low, _), stride in zip(box, strides, strict=True))
    outer = torch.full((*wanted.shape[:-1], wanted.shape[-1] + 2), -1)
    out = outer[..., 1:-1] if data.draw(st.booleans()) else torch.full(wanted.shape, -1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges, "CHUNK", data.draw(st.sampled_from([8, 24, 64, 1 << 20])))
        patch.setattr(ranges, "FAR", data.draw(st.sampled_from([0, 32, 1 << 20])))
        patch.setattr(ranges, "SPARSE", data.draw(st.sampled_from([1, 3])))
        parts = list(chunks(Read(file="", offset=24 + 8 * start, strides=strides, out=out)))
        descriptor = os.open(path, os.O_RDONLY)
        for part in parts:
            part.read(descriptor)
        os.close(descriptor)
    assert torch.equal(out, wanted)
    assert sum(part.out.numel() for part in parts) == wanted.numel()


def test_large_tensors_in_several_threads_under_another_cut(tmp_path: Path) -> None:
    """By rows on two ranks, read by columns: what tp and pp do to one another."""
    whole = torch.arange(1100 * 4000, dtype=torch.int32).view(1100, 4000)  # 17.6 MB, more than two chunks

    def one(rank: int, group: OneThread) -> str | None:
        saver = Saver(tmp_path, rank=rank, group=group)
        low, high = split(1100, 2, rank)
        piece = Piece(name="w", shape=(1100, 4000), values=whole[low:high], boxes=(((low, high), (0, 4000)),))
        saver.save(Snapshot(step=1, pieces=[piece], scalars={}))
        (saved,) = saver.drain()
        error: str | None = saved.error
        return error

    assert together(2, one) == [None, None]
    opened = Checkpoint.open(tmp_path / "step-00000001", verify=True)
    assert max(file.bytes for file in opened.manifest.files.values()) > 2 * BLOCK
    assert torch.equal(opened.read("w"), whole)
    for part in range(3):
        low, high = split(4000, 3, part)
        found = opened.read("w", [((0, 1100), (low, high))]).view(1100, high - low)
        assert torch.equal(found, whole[:, low:high])


@pytest.mark.parametrize("file", ["rank-00000.safetensors", "rank-00002.safetensors", "manifest.json"])
def test_flipped_truncated_and_missing(folder: Path, file: str) -> None:
    """Each is refused by name, and the checkpoint before is what is offered."""
    path = folder / "step-00000002" / file
    content = path.read_bytes()
    for at_byte in (0, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:at_byte] + bytes([content[at_byte] ^ 0x10]) + content[at_byte + 1 :])
        with pytest.raises(WeightsError, match=file):
            Checkpoint.open(folder / "step-00000002", verify=True)
        assert latest(folder) == folder / "step-00000001"
    for damaged in (content[:-1], content[:9], b"", content + b"\0"):
        path.write_bytes(damaged)
        with pytest.raises(WeightsError, match=file):
            Checkpoint.open(folder / "step-00000002")  # sizes are enough
        assert latest(folder, verify=False) == folder / "step-00000001"
    path.unlink()
    with pytest.raises(WeightsError, match=file):
        Checkpoint.open(folder / "step-00000002")
    assert latest(folder) == folder / "step-00000001"
    assert_state(folder / "step-00000001", 1)


def test_links_out_of_the_folder(folder: Path, tmp_path: Path) -> None:
    inside = folder / "step-00000002/rank-00001.safetensors"
    inside.rename(tmp_path / "outside.safetensors")
    inside.symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(WeightsError, match="is a link out of the folder"):
        Checkpoint.open(folder / "step-00000002")
    opened = Checkpoint.open(folder / "step-00000001")  # and where the link comes after the opening
    inside = folder / "step-00000001/rank-00001.safetensors"
    shutil.move(inside, tmp_path / "other.safetensors")
    inside.symlink_to(tmp_path / "other.safetensors")
    with pytest.raises(WeightsError, match=r"rank-00001\.safetensors is missing or damaged"):
        opened.read("weights/rows")
    inside.unlink()
    inside.mkdir()
    with pytest.raises(WeightsError, match="or no file"):
        Checkpoint.open(folder / "step-00000001")


def test_a_file_that_shrinks_after_it_was_opened(folder: Path) -> None:
    """Read by range, and so an error; a mapped file would end the process."""
    opened = Checkpoint.open(folder / "step-00000001")
    opened.read("weights/tall")
    os.truncate(folder / "step-00000001/rank-00001.safetensors", 2000)
    with pytest.raises(WeightsError, match=r"rank-00001\.safetensors cannot be read: the file ends at byte 2000"):
        opened.read("weights/tall")


def test_a_header_that_says_otherwise(folder: Path) -> None:
    """A file of the right size whose tensors are not those of the manifest."""
    path = folder / "step-00000002/rank-00000.safetensors"
    tensors = load_file(path)
    key = next(key for key in tensors if key.startswith("weights/rows"))
    tensors[key] = tensors[key].view(torch.int32)
    before = path.stat().st_size
    save_file(tensors, path)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    pad = before - len(content)
    assert pad >= 0
    header = content[8 : 8 + length] + b" " * pad
    path.write_bytes((length + pad).to_bytes(8, "little") + header + content[8 + length :])
    opened = Checkpoint.open(folder / "step-00000002")
    with pytest.raises(WeightsError, match=r"rank-00000.*(the manifest says F32|at another byte)"):
        opened.read("weights/rows")
    path.write_bytes((1 << 50).to_bytes(8, "little") + path.read_bytes()[8:])
    with pytest.raises(WeightsError, match="does not fit into a file"):
        Checkpoint.open(folder / "step-00000002").read("weights/rows")


def test_latest_of_nothing(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    assert latest(tmp_path / "absent") is None
    assert agree_latest(tmp_path, rank=0, group=Alone()) == (None, [])


def test_latest_does_not_believe_the_pointer(folder: Path) -> None:
    """Nor needs it: it is for people and other programs."""
    (folder / "latest.json").write_text('{"folder": "../../elsewhere"}')
    assert latest(folder) == folder / "step-00000002"
    (folder / "latest.json").unlink()
    assert latest(folder) == folder / "step-00000002"


def test_ranks_agree_on_the_newest_that_all_can_read(folder: Path) -> None:
    """Each reads its share of the files; what one of them finds is none for all."""
    damaged = folder / "step-00000002/rank-00001.safetensors"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    found = together(3, lambda rank, group: agree_latest(folder, rank=rank, group=group))
    assert [path for path, _ in found] == [folder / "step-00000001"] * 3
    for _, passed in found:
        assert len(passed) == 1
        assert "rank-00001.safetensors is damaged" in passed[0]
    unread = together(3, lambda rank, group: agree_latest(folder, rank=rank, group=group, verify=False))
    assert unread == [(folder / "step-00000002", [])] * 3


def test_a_rank_that_does_not_see_a_checkpoint_rules_it_out(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "step-00000001", tmp_path / "other/step-00000001")
    places = [folder, tmp_path / "other"]
    found = together(2, lambda rank, group: agree_latest(places[rank], rank=rank, group=group))
    assert [path for path, _ in found] == [places[0] / "step-00000001", places[1] / "step-00000001"]
    for _, passed in found:
        assert "other/step-00000002 holds no manifest.json" in passed[0]
