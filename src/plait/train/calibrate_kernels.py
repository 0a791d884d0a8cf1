"""Seconds of what one rank computes: products, attention, memory-bound operators, the optimizer, a launch.

On a CPU every rank measures at the same time, between barriers, so that each gets what it will get in a run: its cores,
its share of cache and memory. On a GPU the seconds are those between two events on the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles
from time import perf_counter, process_time

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.core.topology import AttentionPoint, GemmPoint

WARM = 2
"""Runs that do not count: they allocate, choose kernels, fill caches."""
_GPU_LAYERS = ((1024, 4096), (4096, 4096), (8192, 8192), (28672, 8192), (8192, 28672))
_CPU_LAYERS = ((256, 512), (512, 512), (1408, 512), (512, 1408), (4096, 512), (512, 4096))
GPU_SHAPES = tuple((m, n, k) for m in (512, 2048, 8192) for n, k in _GPU_LAYERS)
CPU_SHAPES = tuple((m, n, k) for m in (128, 512, 2048) for n, k in _CPU_LAYERS)
"""(tokens, outputs, inputs) of a linear layer, as cut and uncut models have them."""
GPU_ATTENTION = ((1, 32, 8, 2048, 128), (1, 32, 8, 8192, 128), (4, 8, 2, 4096, 128))
CPU_ATTENTION = ((1, 8, 4, 256, 64), (2, 8, 4, 512, 64), (4, 4, 2, 512, 64), (1, 8, 8, 1024, 64))
"""(batch, heads, kv heads, tokens, head dim)."""
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Bench:
    """How a rank measures. ``barrier`` brings the ranks to the same point."""

    device: torch.device
    barrier: Callable[[], None]
    budget: float
    """Seconds of one measurement."""
    crowded: bool = False
    """Whether ranks take turns on cores: a rank's own time is only a part of what its work takes then."""

    def seconds(self, work: Callable[[], object]) -> float:
        """Of one call of ``work``, in the steady state, while every rank does the same.

        The lower quartile: what else the machine does now is not what is asked, nor is one lucky call.
        """
        for _ in range(WARM):
            work()
        self.barrier()
        if self.device.type == "cuda":
            return self._on_stream(work)
        # One thread's own time leaves out what other programs take of its core.
        clock = process_time if torch.get_num_threads() == 1 and not self.crowded else perf_counter
        times: list[float] = []
        begin = last = clock()
        while last - begin < self.budget or len(times) < 4:
            work()
            now = clock()
            times.append(now - last)
            last = now
        return quantiles(times, n=4, method="inclusive")[0]

    def _on_stream(self, work: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        begin = perf_counter()
        work()
        torch.cuda.synchronize()
        calls = max(3, min(200, int(self.budget / max(perf_counter() - begin, 1e-6))))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(calls):
            work()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / calls


def precisions(device: torch.device) -> tuple[str, ...]:
    """Those whose products are measured on ``device``."""
    return ("bf16", "fp16", "fp32") if device.type == "cuda" else ("fp32", "bf16")


def products(bench: Bench, shapes: Sequence[tuple[int, int, int]]) -> list[GemmPoint]:
    """Linear layers forward, and for one shape of each size what backward makes of it (gradient of the weights)."""
    found = []
    for precision in precisions(bench.device):
        dtype = _DTYPES[precision]
        for m, n, k in shapes:
            x_MK = torch.randn(m, k, device=bench.device).to(dtype)
            w_NK = torch.randn(n, k, device=bench.device).to(dtype)
            took = bench.seconds(partial(F.linear, x_MK, w_NK))
            found.append(GemmPoint(m=m, n=n, k=k, precision=precision, seconds=took))
        tokens = sorted({m for m, _, _ in shapes})[len({m for m, _, _ in shapes}) // 2]
        for m, n, k in shapes:
            if m != tokens:
                continue
            g_MN = torch.randn(m, n, device=bench.device).to(dtype)
            x_MK = torch.randn(m, k, device=bench.device).to(dtype)
            took = bench.seconds(partial(torch.matmul, g_MN.t(), x_MK))
            found.append(GemmPoint(m=n, n=k, k=m, precision=precision, seconds=took))
    return found


def attention(bench: Bench, shapes: Sequence[tuple[int, int, int, int, int]]) -> list[AttentionPoint]:
    """torch's own causal attention, as the models call it."""
    found = []
    for precision in precisions(bench.device)[:2]:
        dtype = _DTYPES[precision]
        for batch, heads, kv_heads, seq, dim in shapes:
            q = torch.randn(batch, heads, seq, dim, device=bench.device, dtype=dtype, requires_grad=True)
            kv = (batch, kv_heads, seq, dim)
            k = torch.randn(kv, device=bench.device, dtype=dtype, requires_grad=True)
            v = torch.randn(kv, device=bench.device, dtype=dtype, requires_grad=True)

            def forward(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

            out = forward()
            grad = torch.ones_like(out)

            def backward(out: Tensor = out, inputs: tuple[Tensor, ...] = (q, k, v), grad: Tensor = grad) -> object:
                return torch.autograd.grad(out, inputs, grad, retain_graph=True)

            found.append(
                AttentionPoint(
                    batch=batch,
                    heads=heads,
                    kv_heads=kv_heads,
                    seq=seq,
                    head_dim=dim,
                    precision=precision,
                    forward=bench.seconds(forward),
                    backward=bench.seconds(backward),
                )
            )
    return found


def memory_bandwidth(bench: Bench) -> float:
    """Bytes/s of memory-bound operators: the median of a sum, a product with SiLU, and a norm over activations."""
    rows, width = (16384, 8192) if bench.device.type == "cuda" else (1024, 1408)
    a, b = torch.randn(2, rows, width, device=bench.device)
    weight = torch.ones(width, device=bench.device)
    size = a.nbytes
    rates: list[float] = [
        3 * size / bench.seconds(lambda: a + b),
        2 * size / bench.seconds(lambda: F.silu(a)),
        2 * size / bench.seconds(lambda: F.rms_norm(a, (width,), weight)),
    ]
    return median(rates)


def optimizer_bandwidth(bench: Bench) -> float:
    """Bytes/s of fused AdamW in fp32: it reads weight, gradient and two moments, and writes all but the gradient."""
    count = 1 << (28 if bench.device.type == "cuda" else 22)
    weight = torch.nn.Parameter(torch.zeros(count, device=bench.device))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], lr=1e-3, fused=True)
    return 7 * 4 * count / bench.seconds(optimizer.step)


def launch_overhead(bench: Bench) -> float:
    """Seconds of the host for one operator: a chain of small linear layers and sums, forward and backward."""
    length = 32
    x = torch.randn(1, 8, device=bench.device, requires_grad=True)
    weight = torch.eye(8, device=bench.device, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(length):
            y = F.linear(y, weight) + x
        torch.autograd.grad(y.sum(), (x, weight))

    for _ in range(WARM):
        chain()
    times = []
    bench.barrier()
    for _ in range(10):
        if bench.device.type == "cuda":
            torch.cuda.synchronize()
        begin = perf_counter()
        chain()
        times.append(perf_counter() - begin)
    # Forward: a product and a sum; backward: two products and the sums of both gradients.
    return median(times) / (6 * length)
