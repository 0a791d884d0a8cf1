"""Where one process' training step goes: share of the step by operator, from torch's profiler.

python benchmarks/step_profile.py [--plan micro=8] [--top 12]
"""

from __future__ import annotations

import argparse

import torch
from torch.profiler import ProfilerActivity, profile

from bench_model import BenchConfig, draw_batch, draw_weights
from plait.comm.world import World
from plait_engine import Plait


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--plan", default="micro=8")
    parser.add_argument("--top", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = BenchConfig()
    engine = Plait(config, options.plan, World.alone())
    engine.setup(0, 1, draw_weights(config))
    for step in range(2):
        engine.step(*draw_batch(config, step))
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        engine.step(*draw_batch(config, 2))
    rows = sorted(trace.key_averages(), key=lambda row: -row.self_cpu_time_total)
    total = sum(row.self_cpu_time_total for row in rows)
    print(f"{'operator':50} {'calls':>6} {'share':>6}")
    for row in rows[: options.top]:
        print(f"{row.key[:50]:50} {row.count:6d} {row.self_cpu_time_total / total:6.1%}")


if __name__ == "__main__":
    main()
