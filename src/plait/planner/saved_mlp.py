"""What a feed-forward part keeps for its backward: the plain one, experts with their router, shared ones. No torch."""

from __future__ import annotations

from plait.models.config import ModelConfig
from plait.models.parts import MoEConfig
from plait.planner.habits import habits_of
from plait.planner.job import Practice
from plait.planner.saved import WIDE, Local, Step, gradient_copies, is_plait, kept_input, low_width, product_work


def mlp(model: ModelConfig, at: Local, practice: Practice, ffn: int, kind: str = "mlp") -> list[Step]:
    """Both products and the activation between; ``ffn``: width here."""
    rows, e, plait = at.rows, at.width, is_plait(practice)
    inner, up = rows * ffn * e, (2 if model.gated else 1) * rows * ffn * e
    fp8_up, temp_up = product_work(at, at.hidden, up / (rows * e), plain=plait)
    fp8_down, temp_down = product_work(at, ffn, at.hidden, plain=plait)
    gathered = at.wide_stream if at.sp else 0.0
    module = "mlp" if kind == "mlp" else f"mlp.{kind}"
    # The shared expert reads what the router reads: kept once.
    first = Step(
        kind=kind,
        keeps=kept_input(at, practice, at.stream) if kind == "mlp" else 0.0,
        waits=at.wide_stream + up,
        forward=fp8_up + gathered,
        backward=up + gathered + at.wide_stream + temp_up,
        late=temp_up,
        modules=(f"{module}.gate_up", f"{module}.up"),
    )
    eager = not plait and habits_of(practice).eager
    kept = up + (inner if eager and model.gated else 0.0)
    # Gradient of the result, of one factor, and of the other.
    act = Step(kind=f"{kind} act", keeps=kept, forward=0.0, backward=(3 if model.gated else 2) * inner)
    second = Step(
        kind=kind,
        keeps=inner * low_width(at, practice) / e,
        waits=at.wide_stream + inner,
        forward=fp8_down + at.wide_stream,
        backward=inner + gathered + temp_down,
        late=temp_down,
        modules=(f"{module}.down",),
    )
    first_copies = gradient_copies(at, kind, at.hidden, up / (rows * e), plain=plait, coming=gathered)
    return [first, *first_copies, act, second, *gradient_copies(at, kind, ffn, at.hidden, plain=plait)]


def experts(model: ModelConfig, at: Local, practice: Practice, moe: MoEConfig) -> list[Step]:
    """Router, dispatch, the experts' two products, and the way back. Routing is even."""
    e, plait = at.width, is_plait(practice)
    shared = mlp(model, at, practice, moe.shared_ffn // at.tp, "shared") if moe.shared_ffn else []
    rows = at.rows / at.tp if plait or at.sp else at.rows
    share = min(1.0, moe.capacity_factor) if moe.capacity_factor is not None else 1.0
    sent = rows * moe.top_k * share
    computed = sent * at.etp
    ffn = moe.ffn_size / at.etp
    sent_bytes, computed_bytes, inner = sent * at.hidden * e, computed * at.hidden * e, computed * ffn * e
    scores = rows * moe.num_experts * (8.0 if plait and moe.score == "sigmoid" else WIDE)
    choice = rows * moe.top_k * (8 + WIDE + WIDE) + WIDE * rows
    apart = at.ep * at.etp > 1
    routing = 24.0 * sent + (16.0 * computed if apart else 0.0)
    if not plait:
        # Logits and probabilities in fp32, the permutation as int32 maps (Transformer Engine's fused permute).
        scores, choice, routing = 2 * WIDE * rows * moe.num_experts, WIDE * rows * moe.top_k, 8.0 * sent
    losses = WIDE * rows * moe.num_experts if moe.aux_loss or moe.z_loss else 0.0
    router = Step(
        kind="router",
        keeps=at.stream + scores + choice + losses,
        backward=rows * at.hidden * (WIDE + e),
        modules=("mlp.router",),
    )
    wide = rows * at.hidden * WIDE
    go = Step(kind="dispatch", keeps=routing, carried=routing, forward=sent_bytes, backward=sent_bytes + wide)
    if not plait:
        # The weights go into the activation, so that nothing of the results is kept to weigh them.
        moved = 2 * computed_bytes if apart else computed_bytes
        there = Step(kind="dispatch", keeps=routing, forward=moved, backward=moved)
        back_again = Step(kind="dispatch", forward=moved, backward=moved)
        return [router, there, *shared, *_fused_experts(computed_bytes, inner), back_again]
    slots = max(1, moe.num_experts // at.ep)
    arrived = computed_bytes if apart else 0.0
    # Half-precision weight gradients go to the fp32 sum expert by expert: one is made while the last is still there.
    late = min(2, slots) * 2 * ffn * at.hidden * e if e < WIDE else 0.0
    product = sent_bytes + arrived + 4 * inner + computed_bytes + max(late, 2 * computed_bytes / slots)
    if at.etp == 1 and apart:
        # While weight gradients are made, all is there that came and that goes, as it lies on the wire and sorted.
        back = 2 * sent_bytes + 2 * arrived + 3 * inner + 2 * computed_bytes + late
    else:
        wire = 2 * arrived if at.ep > 1 else arrived
        back = 2 * sent_bytes + wire + 3 * inner + (2 * computed_bytes + 2 * sent_bytes if apart else computed_bytes)
    work = Step(
        kind="experts",
        keeps=computed_bytes + 2 * inner,
        waits=2 * computed_bytes + 3 * inner,
        forward=2 * computed_bytes + 2 * sent_bytes if apart else computed_bytes,
        backward=max(product, back),
        late=late,
        modules=("mlp.experts.down", "mlp.experts.gate_up"),
    )
    weighing = Step(
        kind="dispatch",
        keeps=sent_bytes + WIDE * rows * moe.top_k,
        forward=2 * wide + rows * at.hidden * e,
        backward=wide + 2 * sent * at.hidden * WIDE,
    )
    # The shared expert runs while the rows travel, and its backward after the experts'.
    return [router, go, *shared, work, weighing]


def _fused_experts(rows: float, inner: float) -> list[Step]:
    """Megatron-Core's two grouped products and the activation between them, of ``rows`` bytes in and out, ``inner``
    bytes of each of the two halves between."""
    return [
        Step(
            kind="experts",
            keeps=rows,
            waits=rows + 2 * inner,
            backward=2 * rows,
            modules=("mlp.experts.gate_up",),
        ),
        Step(kind="moe act", keeps=2 * inner, backward=3 * inner),
        Step(
            kind="experts",
            keeps=inner,
            waits=rows + inner,
            forward=rows,
            backward=inner,
            modules=("mlp.experts.down",),
        ),
    ]
