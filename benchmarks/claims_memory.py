"""Claims on memory and traffic: live activations of schedules, state of ZeRO levels, tensor-parallel bytes a layer."""

from __future__ import annotations

import dataclasses
import os

from claims_ranks import Claim, Job, Trainer, on_ranks
from live import resident, settle, storage_bytes
from plait.comm.world import World
from plait.models.config import PRESETS, parameter_count

MB = 1e6


def live(trainer: Trainer, world: World) -> dict[str, float]:
    """Most microbatches that are between forward and backward on this rank, and resident bytes above those at rest."""
    trainer.step()
    held, most, peak = 0, 0, 0

    def sink(stream: str, kind: str, name: str, start: float, end: float, sent: int = 0) -> None:
        nonlocal held, most, peak
        if stream == "compute":
            held += {"F": 1, "B": -1}.get(kind, 0)
            most, peak = max(most, held), max(peak, resident("RssAnon"))

    settle()
    before = resident("RssAnon")
    world.book.sink = sink
    trainer.forward_backward()
    return {"live": most, "bytes": peak - before}


def activations(quick: bool) -> list[Claim]:
    """GPipe beside 1F1B: m microbatches live on every stage, against min(m, p - i) on stage i."""
    ranks, micro = (2, 4) if quick else (4, 8)
    config = PRESETS["tiny"] if quick else dataclasses.replace(PRESETS["bench"], hidden_size=256, vocab_size=512)
    seq = 64 if quick else 256
    # Every activation in a mapping of its own, so that resident bytes fall when it is let go (mallopt(3)).
    os.environ["MALLOC_MMAP_THRESHOLD_"] = os.environ["MALLOC_TRIM_THRESHOLD_"] = "65536"
    found = {}
    for schedule in ("gpipe", "1f1b"):
        plan = f"pp={ranks} schedule={schedule} micro=2"
        found[schedule] = on_ranks(Job(config=config, plan=plan, ranks=ranks, samples=2 * micro, seq=seq, work=live))
    del os.environ["MALLOC_MMAP_THRESHOLD_"], os.environ["MALLOC_TRIM_THRESHOLD_"]
    want = {"gpipe": [micro] * ranks, "1f1b": [min(micro, ranks - stage) for stage in range(ranks)]}
    claims = []
    for schedule, rows in found.items():
        counts = [row["live"] for row in rows]
        sizes = " ".join(f"{row['bytes'] / MB:.0f}" for row in rows)
        claims.append(
            Claim(
                claim=f"live microbatches by stage, {schedule}, p={ranks} m={micro}",
                published=" ".join(map(str, want[schedule])),
                measured=f"{' '.join(map(str, counts))} ({sizes} MB held at most)",
                verdict="as published" if counts == want[schedule] else "differs",
            )
        )
    ratio = found["1f1b"][0]["bytes"] / max(found["gpipe"][0]["bytes"], 1)
    return [
        *claims,
        Claim(
            claim="activation bytes on stage 0, 1f1b / gpipe",
            published=f"p/m = {ranks / micro:.2f}",
            measured=f"{ratio:.2f}",
            verdict="as published" if abs(ratio - ranks / micro) < 0.1 else "differs: see docs/performance.md",
        ),
    ]


def state(trainer: Trainer, world: World) -> dict[str, float]:
    """Bytes of tensors that are alive after steps: of the whole process, and what `Zero.state_bytes` says."""
    for _ in range(2):
        trainer.step()
    settle()
    return {
        "alive": storage_bytes() - sum(b.tokens_BT.nbytes + b.targets_BT.nbytes for b in trainer.batches),
        "told": sum(trainer.parallel.zero.state_bytes().values()),
    }


def formula(count: int, level: int, ranks: int, precision: str) -> float:
    """Bytes of training state on one of ``ranks`` data ranks for ``count`` parameters (arXiv:1910.02054, section 5).

    As there, but gradients are kept and summed in fp32: 2 + 4 + 12 bytes a parameter in bf16 for 2 + 2 + 12. fp32
    weights are their own masters: 4 + 4 + 8.
    """
    weights, grads, optimizer = (2, 4, 12) if precision == "bf16" else (4, 4, 8)
    parts = ((weights, 3), (grads, 2), (optimizer, 1))
    return count * sum(size / (ranks if level >= least else 1) for size, least in parts)


def zero(quick: bool) -> list[Claim]:
    """State a rank at ZeRO levels 0 to 3 beside the formula."""
    config = PRESETS["tiny" if quick else "bench"]
    seq, ranks, count = 32, 2, parameter_count(config)
    claims = []
    for precision in ("fp32",) if quick else ("fp32", "bf16"):
        for level in (0, 3) if quick else (0, 1, 2, 3):
            plan = f"dp={ranks} zero={level} precision={precision}"
            rows = on_ranks(Job(config=config, plan=plan, ranks=ranks, samples=ranks, seq=seq, work=state))
            want = formula(count, level, ranks, precision)
            told, alive = (max(row[key] for row in rows) for key in ("told", "alive"))
            claims.append(
                Claim(
                    claim=f"bytes of state a rank, zero={level} {precision}, {ranks} ranks",
                    published=f"{want / MB:.1f} MB",
                    measured=f"{told / MB:.1f} MB kept, {alive / MB:.1f} MB of tensors alive between steps",
                    verdict=_apart(max(abs(told / want - 1), abs(alive / want - 1))),
                )
            )
    return claims


def _apart(share: float, limit: float = 0.05) -> str:
    return f"within {share:.1%}" if share <= limit else f"differs by {share:.0%}"


def traffic(trainer: Trainer, world: World) -> dict[str, int]:
    """Bytes that this rank sends over tp in a step, by operation and phase."""
    trainer.step()
    world.book.ledger.clear()
    trainer.forward_backward()
    found: dict[str, int] = {}
    for (axis, _, phase), sent in world.book.ledger.bytes.items():
        if axis.partition("/")[0] == "tp":
            found[phase] = found.get(phase, 0) + sent
    return found


def tensor_parallel(quick: bool) -> list[Claim]:
    """Bytes a layer: two models that differ by two layers, so that embedding and head drop out."""
    claims = []
    for ranks in (2,) if quick else (2, 4):
        for rows_cut in (False, True):
            base = dataclasses.replace(PRESETS["tiny"], num_kv_heads=4)
            seq, samples = 64, 2
            plan = f"tp={ranks} micro={samples} sequence_parallel={str(rows_cut).lower()}"
            few, many = (
                on_ranks(
                    Job(
                        config=dataclasses.replace(base, num_layers=layers),
                        plan=plan,
                        ranks=ranks,
                        samples=samples,
                        seq=seq,
                        work=traffic,
                    )
                )[0]
                for layers in (2, 4)
            )
            each = {phase: (many[phase] - few[phase]) // 2 for phase in many}
            one = 2 * (ranks - 1) * samples * seq * base.hidden_size * 4 // ranks
            shown = ", ".join(f"{phase} {size / one:.2f}" for phase, size in sorted(each.items()) if size)
            total = sum(each.values()) / one
            kind = "sequence parallel" if rows_cut else "all-reduce"
            claims.append(
                Claim(
                    claim=f"tp bytes a layer in units of 2(t-1)/t x tokens x hidden, t={ranks}, {kind}",
                    published="4 (2 forward, 2 backward)",
                    measured=f"{total:.2f} ({shown})",
                    verdict="as published"
                    if abs(total - 4) < 0.01
                    else "more: rows are gathered again in backward, not kept",
                )
            )
    return claims
