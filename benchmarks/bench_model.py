"""The benchmark's Llama-style model, written as PyTorch users write it (torchtitan's llama3 is the model of this file).

It is the peers' model: nothing here knows of plait except ``BenchModel.load``, which reads plait's parameter names, so
that both sides start from the same values. Choices that were measured on the benchmark machine (one thread, fp32,
forward and backward):

- rope as a complex product of interleaved pairs (0.9 ms a layer) against split halves (3.3 ms); ``load`` permutes the
  rows of q and k, which leaves every attention score as it was;
- ``enable_gqa=True`` in scaled_dot_product_attention (49 ms at the whole batch) against repeated KV heads (53 to 56
  ms).

Shape suffixes: B samples, T positions, D hidden, H heads, K KV heads, E head dim, F ffn, V vocabulary. Head counts are
read from run-time shapes, so the same classes serve tensor parallelism, whose ranks see a part of the heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORE = -100


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Sizes of the benchmark model and batch (issue "Speed and memory"); tests use smaller ones."""

    hidden: int = 512
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 1408
    vocab: int = 8192
    seq: int = 256
    batch: int = 8
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def tokens(self) -> int:
        """Tokens of one step: global batch times sequence."""
        return self.batch * self.seq


def parameter_shapes(config: BenchConfig) -> dict[str, tuple[int, ...]]:
    """plait's parameter names and full shapes, in forward order (untied head)."""
    c, shapes = config, {"embed.tokens.weight": (config.vocab, config.hidden)}
    for i in range(c.layers):
        shapes |= {
            f"layers.{i}.norm1.weight": (c.hidden,),
            f"layers.{i}.attn.qkv.weight": ((c.heads + 2 * c.kv_heads) * c.head_dim, c.hidden),
            f"layers.{i}.attn.out.weight": (c.hidden, c.heads * c.head_dim),
            f"layers.{i}.norm2.weight": (c.hidden,),
            f"layers.{i}.mlp.gate_up.weight": (2 * c.ffn, c.hidden),
            f"layers.{i}.mlp.down.weight": (c.hidden, c.ffn),
        }
    return shapes | {"norm.weight": (c.hidden,), "head.weight": (c.vocab, c.hidden)}


def draw_weights(config: BenchConfig, seed: int = 0) -> dict[str, Tensor]:
    """Initial values in plait's names: matrices from N(0, 0.02^2), norms one. Every rank draws the same."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.02
        for name, shape in parameter_shapes(config).items()
    }


def draw_batch(config: BenchConfig, step: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """(tokens_BT, targets_BT) of one step, int64; every position has a target."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    ids = torch.randint(config.vocab, (config.batch, config.seq + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def rotations(config: BenchConfig, seq: int) -> Tensor:
    """exp(i * position * frequency) as complex64 [T, 1, E/2] (RoFormer, arXiv 2104.09864, eq. 34)."""
    powers = torch.arange(0, config.head_dim, 2) / config.head_dim
    angles = torch.outer(torch.arange(seq).float(), config.rope_theta**-powers)
    return torch.polar(torch.ones_like(angles), angles)[:, None]


def rotate(x_BTHE: Tensor, rotations_T1E: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x_BTHE.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotations_T1E).flatten(-2)


class Attention(nn.Module):
    def __init__(self, config: BenchConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.wq = nn.Linear(config.hidden, width, bias=False)
        self.wk = nn.Linear(config.hidden, kv_width, bias=False)
        self.wv = nn.Linear(config.hidden, kv_width, bias=False)
        self.wo = nn.Linear(width, config.hidden, bias=False)

    def forward(self, x_BTD: Tensor, rotations_T1E: Tensor) -> Tensor:
        heads = (-1, self.head_dim)
        q_BTHE = rotate(self.wq(x_BTD).unflatten(-1, heads), rotations_T1E)
        k_BTKE = rotate(self.wk(x_BTD).unflatten(-1, heads), rotations_T1E)
        v_BTKE = self.wv(x_BTD).unflatten(-1, heads)
        out_BHTE = F.scaled_dot_product_attention(
            q_BTHE.transpose(1, 2), k_BTKE.transpose(1, 2), v_BTKE.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        return self.wo(out_BHTE.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, config: BenchConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden, config.ffn, bias=False)
        self.w2 = nn.Linear(config.ffn, config.hidden, bias=False)
        self.w3 = nn.Linear(config.hidden, config.ffn, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_BTD)) * self.w3(x_BTD))


class Block(nn.Module):
    def __init__(self, config: BenchConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, h_BTD: Tensor, rotations_T1E: Tensor) -> Tensor:
        h_BTD = h_BTD + self.attention(self.attention_norm(h_BTD), rotations_T1E)
        return h_BTD + self.feed_forward(self.ffn_norm(h_BTD))


class BenchModel(nn.Module):
    """The whole decoder, or the slice of it that one pipeline stage holds.

    ``layers`` are global layer numbers; a slice that holds layer 0 holds the embedding, one that holds the last layer
    the final norm and the head. Takes tokens_BT or h_BTD, returns h_BTD or logits_BTV.
    """

    def __init__(self, config: BenchConfig, layers: range | None = None) -> None:
        super().__init__()
        layers = range(config.layers) if layers is None else layers
        first, last = 0 in layers, config.layers - 1 in layers
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab, config.hidden) if first else None
        self.layers = nn.ModuleDict({str(i): Block(config) for i in layers})
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps) if last else None
        self.output = nn.Linear(config.hidden, config.vocab, bias=False) if last else None
        self.register_buffer("rotations", rotations(config, config.seq), persistent=False)

    def forward(self, h: Tensor) -> Tensor:
        if self.tok_embeddings is not None:
            h = self.tok_embeddings(h)
        for block in self.layers.values():
            h = block(h, self.rotations)
        if self.norm is not None and self.output is not None:
            h = self.output(self.norm(h))
        return h

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copies what this slice holds of full plait-named tensors (fused q|k|v and gate|up, half-rotation rope)."""
        c = self.config
        if self.tok_embeddings is not None:
            self.tok_embeddings.weight.copy_(weights["embed.tokens.weight"])
        for number, block in self.layers.items():
            assert isinstance(block, Block)
            name = f"layers.{number}"
            attention, mlp = block.attention, block.feed_forward
            widths = [c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim]
            q, k, v = weights[f"{name}.attn.qkv.weight"].split(widths)
            attention.wq.weight.copy_(_interleave(q, c.head_dim))
            attention.wk.weight.copy_(_interleave(k, c.head_dim))
            attention.wv.weight.copy_(v)
            attention.wo.weight.copy_(weights[f"{name}.attn.out.weight"])
            gate, up = weights[f"{name}.mlp.gate_up.weight"].chunk(2)
            mlp.w1.weight.copy_(gate)
            mlp.w3.weight.copy_(up)
            mlp.w2.weight.copy_(weights[f"{name}.mlp.down.weight"])
            block.attention_norm.weight.copy_(weights[f"{name}.norm1.weight"])
            block.ffn_norm.weight.copy_(weights[f"{name}.norm2.weight"])
        if self.norm is not None and self.output is not None:
            self.norm.weight.copy_(weights["norm.weight"])
            self.output.weight.copy_(weights["head.weight"])


def _interleave(rows: Tensor, head_dim: int) -> Tensor:
    """Rows of each head from (i, i + E/2) pairs, as Hugging Face and plait store them, to neighbouring (2i, 2i + 1)
    pairs.
    """
    return rows.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Sum of the token losses over unmasked targets."""
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORE, reduction="sum")
