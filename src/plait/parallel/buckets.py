"""Makes a bucket: the buffers of its weights, gradients and masters, whole or cut as the ZeRO level says."""

from __future__ import annotations

import torch
from torch import nn

from plait.parallel.flat import Bucket, Held
from plait.parallel.fold import Fold
from plait.parallel.grouping import bucket_length, decays


def make_bucket(
    key: int,
    held: list[Held],
    fold: Fold,
    *,
    level: int,
    dtype: torch.dtype,
    versions: int,
    device: torch.device,
) -> Bucket:
    """The bucket of ``held``, all trained or all frozen, its parameters put into their modules."""
    trained = held[0].trained
    offsets = [sum(one.numel for one in held[:index]) for index in range(len(held))]
    length = bucket_length(sum(one.numel for one in held), fold.shards)
    size = length // fold.shards
    shard = slice(fold.index * size, (fold.index + 1) * size)
    dtype = held[0].dtype or dtype
    # Frozen vectors stay whole: they are tiny, and a router's bias is moved between steps where it lies.
    gathered = level == 3 and fold.shards > 1 and (trained or decays(held[0]))
    weights = (torch.empty if gathered else torch.zeros)(length, dtype=dtype, device=device)
    own = torch.zeros(size, dtype=dtype, device=device) if gathered else weights[shard]
    apart = trained and (dtype != torch.float32 or versions > 1)
    kept = size if level >= 2 else length
    bucket = Bucket(
        key=key,
        held=held,
        offsets=offsets,
        length=length,
        shard=shard,
        fold=fold,
        stage=held[0].stage,
        gathered=gathered,
        weights=weights,
        spare=torch.zeros_like(weights) if trained and versions > 1 else None,
        own=own,
        master=torch.zeros(size, device=device) if apart else own,
        grads=torch.zeros(kept if trained else 0, device=device),
    )
    for index, one in enumerate(held):
        # `data` has a version counter of its own: autograd is not to see that weights come and go in the buffer.
        parameter = nn.Parameter(bucket.view(weights, index).data, requires_grad=trained)
        bucket.views.append(parameter)
        for module, attribute in one.owners:
            setattr(module, attribute, parameter)
        one.counted = one.counted and fold.first
    if gathered:
        weights.untyped_storage().resize_(0)
    return bucket
