"""What a rank's stages compute and send in a step: each layer's products and collectives, times microbatches.

N rows (tokens) of a microbatch, n of them this rank's, D hidden, H heads, K key/value heads, T tokens of a sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from plait.models.config import ModelConfig
from plait.models.parts import MLAConfig, MoEConfig
from plait.parallel.chunks import kv_heads_of, padded, pieces, zigzag
from plait.parallel.layout import placement, stage_bounds, stage_layers
from plait.parallel.rules import Form, rule_of, sizes_of, specs
from plait.planner.counts_tally import Tally
from plait.planner.job import Job

_ROUND = 8
"""On a CPU an expert's rows are multiplied in multiples of this number (`plait.parallel.grouped`)."""
_EMBEDDING = "embed.tokens.weight"


@final
@dataclass(frozen=True, kw_only=True)
class _Times:
    """How often a step does something of one layer. A backward runs once a microbatch."""

    forward: int
    """Forwards of the layer, those again in backward among them."""
    core: int
    """The same of its attention core."""
    once: int
    """Microbatches."""
    full: bool
    """Whether the whole layer is computed again."""


@final
class Layers:
    """The part of ``rank`` in a step of ``job``, added to ``tally`` by `count`."""

    def __init__(self, job: Job, rank: int, tally: Tally) -> None:
        self._job, self._tally = job, tally
        self._model: ModelConfig = job.model
        self._plan = plan = job.plan
        self._mesh = mesh = job.mesh
        self._at = mesh.coordinate(rank)
        self._width = 4 if plan.precision == "fp32" else 2
        multiple = plan.tp if plan.sp or job.model.moe is not None else 1
        part = job.seq if plan.cp == 1 else padded(job.seq, plan.cp, plan.context, multiple) // plan.cp
        self._tokens = part
        """Of a sample on a rank of cp."""
        self._rows = plan.micro * part
        """N: of a microbatch on a rank of cp."""
        self._apart = self._rows // plan.tp if plan.sp else self._rows
        """Between the layers."""
        self._heads = self._model.num_heads // plan.tp
        self._kv_heads = self._heads if self._model.mla is not None else max(1, self._model.num_kv_heads // plan.tp)
        found = specs(self._model, plan)
        self._shapes = {name: spec.local_shape(sizes_of(spec, mesh), self._at) for name, spec in found.items()}

    def count(self) -> None:
        """All stages of the rank."""
        model, plan, times = self._model, self._plan, self._job.microbatches
        homes, bounds = placement(plan), stage_bounds(stage_layers(model, plan))
        for stage, home in enumerate(homes):
            if home != self._at["pp"]:
                continue
            if stage == 0:
                self._embedding(times)
            for layer in range(*bounds[stage]):
                self._layer(layer, times)
            if stage == len(homes) - 1:
                self._head(times)
            message = self._apart * model.hidden_size * self._width
            for other in (stage - 1, stage + 1):
                if 0 <= other < len(homes) and homes[other] != home:
                    self._tally.call("pp", "send", 2, message, times)

    # --- ends of the model

    def _embedding(self, times: int) -> None:
        whole, tp = self._rows * self._model.hidden_size * self._width, self._plan.tp
        if self._plan.sp:
            self._tally.call("tp", "reduce_scatter", tp, whole, times)
            self._tally.call("tp", "all_gather", tp, whole, times)
        else:
            self._tally.call("tp", "all_reduce", tp, whole, times)

    def _head(self, times: int) -> None:
        vocabulary, hidden = self._shapes[_EMBEDDING if self._model.tied else "head.weight"]
        self._column(vocabulary, hidden, _Times(forward=times, core=times, once=times, full=False))
        # Cross-entropy: the largest logit of each row, then the sum of exponentials and the target's logit together.
        self._tally.call("tp", "all_reduce", self._plan.tp, 4 * self._rows, times)
        self._tally.call("tp", "all_reduce", self._plan.tp, 8 * self._rows, times)

    # --- a layer

    def _layer(self, layer: int, times: int) -> None:
        mode = self._plan.recompute_of(layer)
        again = 2 * times
        count = _Times(
            forward=again if mode == "full" else times,
            core=times if mode == "none" else again,
            once=times,
            full=mode == "full",
        )
        prefix, moe = f"layers.{layer}.", self._model.moe_of(layer)
        for name, shape in self._shapes.items():
            if not name.startswith(prefix) or len(shape) != 2:
                continue
            form = rule_of(name).form
            if form is Form.COLUMN:
                self._column(*shape, count)
            elif form is Form.ROW:
                self._row(*shape, count)
            elif form is Form.PLAIN:
                self._tally.product(self._apart, shape[1], shape[0], count.forward + 2 * count.once)
        if self._model.mla is not None:
            self._shared_key(self._model.mla, count)
        self._core(self._model.window_of(layer), count)
        if moe is not None:
            self._mixture(prefix, moe, count)

    def _column(self, outputs: int, inputs: int, count: _Times) -> None:
        """The input is gathered for the product and for the weight gradient, or its gradient is summed."""
        tally, tp, whole = self._tally, self._plan.tp, self._rows * inputs * self._width
        tally.product(self._rows, inputs, outputs, count.forward + 2 * count.once)
        if self._plan.sp:
            tally.call("tp", "all_gather", tp, whole, count.forward + count.once)
            tally.call("tp", "reduce_scatter", tp, whole, count.once)
        else:
            tally.call("tp", "all_reduce", tp, whole, count.once)

    def _row(self, outputs: int, inputs: int, count: _Times) -> None:
        tally, tp, whole = self._tally, self._plan.tp, self._rows * outputs * self._width
        tally.product(self._rows, inputs, outputs, count.forward + 2 * count.once)
        if self._plan.sp:
            tally.call("tp", "reduce_scatter", tp, whole, count.forward)
            tally.call("tp", "all_gather", tp, whole, count.once)
        else:
            tally.call("tp", "all_reduce", tp, whole, count.forward)

    def _shared_key(self, mla: MLAConfig, count: _Times) -> None:
        """The part of the key with positions, which the heads of all ranks read."""
        tally, tp, whole = self._tally, self._plan.tp, self._rows * mla.rope_dim * self._width
        if self._plan.sp:
            tally.call("tp", "all_gather", tp, whole, count.forward)
            tally.call("tp", "reduce_scatter", tp, whole, count.once)
        else:
            tally.call("tp", "all_reduce", tp, whole, count.once)

    # --- attention

    def _core(self, window: int | None, count: _Times) -> None:
        mla, context = self._model.mla, self._plan.context
        key, value = (self._model.head_dim,) * 2 if mla is None else (mla.qk_dim, mla.v_dim)
        if self._plan.cp == 1:
            self._whole(self._heads, self._tokens, key, value, count)
        elif context == "ulysses":
            self._ulysses(key, value, count)
        else:
            self._blocks(window, max(key, value), count)
            self._keys(context, self._plan.micro * self._kv_heads * self._tokens * (key + value), count)

    def _whole(self, heads: int, tokens: int, key: int, value: int, count: _Times) -> None:
        """Attention of whole samples, by torch's own: its flash kernel takes keys and values of one width alone."""
        pairs = 2 * self._plan.micro * heads * tokens * tokens
        if key == value:
            # Backward computes the scores again.
            self._tally.flops += pairs * (2 * key * count.core + 5 * key * count.once)
            return
        # Where the core alone is computed again, that ends before its last product: backward needs its factors only.
        values = count.forward if count.full else count.once
        self._tally.flops += pairs * (key * count.core + value * values + 2 * (key + value) * count.once)

    def _ulysses(self, key: int, value: int, count: _Times) -> None:
        plan, tally = self._plan, self._tally
        kv_heads = len(kv_heads_of(self._heads, self._kv_heads, plan.cp))
        row = self._rows * self._width
        there = row * (self._heads * key + kv_heads * (key + value))
        back = row * self._heads * value
        tally.call("cp", "all_to_all", plan.cp, there, count.core + count.once)
        # What the core's output goes through is not computed again with the core alone.
        tally.call("cp", "all_to_all", plan.cp, back, count.forward + count.once)
        self._whole(self._heads // plan.cp, self._tokens * plan.cp, key, value, count)

    def _blocks(self, window: int | None, width: int, count: _Times) -> None:
        """The kernel calls that cover what this rank's queries see of all keys."""
        size, index, chunk = self._plan.cp, self._at["cp"], self._tokens // 2
        own, seen = zigzag(size, index), window if window is not None else self._tokens * size
        buffers: list[tuple[tuple[int, ...], bool]] = [(own, True)]
        if self._plan.context == "gather":
            buffers.append((tuple(range(2 * size)), False))
        else:
            buffers += [(zigzag(size, (index - step) % size), False) for step in range(1, size)]
        pairs = 0
        for keys, local in buffers:
            for piece in pieces(own, keys, chunk, window=seen, packed=False, local=local):
                pairs += (piece.rows.stop - piece.rows.start) * (piece.columns.stop - piece.columns.start)
        pairs *= 2 * self._plan.micro * self._heads
        self._tally.flops += pairs * width * (2 * count.core + 5 * count.once)

    def _keys(self, context: str, elements: int, count: _Times) -> None:
        """Keys and values of a rank, ``elements``, and their fp32 gradients."""
        tally, size = self._tally, self._plan.cp
        if context == "gather":
            tally.call("cp", "all_gather", size, size * elements * self._width, count.core + count.once)
            tally.call("cp", "reduce_scatter", size, size * elements * 4, count.once)
        else:
            others = size - 1
            tally.call("cp", "send", size, elements * self._width, others * (count.core + count.once))
            tally.call("cp", "send", size, elements * 4, others * count.once)

    # --- experts

    def _mixture(self, prefix: str, moe: MoEConfig, count: _Times) -> None:
        tally, plan, hidden = self._tally, self._plan, self._model.hidden_size
        mine = self._rows // plan.tp
        row = hidden * self._width
        if plan.tp > 1 and not plan.sp:
            # Rows are shared for the experts alone: gradients are gathered, and outputs. A layer that is computed again
            # ends before these, unless dropout needs them.
            again = count.forward if self._model.dropout else count.once
            tally.sent("tp", "gather_rows", mine * (plan.tp - 1) * row, count.once + again)
        tally.product(mine, hidden, moe.num_experts, count.forward + 2 * count.once)
        if moe.aux_loss or moe.z_loss:
            tally.product(mine, moe.num_experts, 1, count.forward)
        if moe.capacity_factor is not None:
            for bytes_ in (8, 4) if moe.drop == "score" else (8,):
                whole = self._rows * moe.top_k * bytes_
                tally.call("tp", "all_gather", plan.tp, whole, count.forward)
                tally.call("cp", "all_gather", plan.cp, whole * plan.cp, count.forward)
        self._route(prefix, moe, mine, row, count)

    def _route(self, prefix: str, moe: MoEConfig, mine: int, row: int, count: _Times) -> None:
        """``mine``: rows of this rank; ``row``: bytes of one."""
        tally, ep, etp, experts = self._tally, self._plan.ep, self._plan.etp, moe.num_experts
        tally.call("ep", "all_gather", ep, 8 * ep * experts, count.forward)
        tally.call("etp", "all_gather", etp, 8 * etp * ep * experts, count.forward)
        kept = 1.0 if moe.capacity_factor is None else min(1.0, moe.capacity_factor)
        assignments = int(kept * mine * moe.top_k)
        each, more = divmod(assignments, experts)
        first = self._at["ep"] * (experts // ep)
        slots = [each + (slot < more) for slot in range(first, first + experts // ep)]
        here, arrived = sum(slots), ep * sum(slots)
        # Rows go there and back in forward, their gradients in backward.
        passes = count.forward + count.once
        if ep > 1:
            tally.sent("ep", "exchange", (assignments - here) * row, passes)
            tally.sent("ep", "exchange", (arrived - here) * row, passes)
        if etp > 1:
            tally.sent("etp", "gather_rows", arrived * (etp - 1) * row, passes)
            tally.sent("etp", "scatter_rows", arrived * (etp - 1) * row, passes)
        rows = [etp * ep * slot for slot in slots]
        cpu = self._job.topology.device.kind == "cpu"
        rounded = sum(min(-(-one // _ROUND) * _ROUND, sum(rows)) if cpu else one for one in rows if one)
        for name in ("gate_up", "down"):
            _, outputs, inputs = self._shapes[f"{prefix}mlp.experts.{name}"]
            tally.product(rounded, inputs, outputs, count.forward + count.once)
            tally.product(sum(rows), inputs, outputs, count.once)
