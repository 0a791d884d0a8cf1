"""Small routers, rows and batches for the tests of routing."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from plait.models.batch import Batch
from plait.models.moe import Router
from plait.models.parts import MoEConfig

SAMPLES, SEQ, HIDDEN = 3, 8, 16
ROWS = SAMPLES * SEQ
BASE = MoEConfig(num_experts=8, top_k=2, ffn_size=4)
ROUTINGS = {
    "mixtral": BASE,
    "top-1": dataclasses.replace(BASE, top_k=1),
    "plain weights": dataclasses.replace(BASE, normalise=False, top_k=3),
    "sigmoid": dataclasses.replace(BASE, score="sigmoid", scale=2.5),
    "sigmoid, bias": dataclasses.replace(BASE, score="sigmoid", bias=True, normalise=False),
    "softmax, bias": dataclasses.replace(BASE, bias=True),
    "groups": dataclasses.replace(BASE, score="sigmoid", groups=4, top_groups=2, top_k=3, bias=True, scale=2.5),
    "groups, softmax": dataclasses.replace(BASE, groups=2, top_groups=1, top_k=4),
}


def make_router(config: MoEConfig, seed: int = 0) -> Router:
    generator = torch.Generator().manual_seed(seed)
    router = Router(HIDDEN, config)
    with torch.no_grad():
        router.weight.normal_(generator=generator)
        if router.bias is not None:
            router.bias.normal_(0, 0.3, generator=generator)
    return router


def make_rows(seed: int = 1) -> Tensor:
    return torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(seed))


def make_batch(**fields: object) -> Batch:
    tokens = torch.zeros(SAMPLES, SEQ, dtype=torch.int64)
    batch = Batch(tokens_BT=tokens, targets_BT=tokens, sample_B=torch.arange(SAMPLES), step=0)
    return dataclasses.replace(batch, **fields)


def padded(lengths: tuple[int, ...] = (8, 5, 3)) -> Batch:
    return make_batch(real_BT=torch.arange(SEQ) < torch.tensor(lengths)[:, None])
