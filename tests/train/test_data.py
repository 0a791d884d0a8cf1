from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plait.core.errors import ConfigError
from plait.models.batch import IGNORE
from plait.train import data
from plait.train.data import Samples, TokenFile, default_tokens, encode_text, standard_library_text, write_tokens
from plait.train.order import permute


def make(path: Path, ids: object, *, dtype: str = "uint16", vocab_size: int = 1000) -> TokenFile:
    write_tokens(path, [np.asarray(ids)], dtype=dtype, vocab_size=vocab_size, tokenizer=None)
    return TokenFile.open(path)


def samples(file: TokenFile, **changes: object) -> Samples:
    options: dict[str, object] = {
        "seq": 4,
        "global_batch": 3,
        "seed": 1,
        "shuffle": False,
        "held_out": 0.0,
        "separator": None,
        "vocab_size": 1000,
    }
    return Samples(file, **{**options, **changes})  # type: ignore[arg-type]


# --- files


@pytest.mark.parametrize(("dtype", "top"), [("uint16", 65535), ("uint32", 70000)])
def test_written_tokens_read_back(tmp_path: Path, dtype: str, top: int) -> None:
    path = tmp_path / "some.name.bin"
    write_tokens(path, [[0, 1], [], np.array([[top]])], dtype=dtype, vocab_size=top + 1, tokenizer="t.json")
    file = TokenFile.open(path)
    assert file.tokens.tolist() == [0, 1, top]
    assert (file.vocab_size, file.tokenizer) == (top + 1, "t.json")
    assert path.read_bytes()[-(2 if dtype == "uint16" else 4) :] == top.to_bytes(
        2 if dtype == "uint16" else 4, "little"
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["some.name.bin", "some.name.json"]


@pytest.mark.parametrize(
    ("header", "content", "words"),
    [
        (None, b"\0\0", ["x.json is missing", "dtype"]),
        ("{", b"\0\0", ["x.json cannot be read"]),
        ("[]", b"\0\0", ["x.json", "dtype"]),
        ('{"dtype": "int8", "vocab_size": 9}', b"\0\0", ["uint16, uint32"]),
        ('{"dtype": ["uint16"], "vocab_size": 9}', b"\0\0", ["uint16, uint32"]),
        ('{"dtype": "uint16"}', b"\0\0", ["vocab_size", "None"]),
        ('{"dtype": "uint16", "vocab_size": 70000}', b"\0\0", ["vocab_size", "65536"]),
        ('{"dtype": "uint16", "vocab_size": 0}', b"\0\0", ["vocab_size", "0"]),
        ('{"dtype": "uint16", "vocab_size": true}', b"\0\0", ["vocab_size"]),
        ('{"dtype": "uint16", "vocab_size": 9, "tokenizer": 3}', b"\0\0", ["tokenizer"]),
        ('{"dtype": "uint32", "vocab_size": 9}', b"\0\0\0\0\0\0", ["6 bytes", "uint32", "cut short"]),
        ('{"dtype": "uint16", "vocab_size": 9}', b"", ["0 bytes"]),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path: Path, header: str | None, content: bytes, words: list[str]) -> None:
    (tmp_path / "x.bin").write_bytes(content)
    if header is not None:
        (tmp_path / "x.json").write_text(header)
    with pytest.raises(ConfigError) as caught:
        TokenFile.open(tmp_path / "x.bin")
    assert all(word in str(caught.value) for word in [*words, str(tmp_path)])


def test_missing_file_names_the_command_that_makes_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"plait convert TEXT x\.bin"):
        TokenFile.open(tmp_path / "x.bin")


@pytest.mark.parametrize(
    ("ids", "dtype", "vocab_size"), [([9], "uint16", 9), ([-1], "uint16", 9), ([1], "uint16", 65537)]
)
def test_ids_that_do_not_fit_are_not_written(tmp_path: Path, ids: list[int], dtype: str, vocab_size: int) -> None:
    with pytest.raises(ConfigError):
        write_tokens(tmp_path / "x.bin", [ids], dtype=dtype, vocab_size=vocab_size, tokenizer=None)
    assert not list(tmp_path.iterdir())


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot write .*x\.bin"):
        write_tokens(tmp_path / "file" / "x.bin", [[1]], dtype="uint16", vocab_size=9, tokenizer=None)
    with pytest.raises(ConfigError, match=r"NAME\.bin, not x\.dat"):
        write_tokens(tmp_path / "x.dat", [[1]], dtype="uint16", vocab_size=9, tokenizer=None)


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    make(tmp_path / "x.bin", [1, 2])
    with pytest.raises(ConfigError):
        write_tokens(tmp_path / "x.bin", [[3], [1000]], dtype="uint16", vocab_size=1000, tokenizer=None)
    assert TokenFile.open(tmp_path / "x.bin").tokens.tolist() == [1, 2]


def test_bytes_of_several_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "CHUNK", 3)
    (tmp_path / "a.txt").write_bytes("für\n".encode())
    (tmp_path / "b.txt").write_bytes(b"\xff\0x")
    dst = encode_text([tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path / "t.bin", "bytes")
    file = TokenFile.open(dst)
    assert bytes(file.tokens.astype(np.uint8)) == "für\n".encode() + b"\xff\0x"
    assert (file.vocab_size, file.tokenizer) == (256, "bytes")


def tokenizer_json(path: Path, base: int = 0) -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: base + i for i, word in enumerate(["[UNK]", "a", "bc", "def"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return str(path)


@pytest.mark.parametrize("chunk", [3, 5, 1000])
def test_a_tokenizer_sees_no_cut_word_where_lines_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(data, "CHUNK", chunk)
    (tmp_path / "a.txt").write_text("a\nbc\nbc\na\ndef")
    dst = encode_text([tmp_path / "a.txt"], tmp_path / "t.bin", tokenizer_json(tmp_path / "tokenizer.json"))
    assert TokenFile.open(dst).tokens.tolist() == [1, 2, 2, 1, 3]


def test_a_large_vocabulary_takes_uint32(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("bc zz")
    encode_text([tmp_path / "a.txt"], tmp_path / "t.bin", tokenizer_json(tmp_path / "tokenizer.json", base=70_000))
    assert json.loads((tmp_path / "t.json").read_text())["dtype"] == "uint32"
    file = TokenFile.open(tmp_path / "t.bin")
    assert file.tokens.tolist() == [70_002, 70_000]
    assert file.vocab_size == 70_004


def test_unusable_texts_and_tokenizers_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "bad.txt").write_bytes(b"ok\n\xff")
    tokenizer = tokenizer_json(tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"bad\.txt.*UTF-8"):
        encode_text([tmp_path / "bad.txt"], tmp_path / "t.bin", tokenizer)
    with pytest.raises(ConfigError, match=r"none\.txt"):
        encode_text([tmp_path / "none.txt"], tmp_path / "t.bin", "bytes")
    with pytest.raises(ConfigError, match=r"none\.json"):
        encode_text([tmp_path / "bad.txt"], tmp_path / "t.bin", str(tmp_path / "none.json"))
    assert not list(tmp_path.glob("t*bin*"))


def test_default_text_is_the_standard_library(tmp_path: Path) -> None:
    paths = standard_library_text()
    assert paths == standard_library_text()
    names = [path.name for path in paths]
    assert "argparse.py" in names
    assert 1_000_000 < sum(path.stat().st_size for path in paths) <= data.LIBRARY_BYTES
    assert not any("site-packages" in path.parts or "test" in path.parts for path in paths)
    with ThreadPoolExecutor(4) as pool:
        built = set(pool.map(default_tokens, [tmp_path] * 4))
    assert len(built) == 1
    path = built.pop()
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".bin", ".json"]
    file = TokenFile.open(path)
    assert bytes(file.tokens[:200].astype(np.uint8)) == paths[0].read_bytes()[:200]
    before = path.stat().st_mtime_ns
    assert default_tokens(tmp_path).stat().st_mtime_ns == before


# --- order


@given(st.integers(1, 300), st.integers(0, 2**40), st.integers(0, 5))
def test_the_order_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    places = np.arange(size)
    whole = permute(places, size, seed, epoch)
    assert sorted(whole.tolist()) == places.tolist()
    assert permute(places[::-1][: size // 2], size, seed, epoch).tolist() == whole[::-1][: size // 2].tolist()


def test_the_order_is_fixed_for_good() -> None:
    # A change here would give every stored run other data after a restart.
    assert permute(np.arange(10), 10, 0, 0).tolist() == [2, 3, 1, 7, 5, 6, 9, 4, 8, 0]


def test_the_order_depends_on_seed_and_epoch_and_looks_random() -> None:
    size = 1000
    orders = {(s, e): permute(np.arange(size), size, s, e) for s in range(3) for e in range(3)}
    assert len({tuple(order.tolist()) for order in orders.values()}) == 9
    for order in orders.values():
        assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 0.15
        assert np.count_nonzero(np.diff(order) == 1) < 10
    # Where place 0 of 5 goes is even over seeds: 2,000 draws, 400 expected, standard deviation 18.
    counts = np.bincount([int(permute(np.arange(1), 5, seed, 0)[0]) for seed in range(2000)], minlength=5)
    assert counts.min() > 320


# --- samples


def test_plain_order_inputs_and_targets(tmp_path: Path) -> None:
    some = samples(make(tmp_path / "x.bin", range(30)))  # 29 // 4 = 7 samples
    assert some.train == 7
    assert [some.indices(step) for step in range(4)] == [[0, 1, 2], [3, 4, 5], [6, 0, 1], [2, 3, 4]]
    batch = some.batch(2, [0, 2])
    assert batch.tokens_BT.tolist() == [[24, 25, 26, 27], [4, 5, 6, 7]]
    assert batch.targets_BT.tolist() == [[25, 26, 27, 28], [5, 6, 7, 8]]
    assert batch.sample_B.tolist() == [6, 8]
    assert batch.step == 2
    assert batch.positions_BT is None
    assert batch.documents_BT is None
    assert {batch.tokens_BT.dtype, batch.targets_BT.dtype, batch.sample_B.dtype} == {torch.int64}
    assert some.target_count(2) == 12
    assert some.batch(0, []).tokens_BT.shape == (0, 4)
    with pytest.raises(IndexError):
        some.batch(0, [3])
    with pytest.raises(IndexError):
        some.batch(0, [-1])


def test_every_sample_once_an_epoch_and_any_rows_of_any_batch_agree(tmp_path: Path) -> None:
    some = samples(make(tmp_path / "x.bin", range(401)), shuffle=True, global_batch=8)
    drawn = [index for step in range(25) for index in some.indices(step)]
    assert sorted(drawn[:100]) == sorted(drawn[100:]) == list(range(100))
    assert drawn[:100] != drawn[100:]
    # Another global batch cuts the same stream elsewhere.
    other = samples(make(tmp_path / "x.bin", range(401)), shuffle=True, global_batch=5)
    assert [index for step in range(40) for index in other.indices(step)] == drawn
    whole = some.batch(12, range(8))  # holds the end of the first epoch
    for row in range(8):
        one = some.batch(12, [row])
        assert torch.equal(one.tokens_BT[0], whole.tokens_BT[row])
        assert one.tokens_BT[0, 0] == drawn[96 + row] * 4
        assert one.sample_B.tolist() == [96 + row]


def test_samples_share_only_the_token_between_them(tmp_path: Path) -> None:
    some = samples(make(tmp_path / "x.bin", range(13)))  # exactly 3 samples: 12 inputs and the last target
    batch = some.batch(0, range(3))
    assert batch.tokens_BT.flatten().tolist() == list(range(12))
    assert batch.targets_BT.flatten().tolist() == list(range(1, 13))


@pytest.mark.parametrize(("count", "held_out"), [(4, 0.0), (8, 0.1), (0, 0.0)])
def test_too_little_text_is_refused(tmp_path: Path, count: int, held_out: float) -> None:
    write_tokens(tmp_path / "x.bin", [range(max(count, 1))], dtype="uint16", vocab_size=1000, tokenizer=None)
    with pytest.raises(ConfigError, match=r"data\.seq=4"):
        samples(TokenFile.open(tmp_path / "x.bin"), held_out=held_out)


def test_held_out_samples_are_the_last_and_never_trained_on(tmp_path: Path) -> None:
    some = samples(make(tmp_path / "x.bin", range(81)), held_out=0.2, shuffle=True)  # 20 samples, 4 held out
    assert (some.train, some.held_out, some.eval_steps) == (16, 4, 2)
    assert {index for step in range(16) for index in some.indices(step)} == set(range(16))
    first, last = some.eval_batches(None, range(3))
    assert first.tokens_BT[:, 0].tolist() == [64, 68, 72]
    assert first.targets_BT[2].tolist() == [73, 74, 75, 76]
    assert last.tokens_BT[0].tolist() == [76, 77, 78, 79]
    assert last.targets_BT[0].tolist() == [77, 78, 79, 80]
    assert last.targets_BT[1:].eq(IGNORE).all()
    assert len(set(last.sample_B.tolist())) == 3
    assert [some.eval_target_count(number) for number in range(2)] == [12, 4]
    assert len(list(some.eval_batches(1, range(3)))) == 1
    assert len(list(some.eval_batches(9, [1]))) == 2
    assert not list(samples(make(tmp_path / "x.bin", range(81))).eval_batches(None, [0]))
    assert samples(make(tmp_path / "x.bin", range(81)), held_out=0.001).held_out == 1


def test_separator_restarts_documents_and_masks_what_follows_it(tmp_path: Path) -> None:
    # samples:              [5 0 6 7] [0 0 8 9]  [1 2 3 0] then the last target
    some = samples(make(tmp_path / "x.bin", [5, 0, 6, 7, 0, 0, 8, 9, 1, 2, 3, 0, 4]), separator=0)
    batch = some.batch(0, range(3))
    assert batch.positions_BT is not None
    assert batch.documents_BT is not None
    assert batch.positions_BT.tolist() == [[0, 1, 0, 1], [0, 0, 0, 1], [0, 1, 2, 3]]
    assert batch.documents_BT.tolist() == [[0, 0, 1, 1], [0, 1, 2, 2], [0, 0, 0, 0]]
    skip = IGNORE
    assert batch.targets_BT.tolist() == [[0, skip, 7, 0], [skip, skip, 9, 1], [2, 3, 0, skip]]
    assert some.target_count(0) == int((batch.targets_BT != IGNORE).sum()) == 8
    assert batch.positions_BT.dtype == batch.documents_BT.dtype == torch.int64


def test_eval_counts_with_separators(tmp_path: Path) -> None:
    ids = np.arange(1, 82) * (np.arange(81) % 5 != 0)
    some = samples(make(tmp_path / "x.bin", ids), separator=0, held_out=0.2)
    for number, batch in enumerate(some.eval_batches(None, range(3))):
        assert some.eval_target_count(number) == int((batch.targets_BT != IGNORE).sum())


def test_tokens_outside_the_model_are_refused_where_they_are_read(tmp_path: Path) -> None:
    ids = [1, 2, 3, 4, 5, 6, 70, 8, 9, 1, 2, 3, 4]
    some = samples(make(tmp_path / "x.bin", ids), vocab_size=70)
    some.batch(0, [0, 2])
    with pytest.raises(ConfigError, match=r"x\.bin: sample 1 holds token 70.*vocab_size=70.*1000"):
        some.batch(0, range(3))
    assert samples(make(tmp_path / "x.bin", ids), vocab_size=71).batch(0, [1]).tokens_BT.max() == 70
