"""``plait convert`` between its kinds, and what it refuses."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from plait.checkpoint.hf import export
from plait.checkpoint.manifest import MANIFEST, seal
from plait.checkpoint.saver import Saver
from plait.checkpoint.state import Piece, Snapshot
from plait.checkpoint.store import WeightFolder, write_manifest, write_shard
from plait.core.errors import ConfigError, WeightsError
from plait.core.shard import full
from plait.models.batch import Batch
from plait.models.config import PRESETS, ModelConfig, parameter_shapes
from plait.models.decoder import Decoder
from plait.models.families import to_hf
from plait.models.init import InitSource, initialise
from plait.train import convert
from plait.train.data import TokenFile
from tests.checkpoint.ranks import Alone

transformers = pytest.importorskip("transformers")

TOKENS = torch.randint(0, 61, (3, 21), generator=torch.Generator().manual_seed(0))
LLAMA = dataclasses.replace(
    PRESETS["tiny"], vocab_size=61, hidden_size=32, num_layers=2, head_dim=8, ffn_size=40, max_positions=64
)
GPT2 = dataclasses.replace(
    PRESETS["gpt2-tiny"], vocab_size=61, hidden_size=32, num_layers=2, head_dim=8, ffn_size=128, max_positions=64
)


def models() -> dict[str, ModelConfig]:
    return {
        "llama": LLAMA,
        "llama-tied": dataclasses.replace(LLAMA, tied=True),
        "gpt2": GPT2,
        "qwen2": dataclasses.replace(LLAMA, family="qwen2", qkv_bias=True),
    }


def noisy(config: ModelConfig) -> Decoder:
    """A model none of whose tensors is constant: a mixed-up bias or norm would show."""
    model = Decoder(config)
    initialise(model, InitSource(config, 5))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def run_folder(path: Path, model: Decoder) -> Path:
    """A run folder whose weights two ranks wrote, each its rows."""
    shapes = parameter_shapes(model.config)
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    records = []
    for rank in range(2):
        pieces = {}
        for name, shape in shapes.items():
            edge = shape[0] // 2
            rows = (0, edge) if rank == 0 else (edge, shape[0])
            box = (rows, *((0, size) for size in shape[1:]))
            pieces[name] = [(box, values[name][slice(*rows)])]
        records += write_shard(path / "weights", rank, pieces)
    write_manifest(path / "weights", model.config.to_mapping(), shapes, records)
    (path / "metrics.jsonl").write_text("")
    return path


def stored(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found.update(load_file(file))
    return found


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", list(models()))
def test_a_run_becomes_a_folder_that_transformers_reads_with_the_same_logits(name: str, tmp_path: Path) -> None:
    model = noisy(models()[name])
    assert convert.run([run_folder(tmp_path / "run", model)], tmp_path / "hf") == 0
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager").eval()
    batch = Batch(tokens_BT=TOKENS, targets_BT=TOKENS, sample_B=torch.arange(3), step=0)
    with torch.no_grad():
        torch.testing.assert_close(model(None, batch).view(3, 21, -1), read(TOKENS).logits, rtol=1e-5, atol=1e-5)
    assert ("lm_head.weight" in stored(tmp_path / "hf")) is not model.config.tied
    assert left(tmp_path) == ["hf", "run"]


@pytest.mark.parametrize("name", list(models()))
@pytest.mark.parametrize("limit", [1 << 30, 2000])
def test_hugging_face_to_plait_and_back_is_bit_for_bit(
    name: str, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the small limit, tensors are cut into blocks of rows and spread over many files."""
    config = models()[name]
    torch.manual_seed(0)
    original = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**to_hf(config)), dtype=torch.bfloat16
    )
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    original.save_pretrained(tmp_path / "first")
    monkeypatch.setattr(convert, "FILE_BYTES", limit)
    convert.run([tmp_path / "first"], tmp_path / "plait")
    if limit == 2000:
        assert len(list((tmp_path / "plait").glob("*.safetensors"))) > 4
    convert.run([tmp_path / "plait"], tmp_path / "second")
    first, second = stored(tmp_path / "first"), stored(tmp_path / "second")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) and first[key].dtype == second[key].dtype for key in first)


def test_dtype_is_taken_both_ways(tmp_path: Path) -> None:
    model = noisy(LLAMA)
    convert.run([run_folder(tmp_path / "run", model)], tmp_path / "hf", dtype="bf16")
    assert {value.dtype for value in stored(tmp_path / "hf").values()} == {torch.bfloat16}
    convert.run([tmp_path / "hf"], tmp_path / "plait", dtype="fp32")
    folder = WeightFolder(tmp_path / "plait")
    assert torch.equal(folder.read("norm.weight"), model.state_dict()["norm.weight"].bfloat16().float())


def test_text_files_become_tokens_one_after_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("ab")
    (tmp_path / "b.txt").write_text("é")
    convert.run([tmp_path / "a.txt", tmp_path / "b.txt"], tmp_path / "out" / "corpus")
    file = TokenFile.open(tmp_path / "out" / "corpus.bin")
    assert bytes(file.tokens.astype("uint8").tolist()) == "abé".encode()
    assert (file.vocab_size, file.tokenizer) == (256, "bytes")
    assert "4 tokens" in capsys.readouterr().out


def test_text_with_a_tokenizer_file(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"one": 0, "two": 1}, unk_token="one"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("two one two")
    convert.run([tmp_path / "a.txt"], tmp_path / "a.bin", tokenizer=str(tmp_path / "tokenizer.json"))
    assert TokenFile.open(tmp_path / "a.bin").tokens.tolist() == [1, 0, 1]


def test_what_is_no_known_kind_is_named_with_the_known_ones(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"holds nothing; what can be converted: a run folder"):
        convert.run([folder], tmp_path / "out")
    (folder / "model.pt").write_text("x")
    with pytest.raises(ConfigError, match=r"folder that holds model\.pt; .*plait weights.*Hugging Face.*text files"):
        convert.run([folder], tmp_path / "out")
    with pytest.raises(ConfigError, match="there is no such file or folder"):
        convert.run([tmp_path / "absent"], tmp_path / "out")
    save_file({"a": torch.zeros(3)}, tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match=r"a\.safetensors is a file with NUL bytes, so no text"):
        convert.run([tmp_path / "a.safetensors"], tmp_path / "out")
    with pytest.raises(ConfigError, match="is a folder and stands among 2 sources"):
        convert.run([folder, tmp_path / "a.safetensors"], tmp_path / "out")
    assert left(tmp_path) == ["a.safetensors", "folder"]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", noisy(LLAMA))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text("mine")
    with pytest.raises(ConfigError, match="full is there already: choose another name"):
        convert.run([run], tmp_path / "full")
    assert (tmp_path / "full" / "config.json").read_text() == "mine"
    (tmp_path / "a.txt").write_text("ab")
    (tmp_path / "a.json").write_text("mine")
    with pytest.raises(ConfigError, match=r"a\.json is there already"):
        convert.run([tmp_path / "a.txt"], tmp_path / "a.bin")
    assert (tmp_path / "a.json").read_text() == "mine"
    assert not (tmp_path / "a.bin").exists()
    (tmp_path / "empty").mkdir()
    assert convert.run([run], tmp_path / "empty") == 0


def test_the_current_folder_is_no_place_for_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_folder(tmp_path / "run", noisy(LLAMA))
    (tmp_path / "a.txt").write_text("ab")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for place in (Path("."), Path(".."), tmp_path / "here", Path("/")):
        with pytest.raises(ConfigError, match=r"is a folder; text becomes a token file: write .*a\.bin"):
            convert.run([tmp_path / "a.txt"], place)
    with pytest.raises(ConfigError, match="here is the current folder: name a new one in it"):
        convert.run([run], Path("."))
    with pytest.raises(ConfigError, match="is there already"):
        convert.run([run], Path(".."))
    assert left(tmp_path) == ["a.txt", "here", "run"]
    convert.run([tmp_path / "a.txt"], Path("a"))
    convert.run([run], Path("hf"))
    assert left(tmp_path / "here") == ["a.bin", "a.json", "hf"]


@pytest.mark.parametrize("back", [False, True])
def test_a_full_disk_is_one_clean_error_and_leaves_nothing(
    back: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = run_folder(tmp_path / "run", noisy(LLAMA))
    if back:
        export(LLAMA, WeightFolder(source / "weights"), tmp_path / "hf")
        source = tmp_path / "hf"
    before = left(tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises((ConfigError, WeightsError), match=r"cannot write .*No space left on device"):
        convert.run([source], tmp_path / "out")
    assert left(tmp_path) == before


def test_a_place_that_cannot_be_written_is_one_clean_error(tmp_path: Path) -> None:
    """A file where a folder is needed: root, which tests may run as, minds no permissions."""
    run = run_folder(tmp_path / "run", noisy(LLAMA))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write .*file/out"):
        convert.run([run], tmp_path / "file" / "out")
    (tmp_path / "a.txt").write_text("ab")
    with pytest.raises(ConfigError, match=r"cannot write .*file/a\.bin"):
        convert.run([tmp_path / "a.txt"], tmp_path / "file" / "a.bin")


def test_options_of_another_kind_are_refused(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", noisy(LLAMA))
    (tmp_path / "a.txt").write_text("ab")
    with pytest.raises(ConfigError, match="dtype=bf16 is for weights"):
        convert.run([tmp_path / "a.txt"], tmp_path / "a.bin", dtype="bf16")
    with pytest.raises(ConfigError, match=r"tokenizer=t\.json is for text"):
        convert.run([run], tmp_path / "out", tokenizer="t.json")
    with pytest.raises(ConfigError, match="dtype=int8 is unknown; it is one of fp32, bf16, fp16"):
        convert.run([run], tmp_path / "out", dtype="int8")


def test_weights_that_are_not_whole_or_not_of_their_model_are_refused(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", noisy(LLAMA))
    manifest = run / "weights" / MANIFEST
    document = json.loads(manifest.read_text())
    document["scalars"]["model"]["num_layers"] = 3
    manifest.write_bytes(seal(document))
    with pytest.raises(WeightsError, match=r"layers\.2\.norm1\.weight is stored as None"):
        convert.run([run], tmp_path / "out")
    manifest.unlink()
    with pytest.raises(WeightsError, match="a write that was not finished"):
        convert.run([run], tmp_path / "out")
    assert left(tmp_path) == ["run"]


def test_a_runs_checkpoint_becomes_a_hugging_face_folder(tmp_path: Path) -> None:
    """Without the ranks that wrote it, and without what else it holds."""
    model = noisy(dataclasses.replace(LLAMA, tied=True))
    pieces = [
        Piece(name=f"{kind}/{name}", shape=tuple(p.shape), values=p, boxes=(full(tuple(p.shape)),))
        for kind in ("weights", "exp_avg")
        for name, p in model.named_parameters()
    ]
    saver = Saver(tmp_path / "checkpoints", rank=0, group=Alone())
    saver.save(Snapshot(step=7, pieces=pieces, scalars={"model": model.config.to_mapping(), "step": 7}))
    (saved,) = saver.drain()
    assert saved.path is not None
    convert.run([saved.path], tmp_path / "hf")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager").eval()
    batch = Batch(tokens_BT=TOKENS, targets_BT=TOKENS, sample_B=torch.arange(3), step=0)
    with torch.no_grad():
        torch.testing.assert_close(model(None, batch).view(3, 21, -1), read(TOKENS).logits, rtol=1e-5, atol=1e-5)
    assert "lm_head.weight" not in stored(tmp_path / "hf")
