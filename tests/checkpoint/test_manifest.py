"""The manifest's text, and what a reader refuses of one before it reads or allocates by it."""

from __future__ import annotations

import hashlib
import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.checkpoint import manifest
from plait.checkpoint.layout import LARGE, lay_out, share
from plait.checkpoint.manifest import BLOCK, Manifest, StoredFile, StoredPiece, StoredTensor, decode, encode, seal
from plait.checkpoint.reader import Checkpoint
from plait.checkpoint.reshard import cover, flat_to_boxes, volume
from plait.checkpoint.state import Piece
from plait.core.errors import WeightsError
from plait.core.shard import full, split

GOOD = Manifest(
    step=1200,
    created="2026-11-30T09:21:23.820+00:00",
    files={"rank-00000.safetensors": StoredFile(bytes=BLOCK + 9, sums="0123456789abcdef")},
    tensors={
        "weights/a": StoredTensor(
            shape=(3, 4),
            dtype="float32",
            pieces=(
                StoredPiece(file="rank-00000.safetensors", key="weights/a.0", offset=64, box=((0, 1), (0, 4))),
                StoredPiece(file="rank-00000.safetensors", key="weights/a.1", offset=80, box=((1, 3), (0, 4))),
            ),
        ),
        "step": StoredTensor(
            shape=(),
            dtype="float64",
            pieces=(StoredPiece(file="rank-00000.safetensors", key="step.0", offset=112, box=()),),
        ),
        "none": StoredTensor(shape=(0, 4), dtype="bfloat16", pieces=()),
    },
    scalars={"sample": 9600, "nested": {"list": [1, 2.5, None, "text"]}},
)


def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    document = json.loads(encode(GOOD))
    change(document)
    return seal(document)


def piece(document: dict[str, Any], number: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = document["tensors"]["weights/a"]["pieces"][number]
    return found


def test_text_and_back() -> None:
    text = encode(GOOD)
    assert decode(text, "here") == GOOD
    assert text.count(b"\n") < 30  # a line a tensor


def test_the_seal_is_the_digest_of_what_stands_before_its_line() -> None:
    """As docs/checkpoint.md tells another program to check it."""
    text = encode(GOOD)
    content, line = text[: text.rindex(b'\n "sha256"')], text[text.rindex(b'\n "sha256"') :]
    assert json.loads(text)["sha256"] == hashlib.sha256(content).hexdigest()
    assert line.endswith(b'"\n}\n')


def test_every_changed_byte_is_noticed() -> None:
    text = encode(GOOD)
    for at in range(len(text)):
        for wrong in (text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :], text[:at], text[:at] + text[at + 1 :]):
            with pytest.raises(WeightsError, match="here"):
                decode(wrong, "here")


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "format": (lambda d: d.update(format="x"), "not a manifest of plait"),
    "version": (lambda d: d.update(version=3), "version 3"),
    "hash": (lambda d: d.update(hash="md5"), "crc32"),
    "block": (lambda d: d.update(block=1), "crc32"),
    "step": (lambda d: d.update(step=-1), "-1 is not a size"),
    "true step": (lambda d: d.update(step=True), "not a size"),
    "created": (lambda d: d.update(created=5), "no time"),
    "files": (lambda d: d.update(files=[]), "objects"),
    "path": (lambda d: d["files"].update({"../x.safetensors": {"bytes": 0, "crc32": ""}}), "plain name"),
    "absolute": (lambda d: d["files"].update({"/x.safetensors": {"bytes": 0, "crc32": ""}}), "plain name"),
    "suffix": (lambda d: d["files"].update({"x.pt": {"bytes": 0, "crc32": ""}}), "plain name"),
    "no sums": (lambda d: d["files"]["rank-00000.safetensors"].pop("crc32"), "'crc32' is missing"),
    "few sums": (lambda d: d["files"]["rank-00000.safetensors"].update(crc32="01234567"), "eight hex digits"),
    "odd sums": (lambda d: d["files"]["rank-00000.safetensors"].update(crc32="x" * 16), "eight hex digits"),
    "size": (lambda d: d["files"]["rank-00000.safetensors"].update(bytes=1.5), "not a size"),
    "huge": (lambda d: d["tensors"]["weights/a"].update(shape=[1 << 40, 1 << 40]), "larger than any tensor"),
    "huge and empty": (lambda d: d["tensors"]["none"].update(shape=[0, 1 << 70]), "larger than any tensor"),
    "dims": (lambda d: d["tensors"]["none"].update(shape=[0] + [1] * 40), "larger than any tensor"),
    "more": (lambda d: d["tensors"]["weights/a"].update(shape=[1 << 20, 4]), "are in no piece"),
    "dtype": (lambda d: d["tensors"]["weights/a"].update(dtype="object"), "unknown"),
    "wide": (lambda d: d["tensors"]["weights/a"].update(dtype="float64"), "inside an element|share bytes"),
    "past": (lambda d: piece(d).update(offset=BLOCK), "reaches past"),
    "odd offset": (lambda d: piece(d).update(offset=66), "inside an element"),
    "negative": (lambda d: piece(d).update(offset=-4), "not a size"),
    "two bytes": (lambda d: piece(d).update(offset=68), "share bytes"),
    "other file": (lambda d: piece(d).update(file="rank-00001.safetensors"), "none of the files"),
    "overlap": (lambda d: piece(d).update(box=[[0, 2], [0, 4]]), "both hold"),
    "twice": (lambda d: d["tensors"]["weights/a"]["pieces"].append(piece(d)), "both hold"),
    "lost": (lambda d: d["tensors"]["weights/a"]["pieces"].pop(), "are in no piece"),
    "outside": (lambda d: piece(d).update(box=[[0, 1], [0, 5]]), "does not fit"),
    "reversed": (lambda d: piece(d).update(box=[[1, 0], [0, 4]]), "does not fit"),
    "empty": (lambda d: piece(d).update(box=[[1, 1], [0, 4]]), "does not fit"),
    "float box": (lambda d: piece(d).update(box=[[0, 1.0], [0, 4]]), "not a size"),
    "text box": (lambda d: piece(d).update(box="[0, 1]"), "does not fit"),
    "key": (lambda d: piece(d).update(key=7), "names"),
    "tensor": (lambda d: d["tensors"].update(x=None), "'x'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    change, word = REFUSED[name]
    with pytest.raises(WeightsError, match=word) as caught:
        decode(changed(change), "here")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"null", b"[" * 100_000, b"\xff\xfe", b'{"step": NaN}', b'{"a": 1, "a": 2}', b"1" * 5000],
)
def test_texts_that_are_none(text: bytes) -> None:
    with pytest.raises(WeightsError, match="here"):
        decode(text, "here")


def test_a_name_that_stands_twice() -> None:
    text = encode(GOOD).replace(b'"step": 1200', b'"step": 1200,\n "step": 1300')
    with pytest.raises(WeightsError, match="stands twice"):
        decode(text, "here")


def test_nothing_is_allocated_by_a_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape of a terabyte in a file that says it has one, and does not."""
    size = 1 << 40

    def claim(document: dict[str, Any]) -> None:
        sums = "00000000" * (-(-(size + 128) // BLOCK))
        document["files"]["rank-00000.safetensors"] = {"bytes": size + 128, "crc32": sums}
        document["tensors"]["weights/a"] = {
            "shape": [1 << 30, 256],
            "dtype": "float32",
            "pieces": [{"file": "rank-00000.safetensors", "key": "k", "offset": 128, "box": [[0, 1 << 30], [0, 256]]}],
        }

    (tmp_path / "manifest.json").write_bytes(changed(claim))
    (tmp_path / "rank-00000.safetensors").write_bytes(bytes(64))
    tracemalloc.start()
    with pytest.raises(WeightsError, match="it holds 64 bytes"):
        Checkpoint.open(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20
    (tmp_path / "rank-00000.safetensors").unlink()
    (tmp_path / "target").mkdir()
    (tmp_path / "manifest.json").rename(tmp_path / "target/manifest.json")
    (tmp_path / "manifest.json").symlink_to(tmp_path / "target/manifest.json")
    with pytest.raises(WeightsError, match=r"manifest\.json cannot be read: Too many levels"):
        Checkpoint.open(tmp_path)
    (tmp_path / "manifest.json").unlink()
    os.mkfifo(tmp_path / "manifest.json")  # to read it would be to wait for ever
    with pytest.raises(WeightsError, match="is no file"):
        Checkpoint.open(tmp_path)
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "manifest.json").write_bytes(encode(GOOD))
    monkeypatch.setattr(manifest, "LIMIT", 100)
    with pytest.raises(WeightsError, match="longer than 100 bytes"):
        Checkpoint.open(tmp_path)


def test_scalars_that_are_no_json() -> None:
    for scalars in ({"a": float("nan")}, {"a": float("inf")}, {"a": {1, 2}}, {"a": b"x"}):
        with pytest.raises(WeightsError, match="no plain JSON"):
            encode(Manifest(step=1, created="", files={}, tensors={}, scalars=scalars))


@st.composite
def holders(draw: st.DrawFn) -> tuple[int, tuple[int, ...], int, int, bool]:
    """(ranks, shape, flat range of it, whether the pieces are made large) of a piece that all ranks hold."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    ends = sorted((draw(st.integers(0, volume(full(shape)))), draw(st.integers(0, volume(full(shape))))))
    return draw(st.integers(1, 5)), shape, ends[0], ends[1], draw(st.booleans())


@given(holders())
@settings(deadline=None)
def test_what_several_hold_is_written_once(held: tuple[int, tuple[int, ...], int, int, bool]) -> None:
    ranks, shape, start, stop, large = held
    whole = torch.arange(volume(full(shape)))
    boxes = tuple(flat_to_boxes(shape, start, stop))
    one = Piece(name="x", shape=shape, values=whole[start:stop], boxes=boxes, replicas=tuple(range(ranks)))
    limit = 8 if large else LARGE
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plait.checkpoint.layout.LARGE", limit)
        runs = [run for rank in range(ranks) for run in share([one], rank)]
    # Every element of the boxes, once, and with its own values.
    assert sum(volume(run.box) for run in runs) == stop - start
    for box in boxes:
        cover(box, [run.box for run in runs])
    view = whole.view(shape)
    for run in runs:
        inside = view[tuple(slice(low, high) for low, high in run.box)].reshape(-1)
        assert torch.equal(inside, one.values[run.start : run.start + volume(run.box)])


def test_writers_are_balanced_by_bytes() -> None:
    ranks = 3
    draw = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 2000, (40,), generator=draw).tolist()
    pieces = [
        Piece(name=f"s{n}", shape=(size,), values=torch.zeros(size), boxes=(((0, size),),), replicas=(0, 1, 2))
        for n, size in enumerate(sizes)
    ]
    pieces.append(
        Piece(
            name="tall",
            shape=(900, 512),
            values=torch.zeros(900, 512),
            boxes=(((0, 900), (0, 512)),),
            replicas=(2, 0, 1),
        )
    )
    loads = [lay_out(pieces, share(pieces, rank)).bytes for rank in range(ranks)]
    assert max(loads) - min(loads) < 0.05 * max(loads)
    (large,) = [run for run in share(pieces, 1) if pieces[run.piece].name == "tall"]
    assert large.box == (split(900, 3, 1), (0, 512))  # whole rows


def test_pieces_that_contradict_themselves() -> None:
    def one(**over: Any) -> Piece:
        given = {"name": "x", "shape": (4,), "values": torch.zeros(4), "boxes": (((0, 4),),), "replicas": ()}
        return Piece(**{**given, **over})

    for bad, word in (
        (one(replicas=(1, 2)), "rank 0 holds it"),
        (one(values=torch.zeros(3)), "3 values do not fill boxes of 4"),
        (one(boxes=(((1, 5),),)), "not inside shape"),
        (one(boxes=(((0, 2), (0, 2)),)), "not inside shape"),
        (one(values=torch.zeros(4, dtype=torch.complex64)), "complex64 is not stored"),
    ):
        with pytest.raises(WeightsError, match=word):
            share([bad], 0)
