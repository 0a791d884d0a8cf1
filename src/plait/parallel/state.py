"""The whole state of a run on one rank, as stretches of named tensors: what is saved, and what is set again.

``weights/NAME``           fp32 masters; of frozen parameters what is held of them (the run's dtype, fp32 in routers)
``exp_avg/``, ``exp_avg_sq/NAME``   Adam's moments, fp32; none before the first update
``previous/NAME``          the weights of the update before, where two versions are kept (2bw)
``router/layers.N.share``  fp32 [experts]: each expert's share of the step before, for the balancing loss

Weights that layers compute in are no state: they are the masters, rounded. So any precision, ZeRO level and mesh
reads what any other has written. `stretches` gives views into the live state: the same list is read to save and written
to restore; `settle` then lets everything follow that is made from it.

What gradient compression keeps back is of one rank under one plan (`own_state`). Another plan starts without it: what
was kept back, a part of the last gradients, is then lost. ``previous/`` is of use to a plan of two versions alone; one
that comes from a plan of a single version starts with two equal ones, as a new run does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.core.shard import Piece, full
from plait.parallel.apply import Parallel
from plait.parallel.flat import Bucket, Held

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's tensors for each parameter, by torch's names."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Neighbouring elements of this rank's part of one tensor of the state."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    local: tuple[int, ...]
    """Of this rank's part, whose blocks are ``pieces``."""
    pieces: tuple[Piece, ...]
    start: int
    """Where in the flat part the stretch begins."""
    values: Tensor
    """[n] a view of the live state."""
    replicas: tuple[int, ...]
    """The ranks that hold the same stretch of the same part, this one among them."""
    counted: bool
    """False: another stage's copy of a tied weight is the one to save."""


def stretches(parallel: Parallel, optimizer: torch.optim.Optimizer | None) -> list[Stretch]:
    """All that this rank holds, in one order: every element of every tensor is on some rank, copies on several."""
    rows: list[Stretch] = []
    for bucket, flat in parallel.zero.shards():
        kinds = {"weights": bucket.own if flat is None else bucket.master}
        if bucket.spare is not None:
            kinds["previous"] = bucket.spare[bucket.shard]
        if flat is not None and optimizer is not None:
            kept = optimizer.state.get(flat, {})
            kinds |= {moment: kept[moment] for moment in MOMENTS if moment in kept}
        for kind, shard in kinds.items():
            rows += [_stretch(kind, bucket, *row) for row in bucket.stretches(shard.detach())]
    world = parallel.world
    holders = world.mesh.group(world.rank, ("dp", "cp", "tp"))
    for layer, router in parallel.routers.items():
        shape = tuple(router.share_E.shape)
        rows.append(
            Stretch(
                name=f"router/layers.{layer}.share",
                shape=shape,
                local=shape,
                pieces=(Piece(box=full(shape), local=full(shape), copies=()),),
                start=0,
                values=router.share_E,
                replicas=holders,
                counted=True,
            )
        )
    return rows


def _stretch(kind: str, bucket: Bucket, one: Held, start: int, values: Tensor) -> Stretch:
    return Stretch(
        name=f"{kind}/{one.name}",
        shape=one.spec.shape,
        local=one.shape,
        pieces=one.pieces,
        start=start,
        values=values,
        replicas=bucket.fold.replicas,
        counted=not one.tied or one.stage == 0,
    )


def begin_moments(parallel: Parallel, optimizer: torch.optim.Optimizer | None, updates: int) -> None:
    """Give ``optimizer`` the moments of a run of ``updates`` steps, for `stretches` to give and a reader to fill."""
    if optimizer is None:
        return
    optimizer.state.clear()
    for _, flat in parallel.zero.shards():
        if flat is not None and updates:
            # As torch's fused AdamW makes them at its first step.
            steps = torch.tensor(float(updates), dtype=torch.float32, device=flat.device)
            moments = {moment: torch.zeros_like(flat, requires_grad=False) for moment in MOMENTS}
            optimizer.state[flat] = {"step": steps, **moments}


def settle(parallel: Parallel, *, step: int, previous: bool) -> None:
    """The stretches were set: weights and copies follow. Collective over the data ranks.

    ``step``: steps done, of which the next is under way then. ``previous``: whether the weights of the update before
    were among them; without, they are the same as the newest.
    """
    for bucket, _ in parallel.zero.shards():
        if bucket.spare is not None and not previous:
            bucket.spare[bucket.shard].copy_(bucket.master)
    parallel.zero.refresh(step)
    parallel.executor.restart(step)
    for router in parallel.routers.values():
        router.stats.zero_()


def own_state(parallel: Parallel) -> dict[str, Tensor]:
    """What compression keeps back on this rank, by name; other ranks have other names and shapes."""
    return {
        f"{index}/{name}": value
        for index, reducer in enumerate(parallel.zero.reducers())
        for name, value in reducer.carried().items()
    }


def set_own_state(parallel: Parallel, state: Mapping[str, Tensor]) -> None:
    """Go on from what `own_state` gave on this rank of the same plan; {}: nothing is kept back."""
    for index, reducer in enumerate(parallel.zero.reducers()):
        prefix = f"{index}/"
        found = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        reducer.carry(found)
