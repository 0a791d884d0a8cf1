"""Parameters of a model by layer, as the time model counts them."""

from __future__ import annotations

import math
from functools import lru_cache

from plait.models.config import ModelConfig
from plait.models.shapes import parameter_shapes


@lru_cache(maxsize=1 << 8)
def weights_of(model: ModelConfig) -> tuple[tuple[tuple[float, float], ...], float, float]:
    """(dense, expert) parameters of the layers before each, so that differences are sums; embedding; head with norm."""
    layers = [[0.0, 0.0] for _ in range(model.num_layers)]
    embed = head = 0.0
    for name, shape in parameter_shapes(model).items():
        part = name.split(".")
        count = float(math.prod(shape))
        if part[0] == "layers":
            layers[int(part[1])][1 if len(shape) == 3 else 0] += count
        elif part[0] == "embed":
            embed += count
        else:
            head += count
    before = [(0.0, 0.0)]
    for dense, experts in layers:
        before.append((before[-1][0] + dense, before[-1][1] + experts))
    return tuple(before), embed, head


@lru_cache(maxsize=1 << 8)
def tensors_of(model: ModelConfig) -> tuple[float, float]:
    """Parameters of a mean layer: all of them, and those that are matrices."""
    shapes = [shape for name, shape in parameter_shapes(model).items() if name.startswith("layers.")]
    return len(shapes) / model.num_layers, sum(len(shape) > 1 for shape in shapes) / model.num_layers
