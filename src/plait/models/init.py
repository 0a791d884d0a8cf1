"""Weights: where they come from (`WeightSource`), how initial ones are drawn, and how one process fills a model."""

from __future__ import annotations

import hashlib
import math
from typing import Protocol

import torch
from torch import Tensor, nn

from plait.models.config import ModelConfig, canonical_name, parameter_shapes
from plait.models.decoder import Decoder

Box = tuple[tuple[int, int], ...]
"""(start, stop) for each dim: the part of a tensor."""

_BLOCK = 1 << 20
"""Elements drawn from one generator state, at least one row: the bound on memory beyond the box itself."""


_RESIDUAL = ("attn.out.weight", "mlp.down.weight", "mlp.shared.down.weight", "mlp.experts.down")
"""Projections into the residual stream."""


class WeightSource(Protocol):
    """Anything that weights can be read from by name: initial values, a Hugging Face folder, a checkpoint."""

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """The values of parameter ``name`` inside ``box`` (None: all), in the dtype they are stored in."""
        ...


def full_box(shape: tuple[int, ...]) -> Box:
    """The box of a whole tensor."""
    return tuple((0, size) for size in shape)


def check_box(name: str, shape: tuple[int, ...], box: Box | None) -> Box:
    """``box``, or the whole tensor for None; ``ValueError`` when it does not lie in ``shape``."""
    if box is None:
        return full_box(shape)
    inside = len(box) == len(shape) and all(
        0 <= start <= stop <= size for (start, stop), size in zip(box, shape, strict=True)
    )
    if not inside:
        raise ValueError(f"box {box} does not lie in {name}, whose shape is {shape}")
    return box


def draw(name: str, shape: tuple[int, ...], box: Box | None, *, seed: int, config: ModelConfig) -> Tensor:
    """Initial values (fp32) of parameter ``name`` of full ``shape`` inside ``box``.

    A function of (seed, name) alone: a box is bit for bit the slice of the whole. Matrices are normal(0, init_std),
    projections into the residual stream by 1/sqrt(2 layers) less (GPT-2), norms 1, biases 0; each expert of a stack is
    a matrix of its own. Rows are drawn in blocks, each from its own generator state, so a box costs no more memory than
    itself and one block.
    """
    box = check_box(name, shape, box)
    size = tuple(stop - start for start, stop in box)
    if len(shape) == 1:
        return torch.zeros(size) if name.endswith(".bias") else torch.ones(size)
    std = config.init_std
    if name.endswith(_RESIDUAL):
        std /= math.sqrt(2 * config.num_layers)
    if len(shape) == 2:
        return _draw_matrix(f"{seed}/{name}", shape, box, std)
    out = torch.empty(size)
    for at, expert in enumerate(range(*box[0])):
        out[at] = _draw_matrix(f"{seed}/{name}/expert {expert}", shape[1:], box[1:], std)
    return out


def _draw_matrix(key: str, shape: tuple[int, ...], box: Box, std: float) -> Tensor:
    (first, last), (left, right) = box
    rows, columns = shape
    step = max(1, _BLOCK // columns)
    out = torch.empty(last - first, right - left)
    for start in range(first // step * step, last, step):
        stop = min(start + step, rows)
        digest = hashlib.blake2b(f"{key}/{start}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        block = torch.empty(stop - start, columns).normal_(0.0, std, generator=generator)
        low, high = max(start, first), min(stop, last)
        out[low - first : high - first] = block[low - start : high - start, left:right]
    return out


class InitSource:
    """Initial weights as a `WeightSource`."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self.config = config
        self.seed = seed
        self._shapes = parameter_shapes(config)

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """fp32 values of ``name`` inside ``box``; ``ValueError`` for a name that the model does not have."""
        if name not in self._shapes:
            raise ValueError(f"the model has no parameter {name}")
        return draw(name, self._shapes[name], box, seed=self.seed, config=self.config)


@torch.no_grad()
def initialise(model: Decoder, source: WeightSource) -> None:
    """Fills every parameter of an uncut ``model`` from ``source``; those on meta come to the CPU.

    A parameter that several modules share is read once and stays shared. ``ValueError`` when a shape differs.
    """
    filled: dict[nn.Parameter, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            if parameter not in filled:
                name = canonical_name(f"{prefix}.{key}", model.config)
                value = source.read(name)
                if value.shape != parameter.shape:
                    raise ValueError(f"{name} is {tuple(value.shape)} in the source, {tuple(parameter.shape)} here")
                if parameter.is_meta:
                    filled[parameter] = nn.Parameter(value.to(parameter.dtype), parameter.requires_grad)
                else:
                    parameter.copy_(value)
                    filled[parameter] = parameter
            setattr(module, key, filled[parameter])
