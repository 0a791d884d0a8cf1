"""Small models, and clusters whose nodes have any size, that tests of the search share."""

from __future__ import annotations

import dataclasses

from plait.core.topology import Topology
from plait.models.config import ModelConfig, MoEConfig
from plait.planner.clusters import cluster
from plait.planner.space import Request

DENSE = ModelConfig(
    vocab_size=32000,
    hidden_size=4096,
    num_layers=4,
    num_heads=32,
    num_kv_heads=8,
    ffn_size=11008,
    max_positions=8192,
)
NARROW = dataclasses.replace(DENSE, vocab_size=2048, hidden_size=1024, num_heads=8, ffn_size=2048)
EXPERTS = ModelConfig(
    family="mixtral",
    vocab_size=32000,
    hidden_size=4096,
    num_layers=4,
    num_heads=32,
    num_kv_heads=8,
    ffn_size=4096,
    max_positions=8192,
    moe=MoEConfig(num_experts=8, top_k=2, ffn_size=4096),
)


def request(model: ModelConfig, gpus: int, **keys: object) -> Request:
    given = {"topology": cluster("a100-40g", gpus), "seq": 4096, "global_batch": 4, "max_memory": 0.9, **keys}
    return Request(model=model, world_size=gpus, **given)  # type: ignore[arg-type]


def nodes_of(size: int, gpus: int, network: float = 1.0) -> Topology:
    """``gpus`` on nodes of ``size``, ``network`` times as fast as usual between them."""
    usual = cluster("a100-40g", gpus)
    inner, outer = usual.tiers[0], usual.tiers[-1]
    tiers = (dataclasses.replace(inner, size=size), dataclasses.replace(outer, bandwidth=outer.bandwidth * network))
    return dataclasses.replace(usual, tiers=tiers)
