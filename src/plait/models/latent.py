"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1; DeepSeek-V3, arXiv:2412.19437).

B samples, T tokens, N = B*T rows, H heads, E width of a head's query and key: dims without position, then dims with.
Head counts come from the shapes met at run time.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from plait.models.attention import Attend, Rope, rotate
from plait.models.batch import Batch
from plait.models.config import ModelConfig
from plait.models.layers import Linear, RMSNorm

_EPS = 1e-6
"""Of the latents' norms, in DeepSeek's own code, whatever that of the model's."""


def _pairs_to_halves(x_BHTE: Tensor) -> Tensor:
    """Dims (0, 1, 2, 3, ..) -> (0, 2, .., 1, 3, ..): neighbouring pairs as `rotate` wants them."""
    return x_BHTE.view(*x_BHTE.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)


class LatentAttention(nn.Module):
    """h [N, D] -> [N, D].

    The part of the key with positions, which all heads share, passes through ``share``: a cut of the heads replaces it,
    since each rank's gradient of it is that of its own heads.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        mla, hidden, heads = config.mla, config.hidden_size, config.num_heads
        assert mla is not None
        self.mla = mla
        self.score_factor = 1.0 if config.rope_scaling is None else config.rope_scaling.score_factor
        self.q = Linear(hidden, heads * mla.qk_dim, bias=False) if mla.q_rank is None else None
        self.q_a = None if mla.q_rank is None else Linear(hidden, mla.q_rank, bias=False)
        self.q_a_norm = None if mla.q_rank is None else RMSNorm(mla.q_rank, _EPS)
        self.q_b = None if mla.q_rank is None else Linear(mla.q_rank, heads * mla.qk_dim, bias=False)
        self.kv_a = Linear(hidden, mla.kv_rank + mla.rope_dim, bias=False)
        self.kv_a_norm = RMSNorm(mla.kv_rank, _EPS)
        self.kv_b = Linear(mla.kv_rank, heads * (mla.nope_dim + mla.v_dim), bias=False)
        self.share = nn.Identity()
        self.attend = Attend(config.window_of(layer))
        self.out = Linear(heads * mla.v_dim, hidden, bias=False)

    def forward(self, h_ND: Tensor, rope: Rope | None, batch: Batch) -> Tensor:
        assert rope is not None
        mla, (samples, seq) = self.mla, batch.tokens_BT.shape
        latent_NC, turned_NE = torch.split(self.kv_a(h_ND), [mla.kv_rank, mla.rope_dim], dim=-1)
        turned_NE = self.share(turned_NE)
        kv_BHTE = self.kv_b(self.kv_a_norm(latent_NC)).view(samples, seq, -1, mla.nope_dim + mla.v_dim).transpose(1, 2)
        k_BHTE, v_BHTE = torch.split(kv_BHTE, [mla.nope_dim, mla.v_dim], dim=-1)
        q_BHTE = self._queries(h_ND).view(samples, seq, -1, mla.qk_dim).transpose(1, 2)
        fixed_BHTE, q_turned_BHTE = torch.split(q_BHTE, [mla.nope_dim, mla.rope_dim], dim=-1)
        k_turned_BHTE = self._rotate(turned_NE.view(samples, 1, seq, mla.rope_dim), rope)
        k_turned_BHTE = k_turned_BHTE.expand(-1, k_BHTE.shape[1], -1, -1)
        q_BHTE = torch.cat((fixed_BHTE, self._rotate(q_turned_BHTE, rope)), dim=-1)
        if self.score_factor != 1:
            # On the queries, so that whatever stands for `attend` need not know of it.
            q_BHTE = q_BHTE * self.score_factor
        k_BHTE = torch.cat((k_BHTE, k_turned_BHTE), dim=-1)
        out_BHTE = self.attend(q_BHTE, k_BHTE, v_BHTE, batch)
        out_ND: Tensor = self.out(out_BHTE.transpose(1, 2).reshape(samples * seq, -1))
        return out_ND

    def _queries(self, h_ND: Tensor) -> Tensor:
        if self.q_a is None or self.q_a_norm is None or self.q_b is None:
            assert self.q is not None
            plain: Tensor = self.q(h_ND)
            return plain
        q: Tensor = self.q_b(self.q_a_norm(self.q_a(h_ND)))
        return q

    def _rotate(self, x_BHTE: Tensor, rope: Rope) -> Tensor:
        return rotate(_pairs_to_halves(x_BHTE) if self.mla.interleaved else x_BHTE, rope)
