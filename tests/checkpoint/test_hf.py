"""Hugging Face folders against transformers, at tiny sizes, for every family."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from plait.checkpoint import hf as hf_module
from plait.checkpoint.hf import HFFolder, export
from plait.checkpoint.hf_layout import layout
from plait.core.errors import ConfigError, WeightsError
from plait.models.batch import Batch
from plait.models.config import PRESETS, parameter_shapes
from plait.models.decoder import Decoder
from plait.models.init import Box, InitSource, initialise

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GPT2_SIZES: dict[str, Any] = {"vocab_size": 61, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
QWEN3_MOE: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
}
DEEPSEEK: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "beta_fast": 8,
        "beta_slow": 1,
        "original_max_position_embeddings": 16,
    },
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("LlamaConfig", {**SIZES, "num_key_value_heads": 4}),
    "llama3-gqa-tied": (
        "LlamaConfig",
        {**SIZES, "num_key_value_heads": 2, "rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
    ),
    "llama-mqa-biases-linear": (
        "LlamaConfig",
        {
            **SIZES,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0},
        },
    ),
    "mistral-window": ("MistralConfig", {**SIZES, "num_key_value_heads": 2, "sliding_window": 5, "head_dim": 12}),
    "mistral": ("MistralConfig", {**SIZES, "num_key_value_heads": 2, "sliding_window": None}),
    "qwen2": ("Qwen2Config", {**SIZES, "num_key_value_heads": 1}),
    "qwen2-window-tied": (
        "Qwen2Config",
        {
            **SIZES,
            "num_key_value_heads": 2,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": ("Qwen3Config", {**SIZES, "num_key_value_heads": 2, "head_dim": 12}),
    "qwen3-tied": ("Qwen3Config", {**SIZES, "num_key_value_heads": 4, "head_dim": 16, "tie_word_embeddings": True}),
    "mixtral": ("MixtralConfig", {**SIZES, "num_key_value_heads": 2, "num_local_experts": 4}),
    "mixtral-window": (
        "MixtralConfig",
        {**SIZES, "num_key_value_heads": 2, "num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 5},
    ),
    "qwen3-moe": ("Qwen3MoeConfig", {**QWEN3_MOE, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3-moe-plain-weights": (
        "Qwen3MoeConfig",
        {**QWEN3_MOE, "norm_topk_prob": False, "decoder_sparse_step": 2, "tie_word_embeddings": True},
    ),
    "deepseek-v3": ("DeepseekV3Config", DEEPSEEK),
    "deepseek-v3-plain": (
        "DeepseekV3Config",
        {
            **DEEPSEEK,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
            "rope_interleave": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "qwen3-yarn": (
        "Qwen3Config",
        {
            **SIZES,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "gpt2": ("GPT2Config", GPT2_SIZES),
    "gpt2-untied": ("GPT2Config", {**GPT2_SIZES, "tie_word_embeddings": False, "activation_function": "gelu"}),
}
TOKENS = torch.randint(0, 61, (3, 21), generator=torch.Generator().manual_seed(0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """A folder that transformers wrote and the logits [63, 61] of the model in it."""

    folder: Path
    logits: Tensor


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    made: dict[str, Saved] = {}

    def make(name: str) -> Saved:
        if name not in made:
            torch.manual_seed(0)
            kind, fields = FAMILIES[name]
            model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**fields)).eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    # transformers starts biases at 0 and norms at 1, which would hide a mistaken mapping.
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
                for name, buffer in model.named_buffers():
                    if name.endswith("e_score_correction_bias"):
                        buffer.copy_(torch.randn_like(buffer) * 0.1)
                logits = model(TOKENS).logits.flatten(0, 1)
            folder = tmp_path_factory.mktemp(name)
            model.save_pretrained(folder)
            made[name] = Saved(folder=folder, logits=logits)
        return made[name]

    return make


def load(folder: Path) -> Decoder:
    source = HFFolder(folder)
    with torch.device("meta"):
        model = Decoder(source.config)
    initialise(model, source)
    return model.eval()


@torch.no_grad()
def logits_of(model: Decoder) -> Tensor:
    batch = Batch(tokens_BT=TOKENS, targets_BT=TOKENS, sample_B=torch.arange(3), step=0)
    logits: Tensor = model(None, batch)
    return logits


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_logits_are_those_of_transformers(name: str, saved: Callable[[str], Saved]) -> None:
    made = saved(name)
    torch.testing.assert_close(logits_of(load(made.folder)), made.logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", sorted(FAMILIES))
@pytest.mark.parametrize("shard_bytes", [1 << 30, 10_000])
def test_transformers_reads_what_is_exported(
    name: str, shard_bytes: int, saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    made = saved(name)
    source = HFFolder(made.folder)
    export(source.config, source, tmp_path / "out", shard_bytes=shard_bytes)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        logits = model.eval()(TOKENS).logits.flatten(0, 1)
    torch.testing.assert_close(logits, made.logits, rtol=0, atol=1e-5)
    again = HFFolder(tmp_path / "out")
    assert again.config == source.config
    original = load_file(made.folder / "model.safetensors")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert (len(files) > 1) == (shard_bytes == 10_000)
    written: dict[str, Tensor] = {}
    for file in files:
        written.update(load_file(file))
    assert set(written) == set(original)
    for key, value in original.items():
        assert torch.equal(written[key], value), key
    assert not list((tmp_path / "out").glob("*.tmp"))


def boxes(shape: tuple[int, ...]) -> list[Box]:
    """Boxes that begin, end and cross inside sections, and empty ones."""
    rows = shape[0]
    spans = [(0, rows), (1, rows - 1), (rows // 3, 2 * rows // 3 + 1), (rows // 2, rows // 2), (rows - 1, rows)]
    if len(shape) == 1:
        return [(span,) for span in spans]
    rest = [[(0, size), (3, size - 5), (2, 2)] for size in shape[1:]]
    return list(itertools.product(spans, *rest))


@pytest.mark.parametrize("name", ["llama-mqa-biases-linear", "gpt2", "qwen3", "mixtral-window", "deepseek-v3"])
def test_slices_are_slices_of_the_whole(name: str, saved: Callable[[str], Saved]) -> None:
    source = HFFolder(saved(name).folder)
    for parameter, shape in parameter_shapes(source.config).items():
        whole = source.read(parameter)
        assert tuple(whole.shape) == shape
        for box in boxes(shape):
            part = source.read(parameter, box)
            assert torch.equal(part, whole[tuple(slice(*span) for span in box)]), (parameter, box)
            # A view would keep the whole file mapped.
            assert part.untyped_storage().nbytes() == part.nbytes


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    """(stored tensor, index) of every read from here on."""
    asked: list[tuple[str, object]] = []

    class Spy:
        def __init__(self, file: Path, framework: str) -> None:
            self.handle = safe_open(file, framework=framework)

        def __enter__(self) -> Spy:
            self.handle.__enter__()
            return self

        def __exit__(self, *error: object) -> None:
            self.handle.__exit__(*error)

        def get_slice(self, key: str) -> SliceSpy:
            return SliceSpy(self.handle.get_slice(key), key)

    class SliceSpy:
        def __init__(self, view: Any, key: str) -> None:
            self.view, self.key = view, key

        def __getitem__(self, index: object) -> Tensor:
            asked.append((self.key, index))
            part: Tensor = self.view[index]
            return part

    monkeypatch.setattr(hf_module, "safe_open", Spy)
    return asked


def test_only_the_stored_slice_is_asked_for(saved: Callable[[str], Saved], request: pytest.FixtureRequest) -> None:
    source = HFFolder(saved("llama2").folder)
    asked = request.getfixturevalue("asked")
    source.read("layers.1.attn.qkv.weight", ((40, 70), (4, 6)))  # q is 0-32, k 32-64, v 64-96
    prefix = "model.layers.1.self_attn"
    columns = slice(4, 6)
    assert asked == [
        (f"{prefix}.k_proj.weight", (slice(8, 32), columns)),
        (f"{prefix}.v_proj.weight", (slice(0, 6), columns)),
    ]


def test_only_the_experts_of_a_box_are_asked_for(saved: Callable[[str], Saved], request: pytest.FixtureRequest) -> None:
    source = HFFolder(saved("qwen3-moe").folder)
    asked = request.getfixturevalue("asked")
    source.read("layers.2.mlp.experts.gate_up", ((5, 7), (4, 20), (0, 32)))  # gate is 0-12, up 12-24
    prefix = "model.layers.2.mlp.experts"
    whole = slice(0, 32)
    assert asked == [
        (f"{prefix}.5.gate_proj.weight", (slice(4, 12), whole)),
        (f"{prefix}.5.up_proj.weight", (slice(0, 8), whole)),
        (f"{prefix}.6.gate_proj.weight", (slice(4, 12), whole)),
        (f"{prefix}.6.up_proj.weight", (slice(0, 8), whole)),
    ]


def test_layers_that_predict_further_tokens_are_left_out(saved: Callable[[str], Saved], tmp_path: Path) -> None:
    made = saved("deepseek-v3")
    tensors = load_file(made.folder / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(32, 64)  # published folders hold such a layer
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((made.folder / "config.json").read_text())
    assert "layers.3.norm1.weight" not in parameter_shapes(HFFolder(tmp_path).config)
    tensors["model.layers.2.eh_proj.weight"] = torch.zeros(32, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"first being model\.layers\.2\.eh_proj"):
        HFFolder(tmp_path)


def test_export_keeps_the_bias_of_a_router_in_fp32(saved: Callable[[str], Saved], tmp_path: Path) -> None:
    source = HFFolder(saved("deepseek-v3").folder)
    export(source.config, source, tmp_path, dtype=torch.bfloat16)
    again = HFFolder(tmp_path)
    bias, weight = "layers.1.mlp.router.bias", "layers.1.mlp.router.weight"
    assert torch.equal(again.read(bias), source.read(bias))
    assert again.read(bias).dtype == torch.float32
    assert again.read(weight).dtype == torch.bfloat16
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("preset", ["gpt2-tiny", "moe-tiny"])
def test_export_casts_and_writes_in_chunks(preset: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = dataclasses.replace(PRESETS[preset], num_layers=2)
    source = InitSource(config, 0)
    largest: list[int] = []

    class Watched:
        def read(self, name: str, box: Box | None = None) -> Tensor:
            value = source.read(name, box)
            largest.append(value.nbytes)
            return value

    monkeypatch.setattr(hf_module, "_CHUNK", 1000)
    export(config, Watched(), tmp_path, dtype=torch.bfloat16)
    # A chunk of 1,000 bytes in bf16 is 2,000 in fp32, or one row of GPT-2's [128, 512].
    assert max(largest) <= 2048
    folder = HFFolder(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    for name in parameter_shapes(config):
        assert torch.equal(folder.read(name), source.read(name).bfloat16()), name
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) != config.tied


@pytest.mark.parametrize("name", ["gpt2", "gpt2-untied", "llama2"])
def test_keys_without_the_model_prefix_and_old_buffers(
    name: str, saved: Callable[[str], Saved], tmp_path: Path
) -> None:
    made = saved(name)
    tensors = load_file(made.folder / "model.safetensors")
    short = {key.removeprefix("transformer.").removeprefix("model."): value for key, value in tensors.items()}
    assert set(short) != set(tensors)
    if name == "gpt2":
        short["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
        short["lm_head.weight"] = torch.zeros(61, 32)
    save_file(short, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((made.folder / "config.json").read_text())
    torch.testing.assert_close(logits_of(load(tmp_path)), made.logits, rtol=0, atol=1e-5)


def test_layout_covers_every_row_once() -> None:
    for config in PRESETS.values():
        for name, pieces in layout(config).items():
            shape = parameter_shapes(config)[name]
            stack = shape[0] if len(shape) == 3 else 1
            at, whole = 0, tuple((0, size) for size in shape)
            for piece in pieces:
                *lead, rows, columns = (*piece.box, (0, 0)) if len(shape) == 1 else piece.box
                expert, row = divmod(at, shape[-2] if len(shape) > 1 else shape[0])
                assert lead == ([(expert, expert + 1)] if len(shape) == 3 else [])
                assert rows[0] == row
                assert len(shape) == 1 or columns == whole[-1]
                at += rows[1] - rows[0]
            assert at == stack * (shape[-2] if len(shape) > 1 else shape[0])


@pytest.fixture
def broken(saved: Callable[[str], Saved], tmp_path: Path) -> Callable[[Callable[[dict[str, Tensor]], None]], Path]:
    """A folder whose tensors were changed."""

    def make(change: Callable[[dict[str, Tensor]], None]) -> Path:
        made = saved("llama2")
        tensors = load_file(made.folder / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text((made.folder / "config.json").read_text())
        return tmp_path

    return make


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(UP), rf"model\.safetensors has no tensor {UP} of shape \(40, 32\).*layers\.1\.mlp\.gate_up"),
        (lambda t: t.update({UP: torch.zeros(32, 40)}), rf"{UP} should be \(40, 32\), but is \(32, 40\)"),
        (lambda t: t.update({"model.layers.3.x": torch.zeros(1)}), r"1 tensors .* first being model\.layers\.3\.x"),
        (lambda t: t.update({UP: torch.zeros(40, 32, dtype=torch.int8)}), "stored as I8: F64, F32, F16, BF16"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    change: Callable[[dict[str, Tensor]], None], message: str, broken: Callable[..., Path]
) -> None:
    with pytest.raises(WeightsError, match=message):
        HFFolder(broken(change))


def test_truncated_and_garbled_files_are_refused(broken: Callable[..., Path]) -> None:
    folder = broken(lambda tensors: None)
    file = folder / "model.safetensors"
    content = file.read_bytes()
    for cut in (content[:-100], content[:5], b"", b"\xff" * 64):
        file.write_bytes(cut)
        with pytest.raises(WeightsError, match=r"model\.safetensors cannot be read"):
            HFFolder(folder)


@pytest.fixture
def sharded(saved: Callable[[str], Saved], tmp_path: Path) -> Path:
    source = HFFolder(saved("llama2").folder)
    export(source.config, source, tmp_path / "sharded", shard_bytes=20_000)
    return tmp_path / "sharded"


@pytest.mark.parametrize("name", ["../model-00001-of-00003.safetensors", "/etc/passwd", "a/b", "..", "", "a\\b"])
def test_an_index_may_not_leave_the_folder(name: str, sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][UP] = name
    index.write_text(json.dumps(content))
    with pytest.raises(WeightsError, match="not a file of this folder"):
        HFFolder(sharded)


def test_a_wrong_index_is_refused(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    names = content["weight_map"]
    elsewhere = next(name for name in names.values() if name != names[UP])
    for value, message in (
        ({"weight_map": {**names, UP: "gone.safetensors"}}, r"gone\.safetensors cannot be read"),
        ({"weight_map": {**names, UP: elsewhere}}, f"{elsewhere} does not hold {UP}"),
        ({"weight_map": {**names, UP: 3}}, "has no weight_map"),
        ([], "not a JSON object"),
    ):
        index.write_text(json.dumps(value))
        with pytest.raises(WeightsError, match=message):
            HFFolder(sharded)
    index.write_text("{")
    with pytest.raises(WeightsError, match="cannot be read"):
        HFFolder(sharded)


def test_folders_that_are_none(tmp_path: Path, sharded: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        HFFolder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ConfigError, match="'bert' is not supported: llama, mistral, qwen2"):
        HFFolder(tmp_path)
    (tmp_path / "config.json").write_text((sharded / "config.json").read_text())
    with pytest.raises(WeightsError, match=r"neither model\.safetensors nor"):
        HFFolder(tmp_path)


def test_export_does_not_mix_with_older_weights(sharded: Path) -> None:
    source = HFFolder(sharded)
    with pytest.raises(ConfigError, match="holds weights already"):
        export(source.config, source, sharded)


def test_export_refuses_what_the_family_cannot_say(tmp_path: Path) -> None:
    config = dataclasses.replace(PRESETS["tiny"], qk_norm=True)
    with pytest.raises(ConfigError, match="qk_norm=True"):
        export(config, InitSource(config, 0), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_unknown_names_are_refused(sharded: Path) -> None:
    with pytest.raises(WeightsError, match=r"no parameter layers\.9\.norm1\.weight"):
        HFFolder(sharded).read("layers.9.norm1.weight")
