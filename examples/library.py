"""plait as a library: cut a decoder by a plan, and train it on four local processes.

python examples/library.py
"""

from __future__ import annotations

import torch

import plait

PLAN = "tp=2 pp=2 micro=2"
GLOBAL_BATCH, SEQ = 8, 32


def batches(plan: plait.Plan, step: int, vocab_size: int) -> list[plait.Batch]:
    """The microbatches of one step: here, counting upwards from a random start. Every rank makes the same."""
    starts_B1 = torch.randint(vocab_size, (GLOBAL_BATCH, 1), generator=torch.Generator().manual_seed(step))
    tokens = (starts_B1 + torch.arange(SEQ + 1)) % vocab_size
    samples = torch.arange(GLOBAL_BATCH) + step * GLOBAL_BATCH
    return [
        plait.Batch(tokens_BT=rows[:, :-1], targets_BT=rows[:, 1:], sample_B=numbers, step=step)
        for rows, numbers in zip(tokens.split(plan.micro), samples.split(plan.micro), strict=True)
    ]


def train(worker: plait.Worker, steps: int) -> None:
    """What every rank runs."""
    plan = plait.Plan.parse(PLAN)
    world = worker.connect(plan.mesh(worker.place.world_size))
    config = plait.PRESETS["tiny"]
    with torch.device("meta"):  # no rank ever holds the whole model
        model = plait.Decoder(config)
    parallel = plait.parallelize(model, plan, world, weights=plait.InitSource(config, seed=0))

    decay, rest = parallel.zero.optimizer_groups()
    optimizer = torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=3e-3)
    for step in range(steps):
        loss = parallel.forward_backward(batches(plan, step, config.vocab_size), count=GLOBAL_BATCH * SEQ)
        optimizer.step()
        parallel.zero.publish()
        if world.rank == 0:
            print(f"step {step}  loss {loss:.3f}", flush=True)
    world.close()


if __name__ == "__main__":
    plait.launch(train, processes=4, args=[10])
