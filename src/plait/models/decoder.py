"""One pre-norm decoder for every family: the differences are data in `ModelConfig`.

    h = h + dropout1(attn(norm1(h)))
    h = h + dropout2(mlp(norm2(h)))

It may hold any contiguous part of the model: pieces that are None or absent from ``layers`` are skipped.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from plait.models.attention import Attention, Rope, rope_tables
from plait.models.batch import Batch
from plait.models.config import ModelConfig
from plait.models.latent import LatentAttention
from plait.models.layers import (
    CrossEntropy,
    Dropout,
    GatedMLP,
    LayerNorm,
    Linear,
    PositionEmbedding,
    RMSNorm,
    TokenEmbedding,
)
from plait.models.moe import MoE


def make_norm(config: ModelConfig) -> RMSNorm | LayerNorm:
    """The family's norm over the hidden dim."""
    kind = RMSNorm if config.norm == "rmsnorm" else LayerNorm
    return kind(config.hidden_size, config.norm_eps)


class Embedding(nn.Module):
    """batch -> h [N, D]: token embedding, learned positions where the family has them, dropout."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        super().__init__()
        learned = config.positions == "learned"
        self.tokens = TokenEmbedding(config.vocab_size, config.hidden_size)
        self.positions = PositionEmbedding(config.max_positions, config.hidden_size) if learned else None
        self.dropout = Dropout(config.dropout, seed, layer=-1, site=0)

    def forward(self, batch: Batch) -> Tensor:
        h_ND: Tensor = self.tokens(batch.tokens_BT.flatten())
        if self.positions is not None:
            h_ND = h_ND + self.positions(batch.positions_N())
        h_ND = self.dropout(h_ND, batch)
        return h_ND


class MLP(nn.Module):
    """down(gelu(up(h))), [N, D] -> [N, D]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.approximate = "tanh" if config.activation == "gelu_tanh" else "none"
        self.up = Linear(config.hidden_size, config.ffn_size, config.mlp_bias)
        self.down = Linear(config.ffn_size, config.hidden_size, config.mlp_bias)

    def forward(self, h_ND: Tensor) -> Tensor:
        out_ND: Tensor = self.down(F.gelu(self.up(h_ND), approximate=self.approximate))
        return out_ND


def _make_mlp(config: ModelConfig, layer: int) -> MoE | GatedMLP | MLP:
    moe = config.moe_of(layer)
    if moe is not None:
        return MoE(config.hidden_size, moe)
    return GatedMLP(config.hidden_size, config.ffn_size, config.mlp_bias) if config.gated else MLP(config)


class Block(nn.Module):
    """One layer, h [N, D] -> [N, D]; ``layer`` is its global index. Experts are given the batch, a plain MLP is not."""

    def __init__(self, config: ModelConfig, layer: int, seed: int) -> None:
        super().__init__()
        self.norm1 = make_norm(config)
        self.attn = Attention(config, layer) if config.mla is None else LatentAttention(config, layer)
        self.dropout1 = Dropout(config.dropout, seed, layer, site=1)
        self.norm2 = make_norm(config)
        self.sparse = config.moe_of(layer) is not None
        self.mlp = _make_mlp(config, layer)
        self.dropout2 = Dropout(config.dropout, seed, layer, site=2)

    def forward(self, h_ND: Tensor, rope: Rope | None, batch: Batch) -> Tensor:
        h_ND = h_ND + self.dropout1(self.attn(self.norm1(h_ND), rope, batch), batch)
        normal_ND = self.norm2(h_ND)
        out_ND = self.mlp(normal_ND, batch) if self.sparse else self.mlp(normal_ND)
        h_ND = h_ND + self.dropout2(out_ND, batch)
        return h_ND


class Decoder(nn.Module):
    """The model, or the part of it whose other pieces have been taken out.

    ``seed`` is dropout's. Weights are uninitialised (or on meta, when built there): see `plait.models.init`.
    """

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embed: Embedding | None = Embedding(config, seed)
        self.layers = nn.ModuleDict({str(i): Block(config, i, seed) for i in range(config.num_layers)})
        self.norm: RMSNorm | LayerNorm | None = make_norm(config)
        self.head: Linear | None = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.loss = CrossEntropy()
        if config.tied:
            self.head.weight = self.embed.tokens.weight

    def forward(self, hidden_ND: Tensor | None, batch: Batch) -> Tensor:
        """Hidden activations [N, D] or, with None, the batch's tokens -> logits [N, V], or hidden without a head."""
        if hidden_ND is None:
            if self.embed is None:
                raise ValueError("this part of the model has no embedding: it must be given hidden activations")
            hidden_ND = self.embed(batch)
        rope = rope_tables(self.config, batch)
        for block in self.layers.values():
            hidden_ND = block(hidden_ND, rope, batch)
        if self.norm is not None:
            hidden_ND = self.norm(hidden_ND)
        if self.head is not None:
            hidden_ND = self.head(hidden_ND)
        return hidden_ND
