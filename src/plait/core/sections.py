"""The sections of a run file: frozen dataclasses of documented, checked keys. `plait.core.config` reads them."""

# ruff: noqa: RUF009 - key() gives dataclasses.field

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from plait.core.errors import ConfigError
from plait.core.fields import Interval, check_values, key, nearest_names
from plait.core.plan import Plan

NATURAL = Interval(0)
POSITIVE = Interval(1)
SHARE = Interval(0, 1)
PART = Interval(0, 1, open_high=True)

MODEL_FIELDS: Mapping[str, tuple[type, str]] = {
    "family": (
        str,
        "llama, mistral, qwen2, qwen3, gpt2, mixtral, qwen3_moe or deepseek_v3: the layout for Hugging Face.",
    ),
    "vocab_size": (int, "Tokens in the vocabulary."),
    "hidden_size": (int, "Width of the residual stream."),
    "num_layers": (int, "Decoder layers."),
    "num_heads": (int, "Query heads."),
    "num_kv_heads": (int, "Key and value heads; fewer than num_heads: grouped-query attention."),
    "head_dim": (int, "Width of a head."),
    "ffn_size": (int, "Width inside the feed-forward layer."),
    "max_positions": (
        int,
        "Longest sequence the model is made for; learned positions end there, rotary ones may go on.",
    ),
    "norm": (str, "rmsnorm or layernorm."),
    "norm_eps": (float, "Added to the variance in norms."),
    "activation": (str, "swiglu, gelu or gelu_tanh."),
    "positions": (str, "rope or learned."),
    "rope_theta": (float, "Base of the rotary frequencies."),
    "rope_scaling": (dict, "Table of the scaling of rotary frequencies."),
    "qkv_bias": (bool, "Bias on the query, key and value projections."),
    "out_bias": (bool, "Bias on the attention output projection."),
    "mlp_bias": (bool, "Bias on the feed-forward projections."),
    "qk_norm": (bool, "Norm on queries and keys."),
    "tied": (bool, "The head shares the embedding's weight."),
    "dropout": (float, "Share of activations dropped in training."),
    "sliding_window": (int, "Tokens that attention looks back."),
    "window_from": (int, "First layer that has the sliding window."),
    "init_std": (float, "Standard deviation of initial weights."),
    "moe": (
        dict,
        "Table of the experts in place of the feed-forward layer: num_experts, top_k, ffn_size, shared_ffn, "
        "dense_layers, score, normalise, scale, groups, top_groups, bias.",
    ),
    "mla": (dict, "Table of latent attention: q_rank, kv_rank, nope_dim, rope_dim, v_dim, interleaved."),
}
"""Keys of ``[model]`` beside preset and hf: the fields of the model's own configuration, which checks their values."""


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The model: a preset, a Hugging Face folder, or its own keys, which go over what preset or hf says."""

    preset: str | None = key(None, 'Name of a built-in model; "tiny" when neither hf nor any size is given.')
    hf: Path | None = key(None, "Hugging Face folder: its configuration and weights.")
    fields: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.preset is not None and self.hf is not None:
            raise ConfigError("[model] preset and hf are both given: keep one")
        for name in self.fields:
            if name not in MODEL_FIELDS:
                raise ConfigError(f"[model] has no size {name!r}; {nearest_names(name, MODEL_FIELDS)}")
        if self.preset is None and self.hf is None and not self.fields:
            object.__setattr__(self, "preset", "tiny")


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """The tokens, and how samples are taken from them. Without tokens and text: Python's own standard library."""

    tokens: Path | None = key(None, "Token file NAME.bin, with NAME.json beside it.")
    text: Path | None = key(None, "Text file, made into tokens once.")
    tokenizer: str = key("bytes", "bytes, or the path of a tokenizer.json, for text.")
    seq: int = key(128, "Tokens in a sample.", within=POSITIVE)
    shuffle: bool = key(True, "Order samples by a permutation of (seed, epoch); false: in the file's order.")
    held_out: float = key(0.02, "Share of the samples, at the end, kept for evaluation.", within=PART)
    separator: int | None = key(
        None,
        "Token that ends a document: positions restart after it, attention does not cross it, "
        "the target that follows it is masked.",
        within=NATURAL,
    )

    def __post_init__(self) -> None:
        check_values(self, "data")
        if self.tokens is not None and self.text is not None:
            raise ConfigError("[data] tokens and text are both given: keep one")


@dataclass(frozen=True, kw_only=True)
class TrainSection:
    """How long, on how much, and what is measured on the way."""

    steps: int = key(100, "Optimizer steps.", within=POSITIVE)
    global_batch: int = key(16, "Samples a step, over all ranks.", within=POSITIVE)
    seed: int = key(0, "Seed of weights, data order and dropout.", within=NATURAL)
    eval_every: int = key(0, "Steps between evaluations on the held-out samples; 0: never.", within=NATURAL)
    eval_batches: int = key(4, "Global batches in an evaluation.", within=POSITIVE)
    freeze: tuple[str, ...] = key((), 'Parameters that are not trained, as name patterns like "layers.0.*".')
    trace_step: int = key(3, "Step whose spans go to trace.json.", within=NATURAL)

    def __post_init__(self) -> None:
        check_values(self, "train")


@dataclass(frozen=True, kw_only=True)
class OptimizerSection:
    """AdamW and its learning rate."""

    lr: float = key(3e-4, "Peak learning rate.", within=NATURAL)
    betas: tuple[float, float] = key((0.9, 0.95), "Decay of Adam's two moments.", within=PART)
    eps: float = key(1e-8, "Added to the root of the second moment.", within=Interval(0, open_low=True))
    weight_decay: float = key(0.1, "Decoupled decay, on tensors of two or more dims.", within=NATURAL)
    clip: float = key(1.0, "Largest global gradient norm; 0: no clipping.", within=NATURAL)
    schedule: str = key("cosine", "Course of the learning rate.", choices=("constant", "cosine", "wsd"))
    warmup: int = key(0, "Steps of linear warm-up.", within=NATURAL)
    min_lr_ratio: float = key(0.1, "Last learning rate as a share of lr (cosine, wsd).", within=SHARE)
    decay: float = key(0.2, "Share of the steps in which wsd decays.", within=SHARE)

    def __post_init__(self) -> None:
        check_values(self, "optimizer")


@dataclass(frozen=True, kw_only=True)
class MoESection:
    """How a model with experts is trained: capacity, balance, and where its experts lie."""

    capacity_factor: float | None = key(
        None,
        "An expert takes this many times its even share of a sample's assignments, the rest is dropped; unset: all.",
        within=Interval(0, open_low=True),
    )
    drop: str = key(
        "position",
        "What stays within the capacity: the first tokens of the sample, or those of the highest score.",
        choices=("position", "score"),
    )
    aux_loss: float = key(0.0, "Weight of the load-balancing loss (Switch).", within=NATURAL)
    z_loss: float = key(0.0, "Weight of the loss on the size of the router's logits (ST-MoE).", within=NATURAL)
    bias_balance: bool = key(False, "Even the load by a bias on the router's choice, without a loss (DeepSeek).")
    bias_rate: float = key(1e-3, "By how much that bias moves in a step.", within=Interval(0, open_low=True))
    placement: str = key(
        "static",
        "Experts stay where they are, or lie by measured load: hot ones copied, cold ones moved.",
        choices=("static", "load"),
    )

    def __post_init__(self) -> None:
        check_values(self, "moe")


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """Where the run happens and what it leaves."""

    dir: Path | None = key(None, "Run folder; unset: runs/ and the time.")
    processes: int | None = key(None, "Local workers; unset: as many as the plan needs.", within=POSITIVE)
    device: str = key("auto", "Where ranks compute.", choices=("auto", "cpu", "cuda"))
    timeout: float = key(
        60.0,
        "Seconds any wait for another rank may take; text to encode and weights to write take what they need.",
        within=Interval(0, open_low=True),
    )
    threads: int | None = key(None, "Threads a rank on CPU; unset: the cores shared evenly.", within=POSITIVE)
    resume: bool = key(False, "Go on from the newest whole checkpoint of the run folder, where there is one.")
    max_restarts: int = key(3, "Restarts after a failure that may come without a new checkpoint.", within=NATURAL)
    grace: float = key(
        30.0, "Seconds that a run has to save and end once SIGTERM or SIGUSR1 came.", within=Interval(0, open_low=True)
    )
    nan: str = key(
        "stop",
        "When loss or gradient norm is no finite number: stop; skip, leave the update out; or rollback, go back to the "
        "last checkpoint and leave out the data since.",
        choices=("stop", "skip", "rollback"),
    )
    straggler: float = key(
        1.5,
        "A rank is named whose own computing takes this many times what it takes those with the same work; 0: none is.",
        within=NATURAL,
    )
    max_skips: int = key(5, "Steps in a row that nan=skip leaves out, and rollbacks of one run.", within=POSITIVE)
    fallback_plans: tuple[str, ...] = key(
        (), 'Plans in one line, "pp=2 tp=1 micro=4", tried in order when ranks are gone; none: plait makes one.'
    )
    replicas: int = key(
        0,
        "Steps between copies of the state in memory, for restarts, on two hosts where there are several; 0: none.",
        within=NATURAL,
    )
    rebalance: int = key(
        0,
        "Steps whose measured times decide whether the stage cut is changed for ranks of unequal speed; 0: never.",
        within=NATURAL,
    )

    def __post_init__(self) -> None:
        check_values(self, "run")
        if 0 < self.straggler <= 1:
            raise ConfigError(f"[run] straggler = {self.straggler:g}: must be above 1, or 0 to name no rank")
        for text in self.fallback_plans:
            Plan.parse(text)


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """When the whole state is saved, and which checkpoints stay."""

    dir: Path | None = key(None, "Folder of the checkpoints; unset: checkpoints in the run folder.")
    every: int = key(0, "Steps between two checkpoints; 0: one at the end alone.", within=NATURAL)
    keep: int = key(2, "Newest checkpoints that stay.", within=POSITIVE)
    keep_every: int = key(0, "Checkpoints of steps that this number divides stay as well; 0: none.", within=NATURAL)
    asynchronous: bool = key(True, "Write while training goes on: a step waits for the copy alone.")
    verify: bool = key(True, "Read a checkpoint's hashes before resuming from it.")
    timeout: float = key(
        300.0,
        "Seconds without progress after which a save counts as one that stands still: it is told, and not waited for.",
        within=Interval(0, open_low=True),
    )

    def __post_init__(self) -> None:
        check_values(self, "checkpoint")
