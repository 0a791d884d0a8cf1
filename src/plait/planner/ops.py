"""What a rank computes and sends for a microbatch: operators, messages, and the builder that collects them by phase.

Pure counts: shapes, FLOPs and bytes, forward (F), input gradients (B) and weight gradients (W) apart. The parts of a
model are in :mod:`plait.planner.layers`. What they cost on
a device is said by :mod:`plait.planner.kernels`, on a wire by :mod:`plait.planner.wires`. Lengths are elements, sizes
bytes. A product [m, k] x [k, n] has ``2 m n k`` FLOPs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from plait.models.config import ModelConfig
from plait.planner.job import Practice

ALIGNED = 8
"""Elements of 16 bits that tensor cores read at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One operator. ``kind``: ``product``, ``grouped``, ``attention_f``, ``attention_b`` or ``memory``."""

    kind: str
    part: str
    """What it belongs to (``attention core norm mlp act router experts shared head embed``), to recompute it alone."""
    m: int = 0
    n: int = 0
    k: int = 0
    groups: int = 1
    """Products of one grouped call, each [m, k] x [k, n]; heads of attention."""
    flops: float = 0.0
    bytes: float = 0.0
    precision: str = "bf16"
    kernels: int = 1
    odd: bool = False
    """Whether a row of the weight is no whole number of the words that tensor cores read."""
    framework: str = ""
    """Whose attention kernel it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One collective of ``axis``; ``size`` is the whole tensor's bytes (all_to_all and p2p: what a rank sends)."""

    axis: str
    op: str
    size: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """What one rank computes and sends in one phase of one microbatch of a layer."""

    ops: tuple[Op, ...]
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """A layer's three phases, and its bytes of transfers between stages."""

    forward: Phase
    backward: Phase
    weight: Phase


@dataclass(frozen=True, kw_only=True)
class Slice:
    """What decides a rank's share of a layer: the model, the tokens, the cut and the practice."""

    model: ModelConfig
    seq: int
    micro: int
    tp: int
    sp: bool
    cp: int
    context: str
    ep: int
    etp: int
    precision: str
    practice: Practice
    apart: int = 1
    """How far ranks of experts beyond ``cp x tp`` neighbours lie from each other (`plait.core.mesh.Mesh.apart`)."""

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on a rank, all tensor ranks alike."""
        return self.micro * self.seq // self.cp

    @property
    def own(self) -> float:
        """Tokens of which a rank holds the residual: a share of them under sequence parallelism."""
        return self.tokens / self.tp if self.sp else float(self.tokens)

    @property
    def width(self) -> int:
        """Bytes of an activation."""
        return 4 if self.precision == "fp32" else 2

    @property
    def products(self) -> str:
        """Precision of the linear layers' products; the containers that others run in make fp32 tf32."""
        if self.precision == "fp32" and self.practice.framework != "plait":
            return "tf32"
        return "fp4" if self.precision == "fp8" and self.practice.fp8 == "nvfp4" else self.precision

    @property
    def plain(self) -> str:
        """Precision of everything that fp8 leaves alone."""
        return "bf16" if self.precision == "fp8" else self.products

    @property
    def low(self) -> bool:
        """Whether products are in 8 bits or fewer, so that their inputs are cast."""
        return self.precision == "fp8"


class Builder:
    """Collects the operators of one part of the model, phase by phase."""

    def __init__(self, cut: Slice) -> None:
        self.cut = cut
        self.forward: list[Op] = []
        self.backward: list[Op] = []
        self.weight: list[Op] = []
        self.sent: list[Message] = []
        self.returned: list[Message] = []
        self.gathered: list[Message] = []

    def work(self) -> Work:
        return Work(
            forward=Phase(ops=tuple(self.forward), messages=tuple(self.sent)),
            backward=Phase(ops=tuple(self.backward), messages=tuple(self.returned)),
            weight=Phase(ops=tuple(self.weight), messages=tuple(self.gathered)),
        )

    def linear(self, part: str, m: float, n: float, k: float, *, bias: bool = False, low: bool = True) -> None:
        """``[m, k] -> [m, n]``: the product, its two gradients, and the casts of 8-bit products."""
        cut = self.cut
        rows, columns, inner = max(1, round(m)), max(1, round(n)), max(1, round(k))
        precision = cut.products if low else cut.plain
        odd = columns % ALIGNED > 0 or inner % ALIGNED > 0
        self._product(self.forward, part, rows, columns, inner, precision, odd)
        self._product(self.backward, part, rows, inner, columns, precision, odd)
        # Weight gradients are added into fp32 (read and written) unless the practice holds them in bf16.
        kept = cut.practice.grad_bytes or 4.0
        extra = (2 * kept - 2) * columns * inner
        self._product(self.weight, part, columns, inner, rows, precision, odd, extra=extra)
        if cut.low and low:
            self.memory(self.forward, part, _cast_bytes(cut) * rows * inner, kernels=_cast_kernels(cut))
            self.memory(self.backward, part, _cast_bytes(cut) * rows * columns, kernels=_cast_kernels(cut))
        if bias:
            self.memory(self.weight, part, cut.width * rows * columns)

    def _product(
        self, phase: list[Op], part: str, m: int, n: int, k: int, precision: str, odd: bool, *, extra: float = 0.0
    ) -> None:
        item = {"fp32": 4.0, "tf32": 4.0, "fp8": 1.0, "fp4": 0.5}.get(precision, 2.0)
        moved = item * (m * k + k * n) + self.cut.width * m * n + extra
        flops = 2.0 * m * n * k
        shape = {"m": m, "n": n, "k": k, "odd": odd, "flops": flops, "bytes": moved, "precision": precision}
        phase.append(Op(kind="product", part=part, **shape))  # type: ignore[arg-type]

    def grouped(self, groups: int, m: float, n: float, k: float) -> None:
        """``groups`` products of ``m`` rows each: the experts of a rank."""
        cut = self.cut
        rows, columns, inner = max(1.0, m), max(1, round(n)), max(1, round(k))
        item = {"fp32": 4.0, "tf32": 4.0, "fp8": 1.0, "fp4": 0.5}.get(cut.products, 2.0)
        kept = cut.practice.grad_bytes or 4.0
        flops = 2.0 * groups * rows * columns * inner
        weights, inputs, outputs = groups * columns * inner, groups * rows * inner, groups * rows * columns
        shape = {"groups": groups, "flops": flops, "precision": cut.products}

        def add(phase: list[Op], moved: float, m: float, n: int, k: int) -> None:
            phase.append(
                Op(kind="grouped", part="experts", m=max(1, round(m)), n=n, k=k, bytes=moved, kernels=groups, **shape)  # type: ignore[arg-type]
            )

        add(self.forward, item * (weights + inputs) + cut.width * outputs, rows, columns, inner)
        add(self.backward, item * (weights + outputs) + cut.width * inputs, rows, inner, columns)
        add(self.weight, item * (inputs + outputs) + 2 * kept * weights, columns, inner, round(rows))
        if cut.low:
            self.memory(self.forward, "experts", _cast_bytes(cut) * inputs, kernels=groups)
            self.memory(self.backward, "experts", _cast_bytes(cut) * outputs, kernels=groups)

    def memory(self, phase: list[Op], part: str, moved: float, *, kernels: int = 1) -> None:
        phase.append(Op(kind="memory", part=part, bytes=moved, kernels=kernels))

    def pointwise(self, part: str, elements: float, forward: float, backward: float, kernels: int) -> None:
        """Memory-bound: passes over ``elements`` activations in forward and backward."""
        self.memory(self.forward, part, forward * elements * self.cut.width, kernels=kernels)
        self.memory(self.backward, part, backward * elements * self.cut.width, kernels=kernels)

    def tensor_parallel(self, gather: float) -> None:
        """Entry and exit of a region cut over ``tp``: ``gather`` is the bytes of the whole activation."""
        cut = self.cut
        if cut.tp == 1:
            return
        if cut.sp:
            for side in (self.sent, self.returned):
                side.append(Message(axis="tp", op="all_gather", size=gather))
                side.append(Message(axis="tp", op="reduce_scatter", size=gather))
            self.gathered.append(Message(axis="tp", op="all_gather", size=gather))
            return
        self.sent.append(Message(axis="tp", op="all_reduce", size=gather))
        self.returned.append(Message(axis="tp", op="all_reduce", size=gather))


def _cast_bytes(cut: Slice) -> float:
    """Bytes moved for each element that is cast: read in bf16, written as it is and transposed; amax reads it again."""
    written = 1.0 if cut.practice.fp8 == "nvfp4" else 2.0
    scanned = 2.0 if cut.practice.fp8 in ("tensorwise", "nvfp4") else 0.0
    return 2.0 + written + scanned


def _cast_kernels(cut: Slice) -> int:
    return 2 if cut.practice.fp8 in ("tensorwise", "nvfp4") else 1


def total_flops(phase: Phase) -> float:
    """FLOPs of a phase's products and attention."""
    return sum(op.flops for op in phase.ops)


def parts_of(phase: Phase, parts: frozenset[str]) -> Iterator[Op]:
    """The operators of ``parts`` alone: what partial recomputation runs again."""
    return (op for op in phase.ops if op.part in parts)
