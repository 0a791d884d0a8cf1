"""Run files: defaults, the frozen set of keys, overrides, errors by name, and the round trip through TOML."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.core.config import SECTIONS, Config, check_paths, dump, keys, load, loads, markdown
from plait.core.errors import ConfigError
from plait.core.plan import Plan
from plait.core.sections import MODEL_FIELDS, ModelSection, MoESection
from plait.models.config import ModelConfig

KEYS = """
model.preset model.hf model.family model.vocab_size model.hidden_size model.num_layers model.num_heads
model.num_kv_heads model.head_dim model.ffn_size model.max_positions model.norm model.norm_eps model.activation
model.positions model.rope_theta model.rope_scaling model.qkv_bias model.out_bias model.mlp_bias model.qk_norm
model.tied model.dropout model.sliding_window model.window_from model.init_std model.moe model.mla
data.tokens data.text data.tokenizer
data.seq data.shuffle data.held_out data.separator train.steps train.global_batch train.seed train.eval_every
train.eval_batches train.freeze train.trace_step optimizer.lr optimizer.betas optimizer.eps optimizer.weight_decay
optimizer.clip optimizer.schedule optimizer.warmup optimizer.min_lr_ratio optimizer.decay
moe.capacity_factor moe.drop moe.aux_loss moe.z_loss moe.bias_balance moe.bias_rate moe.placement
plan.tp plan.pp plan.dp
plan.cp plan.context plan.ep plan.expert_tp plan.order plan.micro plan.schedule plan.virtual plan.live plan.stages
plan.zero plan.zero_group plan.gather plan.compress plan.node plan.precision plan.recompute
plan.sequence_parallel plan.bucket_mb plan.auto run.dir run.processes run.device run.timeout run.threads
run.resume run.max_restarts run.grace run.nan run.straggler run.max_skips run.fallback_plans run.replicas
run.rebalance
checkpoint.dir checkpoint.every checkpoint.keep checkpoint.keep_every checkpoint.asynchronous checkpoint.verify
checkpoint.timeout
"""


SMALL_MODEL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "ffn_size": 48,
    "max_positions": 64,
}


def written(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8", newline="")
    return path


def refused(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(written(folder, text), overrides)
    return str(caught.value)


# The surface


def test_the_keys_are_these_and_no_others() -> None:
    assert [row.key for row in keys()] == KEYS.split(), (
        "a new key is a decision: add it here and to docs/configuration.md"
    )


def test_every_key_is_documented() -> None:
    assert all(row.doc and row.type and row.default for row in keys())
    text = markdown()
    assert all(f"## [{section}]" in text for section in SECTIONS)
    assert all(f"| `{row.key.partition('.')[2]}` | {row.type} | " in text for row in keys())
    assert "| `betas` | list of 2 float | `[0.9, 0.95]` |" in text
    assert "| `dp` | int | unset |" in text
    assert "| `tokens` | path | unset |" in text


def test_model_keys_are_the_fields_of_the_model() -> None:
    kinds = {field.name: str(field.type).removesuffix(" | None") for field in dataclasses.fields(ModelConfig)}
    assert {name: kind.__name__ for name, (kind, _) in MODEL_FIELDS.items()} == {
        **kinds,
        **dict.fromkeys(("rope_scaling", "moe", "mla"), "dict"),
    }


# Defaults


def test_without_a_file_it_is_a_small_parallel_run() -> None:
    config = load(None)
    assert (config.plan.tp, config.plan.pp) == (2, 2)
    assert config.model == ModelSection(preset="tiny")
    assert config.data.tokens is None
    assert config.data.text is None


def test_an_empty_file_is_the_plain_defaults(tmp_path: Path) -> None:
    assert load(written(tmp_path, "")) == Config()
    assert Config().model.preset == "tiny"
    assert Config().plan == Plan()


def test_fields_alone_name_no_preset(tmp_path: Path) -> None:
    model = load(written(tmp_path, "[model]\nhidden_size = 64\nrope_scaling = {kind = 'linear', factor = 2}")).model
    assert model.preset is None
    assert model.fields == {"hidden_size": 64, "rope_scaling": {"kind": "linear", "factor": 2}}


def test_fields_go_over_a_preset(tmp_path: Path) -> None:
    model = load(written(tmp_path, "[model]\npreset = 'gpt2'\ndropout = 0")).model
    assert model.preset == "gpt2"
    assert model.fields == {"dropout": 0.0}


# Overrides


def test_overrides_take_toml_values_and_bare_words(tmp_path: Path) -> None:
    config = load(
        written(tmp_path, "[plan]\ntp = 4\n[train]\nsteps = 5\n"),
        [
            "plan.tp=2",
            "plan.stages=3,5",
            "plan.recompute=full:0-3 selective:4-7",
            "plan.sequence_parallel=false",
            'train.freeze=["embed.*", "layers.0.*"]',
            "optimizer.lr=1e-3",
            "optimizer.schedule='wsd'",
            "optimizer.betas=0.8,0.9",
            "model.num_layers=3",
            "run.timeout=5",
        ],
    )
    assert (config.plan.tp, config.plan.stages, config.plan.sequence_parallel) == (2, (3, 5), False)
    assert config.plan.recompute == "full:0-3 selective:4-7"
    assert config.train.freeze == ("embed.*", "layers.0.*")
    assert (config.train.steps, config.run.timeout) == (5, 5.0)
    assert (config.optimizer.lr, config.optimizer.schedule, config.optimizer.betas) == (1e-3, "wsd", (0.8, 0.9))
    assert config.model.fields == {"num_layers": 3}


def test_a_hugging_face_folder_takes_the_place_of_the_default_preset(tmp_path: Path) -> None:
    assert load(None, [f"model.hf={tmp_path}"]).model == ModelSection(hf=tmp_path)
    assert load(None, [f"model.hf={tmp_path}", "model.hf=none"]).model == ModelSection(preset="tiny")
    with pytest.raises(ConfigError, match="preset and hf are both given"):
        load(None, ["model.preset=tiny", f"model.hf={tmp_path}"])
    with pytest.raises(ConfigError, match="preset and hf are both given"):
        load(written(tmp_path, "[model]\npreset = 'tiny'"), [f"model.hf={tmp_path}"])


def test_none_unsets_an_optional_key(tmp_path: Path) -> None:
    path = written(tmp_path, "[data]\ntext = 'a.txt'\n[plan]\ndp = 2")
    config = load(path, ["data.text=none", "data.tokens=b.bin", "plan.dp=none", "plan.recompute=none"])
    assert config.data.text is None
    assert config.data.tokens == Path.cwd() / "b.bin"
    assert config.plan == Plan()


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("plan.tq=2", "unknown key 'tq' in [plan]; nearest: tp"),
        ("pln.tp=2", "unknown section 'pln'; nearest: plan"),
        ("tp=2", "expected section.key=value; did you mean plan.tp?"),
        ("plan.tp", "expected section.key=value"),
        ("plan.tp=two", "--set plan.tp = 'two': expected int, found str"),
        ("plan.tp=1\npp=3", "expected int"),
        ("train.steps=0", "[train] steps = 0: must be at least 1"),
        ("model.fields={}", "unknown key 'fields' in [model]"),
        ("train.seed=none", "expected int"),
    ],
)
def test_bad_overrides_are_named(override: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        load(None, [override])


# Paths


def test_paths_in_a_file_start_at_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    text = """
    [model]
    hf = "../llama"
    [data]
    text = "a.txt"
    tokenizer = "tok/tokenizer.json"
    [plan]
    schedule = "zb.txt"
    [run]
    dir = "/out"
    """
    written(tmp_path / "runs", text)
    monkeypatch.chdir(tmp_path)
    config = load(Path("runs/run.toml"), ["data.text=b.txt"])
    assert config.model.hf == tmp_path / "llama"
    assert config.data.text == tmp_path / "b.txt", "an override's path starts at the current folder"
    assert config.data.tokenizer == str(tmp_path / "runs/tok/tokenizer.json")
    assert config.plan.schedule == str(tmp_path / "runs/zb.txt")
    assert config.run.dir == Path("/out")


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load(None, ["run.dir=~/out"]).run.dir == tmp_path / "out"


def test_missing_inputs_are_all_named(tmp_path: Path) -> None:
    config = load(
        written(tmp_path, "[model]\nhf='m'\n[data]\ntokens='a.bin'\ntokenizer='t.json'\n[plan]\nschedule='s.txt'")
    )
    with pytest.raises(ConfigError) as caught:
        check_paths(config)
    wanted = ["m/config.json", "a.bin", "a.json", "t.json", "s.txt"]
    assert [line.rpartition(" ")[2] for line in str(caught.value).splitlines()] == [str(tmp_path / w) for w in wanted]
    (tmp_path / "m").mkdir()
    for name in wanted:
        (tmp_path / name).touch()
    check_paths(config)
    check_paths(load(None))


# Errors


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[trian]", "unknown section 'trian'; nearest: train"),
        ("steps = 3", "unknown section 'steps'; it is a key: train.steps"),
        ("train = 3", "expected a section [train]"),
        ("[train]\nstep = 3", "unknown key 'step' in [train]; nearest: steps"),
        ("[train]\nlr = 3", "unknown key 'lr' in [train]; it belongs to [optimizer]"),
        ("[train]\nzzzzz = 3", "known: steps, global_batch"),
        ("[train]\nsteps = '3'", "[train] steps = '3': expected int, found str"),
        ("[train]\nsteps = true", "expected int, found bool"),
        ("[train]\nfreeze = 'x'", "expected list of str"),
        ("[train]\nfreeze = [1]", "freeze = 1: expected string"),
        ("[data]\nshuffle = 1", "expected bool"),
        ("[data]\ntext = ''", "expected path"),
        ("[optimizer]\nlr = nan", "expected float"),
        ("[optimizer]\nlr = -1", "[optimizer] lr = -1.0: must be at least 0"),
        ("[optimizer]\nbetas = [0.9]", "expected list of 2 float"),
        ("[optimizer]\nbetas = [0.9, 1.0]", "must be at least 0 and below 1"),
        ("[optimizer]\neps = 0", "must be above 0"),
        ("[optimizer]\nmin_lr_ratio = 1.5", "at most 1"),
        ("[optimizer]\nschedule = 'linear'", "must be one of constant, cosine, wsd"),
        ("[run]\ndevice = 'tpu'", "must be one of auto, cpu, cuda"),
        ("[run]\nprocesses = 0", "must be at least 1"),
        ("[data]\nheld_out = 1", "below 1"),
        ("[data]\ntext = 'a'\ntokens = 'b'", "tokens and text are both given"),
        ("[data]\nheld_out = 0\n[train]\neval_every = 5", "eval_every needs held-out samples"),
        ("[model]\npreset = 'tiny'\nhf = 'x'", "preset and hf are both given"),
        ("[model]\nrope_scaling = 2", "expected table"),
        ("[model]\nhiden_size = 2", "nearest: hidden_size"),
        ("[plan]\ntp = 1.5", "[plan] tp = 1.5: expected int, found float"),
        ("[plan]\nstages = [1, 'a']", "stages = 'a': expected int"),
        ("[train]\nsteps = x\n", "not valid TOML: Invalid value (at line 2, column 9)"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str, says: str) -> None:
    message = refused(tmp_path, text)
    assert says in message


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run file .*none\.toml: No such file"):
        load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load(tmp_path)
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load(path)


def test_sections_built_in_code_are_held_to_the_same_ranges() -> None:
    with pytest.raises(ConfigError, match="steps = 0"):
        dataclasses.replace(Config().train, steps=0)
    with pytest.raises(ConfigError, match="nearest: hidden_size"):
        ModelSection(fields={"hidden": 3})


# Round trip

words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12)
numbers = st.floats(0, 1e9, allow_nan=False)
paths = words.map(lambda word: Path(f"/data/x{word.replace('/', '_')}"))
MODEL_VALUES = {int: st.integers(0, 2**40), float: numbers, str: words, bool: st.booleans()}
models = st.builds(
    ModelSection,
    preset=st.none() | words,
    fields=st.fixed_dictionaries(
        {},
        optional={
            name: MODEL_VALUES.get(kind, st.dictionaries(words, numbers | words, max_size=3))
            for name, (kind, _) in MODEL_FIELDS.items()
        },
    ),
) | st.builds(ModelSection, hf=paths)
configs = st.builds(
    Config,
    model=models,
    data=st.builds(
        SECTIONS["data"],
        tokens=st.none() | paths,
        tokenizer=st.just("bytes") | paths.map(str),
        seq=st.integers(1, 10**6),
        shuffle=st.booleans(),
        held_out=st.floats(0.001, 0.999),
        separator=st.none() | st.integers(0, 10**6),
    ),
    train=st.builds(
        SECTIONS["train"],
        seed=st.integers(0, 2**63),
        freeze=st.lists(words, max_size=3).map(tuple),
        eval_every=st.just(3),
    ),
    optimizer=st.builds(SECTIONS["optimizer"], lr=numbers, betas=st.tuples(st.floats(0, 0.999), st.floats(0, 0.999))),
    plan=st.builds(
        Plan,
        dp=st.none() | st.integers(),
        stages=st.none() | st.lists(st.integers()).map(tuple),
        schedule=st.just("gpipe") | paths.map(lambda path: f"{path}.txt"),
        recompute=words,
        sequence_parallel=st.none() | st.booleans(),
        bucket_mb=numbers,
    ),
    run=st.builds(SECTIONS["run"], dir=st.none() | paths, processes=st.none() | st.integers(1, 64)),
)


@settings(deadline=None)
@given(config=configs)
def test_dump_reads_back_equal(config: Config, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "round.toml"
    path.write_text(dump(config), encoding="utf-8", newline="")
    assert load(path) == config


# Experts


def test_experts_are_a_table_of_the_model_and_a_section_of_their_training(tmp_path: Path) -> None:
    text = """
[model]
preset = "tiny"
moe = {num_experts = 4, top_k = 2, ffn_size = 64, dense_layers = [0], score = "sigmoid", bias = true}
mla = {kv_rank = 8, nope_dim = 8, rope_dim = 4, v_dim = 8}
[moe]
capacity_factor = 2
drop = "score"
z_loss = 1e-3
bias_balance = true
placement = "load"
"""
    config = load(written(tmp_path, text))
    assert config.moe == MoESection(capacity_factor=2.0, drop="score", z_loss=1e-3, bias_balance=True, placement="load")
    assert loads(dump(config)) == config
    model = ModelConfig.from_mapping({**SMALL_MODEL, **config.model.fields, "mla": None})
    assert model.moe is not None
    assert (model.moe.num_experts, model.moe.dense_layers, model.moe.score) == (4, (0,), "sigmoid")
    assert load(written(tmp_path, text), ["moe.capacity_factor=none"]).moe.capacity_factor is None


def test_experts_are_trained_dropless_and_without_losses_by_default() -> None:
    assert Config().moe == MoESection(
        capacity_factor=None,
        drop="position",
        aux_loss=0.0,
        z_loss=0.0,
        bias_balance=False,
        bias_rate=1e-3,
        placement="static",
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("capacity_factor = 0", "[moe] capacity_factor = 0.0: must be above 0"),
        ("drop = 'random'", "[moe] drop = 'random': must be one of position, score"),
        ("aux_loss = -0.1", "[moe] aux_loss = -0.1: must be at least 0"),
        ("z_loss = -1", "[moe] z_loss = -1.0: must be at least 0"),
        ("bias_balance = 1", "bias_balance = 1: expected bool, found int"),
        ("bias_rate = 0", "[moe] bias_rate = 0.0: must be above 0"),
        ("placement = 'hot'", "[moe] placement = 'hot': must be one of static, load"),
        ("experts = 8", "unknown key 'experts' in [moe]"),
    ],
)
def test_bad_values_of_experts_are_refused_by_name(line: str, message: str, tmp_path: Path) -> None:
    assert message in refused(tmp_path, f"[moe]\n{line}\n")


# A plan that plait makes


@pytest.mark.parametrize(
    ("text", "overrides", "given"),
    [
        ('plan = "auto"', [], ()),
        ("[plan]\nauto = true\ntp = 2\nzero = 1", [], ("tp", "zero")),
        ("[plan]\nauto = true\ntp = 2", ["plan.auto=false"], None),
        ("[plan]\ntp = 2", ["plan=auto"], ("tp",)),
        ("[plan]\ntp = 2", [], None),
    ],
)
def test_auto_leaves_the_plan_to_plait_and_keeps_given_keys(
    text: str, overrides: list[str], given: tuple[str, ...] | None, tmp_path: Path
) -> None:
    config = load(written(tmp_path, text), overrides)
    assert config.auto == given
    assert loads(dump(config)) == config


def test_auto_without_a_run_file_gives_no_key() -> None:
    config = load(None, ["plan=auto"])
    assert (config.auto, config.plan) == ((), Plan())


def test_auto_is_true_or_false(tmp_path: Path) -> None:
    assert "expected true or false" in refused(tmp_path, "[plan]\nauto = 3")
