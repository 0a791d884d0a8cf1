"""The matrix products of a linear layer in fp32 on a CPU: MKL (``torch.mm``) beside oneDNN, alternating.

    python benchmarks/products.py [--repeats 15]

GFLOP/s of the medians on one thread, and the median of the pairwise ratios (MKL seconds / oneDNN seconds).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from plait.parallel import product

SHAPES = ((2048, 512, 2816), (256, 512, 2816), (512, 1408, 512), (512, 512, 1024), (256, 512, 8192))
"""(rows, inputs, outputs)."""


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    onednn = torch.ops.mkldnn._linear_pointwise
    print(f"{'product':16} {'N x I x O':>18} {'ratio':>6} {'MKL':>6} {'oneDNN':>7}")
    for rows, inputs, outputs in SHAPES:
        x, w, grad = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(rows, outputs)
        total = torch.zeros(outputs, inputs)
        pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "forward": (lambda x=x, w=w: x @ w.t(), lambda x=x, w=w: product.forward(x, w)),
            "input gradient": (
                lambda grad=grad, w=w: grad @ w,
                lambda grad=grad, w=w: product.input_gradient(grad, w),
            ),
            "weight gradient": (
                lambda total=total, grad=grad, x=x: total.addmm_(grad.t(), x),
                lambda total=total, grad=grad, x=x: total.add_(onednn(grad.t(), x.t(), None, "none", [], "")),
            ),
        }
        for name, (mkl, dnn) in pairs.items():
            seconds = [(_seconds(mkl), _seconds(dnn)) for _ in range(options.repeats + 2)][2:]
            ratio = statistics.median(a / b for a, b in seconds)
            rates = [
                2 * rows * inputs * outputs / statistics.median(column) / 1e9 for column in zip(*seconds, strict=True)
            ]
            shape = f"{rows} x {inputs} x {outputs}"
            print(f"{name:16} {shape:>18} {ratio:6.3f} {rates[0]:6.0f} {rates[1]:7.0f}")


if __name__ == "__main__":
    main()
