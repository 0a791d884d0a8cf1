"""Random plans: closed forms of peak memory, FLOPs, bytes by axis and state beside dry runs of plait's own executor.

    python benchmarks/memory_dry.py --plans 100 --seed 1

Nothing has values, so sizes cost nothing: rows of 1 to 4 thousand tokens, models 1 to 4 thousand wide. Every pipeline
rank of a plan is dry-run. Counts must be equal; the peak is to lie within 2%.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from plait.core.errors import PlanError
from plait.core.legal import check
from plait.core.plan import Plan
from plait.core.topology import Device, Tier, Topology
from plait.models.config import PRESETS, MLAConfig, ModelConfig, MoEConfig
from plait.parallel.layout import model_shape
from plait.planner.counts import counts
from plait.planner.job import Job
from plait.planner.memory import rank_memory
from plait.train.dry_run import DryRun, dry_run

CPU = Topology(
    name="here",
    device=Device(name="core", memory=2**40, peaks={"fp32": 1e11}, bandwidth=1e10, kind="cpu"),
    devices=64,
    tiers=(Tier(name="host", size=64, bandwidth=1e9, latency=1e-5),),
)
LLAMA = ModelConfig(
    vocab_size=32000,
    hidden_size=2048,
    num_layers=4,
    num_heads=16,
    num_kv_heads=8,
    ffn_size=5632,
    max_positions=8192,
)
MOE = MoEConfig(num_experts=8, top_k=2, ffn_size=2048, aux_loss=0.02)
LATENT = MLAConfig(q_rank=768, kv_rank=256, nope_dim=128, rope_dim=64, v_dim=128)


def models() -> dict[str, ModelConfig]:
    """One of each kind."""
    gpt2 = dataclasses.replace(
        PRESETS["gpt2"],
        hidden_size=1536,
        num_layers=4,
        num_heads=16,
        num_kv_heads=16,
        head_dim=96,
        ffn_size=6144,
        max_positions=8192,
        dropout=0.0,
    )
    latent = dataclasses.replace(LLAMA, mla=LATENT, num_kv_heads=16, head_dim=192)
    experts = dataclasses.replace(LLAMA, moe=MOE)
    shared = dataclasses.replace(
        MOE, shared_ffn=2048, dense_layers=(0,), score="sigmoid", groups=2, top_groups=1, bias=True
    )
    return {
        "llama": LLAMA,
        "deep": dataclasses.replace(LLAMA, num_layers=8, hidden_size=1024, num_heads=8, ffn_size=2816),
        "large": dataclasses.replace(LLAMA, hidden_size=4096, num_heads=32, ffn_size=14336, vocab_size=128256),
        "tied": dataclasses.replace(LLAMA, tied=True),
        "gpt2": gpt2,
        "gpt2-dropout": dataclasses.replace(gpt2, dropout=0.1),
        "qwen3": dataclasses.replace(LLAMA, qk_norm=True, qkv_bias=True, num_kv_heads=4),
        "window": dataclasses.replace(LLAMA, sliding_window=700, window_from=1),
        "window-tied": dataclasses.replace(LLAMA, sliding_window=700, window_from=1, tied=True),
        "latent": latent,
        "latent-plain": dataclasses.replace(latent, mla=dataclasses.replace(LATENT, q_rank=None)),
        "experts": experts,
        "dropping": dataclasses.replace(experts, moe=dataclasses.replace(MOE, capacity_factor=1.0, aux_loss=0.0)),
        "deepseek": dataclasses.replace(latent, moe=shared),
    }


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan of a model on ``world`` ranks."""

    name: str
    plan: Plan
    world: int
    batch: int
    seq: int

    def __str__(self) -> str:
        return f"{self.name} | {self.plan} | world={self.world} batch={self.batch} seq={self.seq}"


def draw(chance: random.Random, names: list[str]) -> Case:
    """A plan that works. Half of its keys are as they are by default, so that each shows."""
    every = models()

    def some(usual: object, *others: object) -> object:
        return chance.choice(others) if chance.random() < 0.5 else usual

    while True:
        name = chance.choice(names)
        model, schedule = every[name], str(some("1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"))
        pp, dp, zero = chance.choice([1, 1, 2, 4]), chance.choice([1, 2, 4]), chance.choice([0, 1, 2, 3])
        values = {
            "tp": chance.choice([1, 1, 2, 4]),
            "pp": pp,
            "cp": some(1, 2),
            "context": some("ring", "gather", "ulysses"),
            "micro": some(1, 2),
            "schedule": schedule if pp > 1 else "1f1b",
            "virtual": 2 if pp > 1 and schedule in ("interleaved", "zb-v", "dualpipe-v") else 1,
            "zero": zero,
            "zero_group": some(None, 2) if zero else None,
            "gather": some("use", "step") if zero == 3 else "use",
            "node": some(None, 2) if chance.random() < 0.3 else None,
            "compress": some("none", "half", "topk:0.1", "powersgd:4") if chance.random() < 0.3 else "none",
            "recompute": some("none", "full", "selective", "full:0-1 selective:2"),
            "precision": some("bf16", "fp32", "fp16", "fp8"),
            "sequence_parallel": some(None, False),
            "bucket_mb": some(25.0, 4.0, 100.0),
            "ep": some(1, 2, 4) if model.moe is not None else 1,
        }
        plan = Plan.from_mapping({key: value for key, value in values.items() if value is not None})
        world = plan.tp * plan.pp * plan.cp * dp
        batch = dp * plan.micro * chance.choice([1, 2, pp, 2 * pp, 2 * pp + 1])
        case = Case(name=name, plan=plan, world=world, batch=batch, seq=chance.choice([1024, 2048]))
        if world > 16:
            continue
        try:
            check(plan, model_shape(model), world_size=world, global_batch=batch, seq=case.seq)
        except PlanError:
            continue
        return case


def differences(dry: DryRun, job: Job) -> list[str]:
    """What of FLOPs, bytes by axis and operation, parameters and state is not the same."""
    said = counts(job, dry.rank)
    found = [
        f"{name}: dry run {getattr(dry, name)}, closed form {getattr(said, name)}"
        for name in ("flops", "parameters", "weights", "gradients", "optimizer")
        if getattr(dry, name) != getattr(said, name)
    ]
    sent: dict[tuple[str, str], int] = {}
    for row in dry.traffic:
        sent[row.axis, row.operation] = sent.get((row.axis, row.operation), 0) + row.bytes
    keys = sorted({*sent, *said.bytes})
    found += [
        f"axis {key[0]}, {key[1]}: dry run {sent.get(key, 0)}, closed form {said.bytes.get(key, 0)} bytes"
        for key in keys
        if sent.get(key, 0) != said.bytes.get(key, 0)
    ]
    return found


@dataclass(frozen=True, kw_only=True)
class Row:
    """One pipeline rank of a case."""

    case: Case
    pp: int
    ran: int
    said: float
    resting: int
    during: str
    guess: str
    wrong: tuple[str, ...]

    @property
    def error(self) -> float:
        return self.said / self.ran - 1


def rows(case: Case) -> Iterator[Row]:
    """Every pipeline rank of ``case``."""
    model, plan = models()[case.name], case.plan.resolve(case.world)
    job = Job(model=model, plan=plan, topology=CPU, seq=case.seq, global_batch=case.batch)
    for pp in range(plan.pp):
        rank = next(rank for rank in range(case.world) if job.mesh.coordinate(rank)["pp"] == pp)
        dry = dry_run(model, plan, world_size=case.world, seq=case.seq, global_batch=case.batch, rank=rank)
        said = rank_memory(job, pp)
        yield Row(
            case=case,
            pp=pp,
            ran=dry.peak,
            said=said.peak - said.reserve,
            resting=dry.resting,
            during=max(dry.moments, key=lambda moment: moment[1])[0],
            guess=max(said.moments, key=lambda moment: moment[1])[0],
            wrong=tuple(differences(dry, job)),
        )


def main() -> int:
    """Returns 1 where counts differ or a peak is further off than 2%."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", default=",".join(models()), help="those to draw from")
    parser.add_argument("--worst", type=int, default=15, help="how many rows to print")
    args = parser.parse_args()
    chance, found = random.Random(args.seed), []
    for number in range(args.plans):
        case = draw(chance, args.models.split(","))
        found += list(rows(case))
        if sys.stderr.isatty():
            print(f"\r{number + 1} of {args.plans}", end="", file=sys.stderr)
    errors = sorted(abs(row.error) for row in found)
    for row in sorted(found, key=lambda row: -abs(row.error))[: args.worst]:
        sizes = f"{row.ran / 2**20:.1f} MiB ({row.resting / 2**20:.1f} at rest), said {row.said / 2**20:.1f}"
        print(f"{row.error:+.1%}  pp={row.pp} {row.case}\n    {sizes}; {row.during} / {row.guess}")
    wrong = [row for row in found if row.wrong]
    for row in wrong:
        print(f"counts differ: pp={row.pp} {row.case}: " + "; ".join(row.wrong))
    off = sum(error > 0.02 for error in errors)
    print(
        f"{args.plans} plans, {len(found)} ranks: peak off by {errors[len(errors) // 2]:.2%} in the median, "
        f"{errors[int(0.9 * (len(errors) - 1))]:.2%} at p90, {errors[-1]:.2%} at most; {off} beyond 2%; "
        f"{len(wrong)} with other counts"
    )
    return int(off > 0 or bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
