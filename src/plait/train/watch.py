"""`Watch`: floating-point operations and live bytes of whatever runs inside, under fake tensors or real ones.

FLOPs are those of ``torch.utils.flop_counter.FlopCounterMode`` (2 m n k a product; attention as its kernel computes
it, with the five products of its backward, and no halving for the causal mask), whose table leaves out products in
place, those of oneDNN and attention on a CPU: they are added here. Live bytes are those of storages that some tensor
still holds, once each; the allocator's rounding and its gaps are not in them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_ATEN = torch.ops.aten


def _in_place(_: Tensor, left: Tensor, right: Tensor) -> int:
    return 2 * left.shape[0] * left.shape[1] * right.shape[1]


def _in_place_batch(_: Tensor, left: Tensor, right: Tensor) -> int:
    return left.shape[0] * _in_place(_, left[0], right[0])


def _linear(x: Tensor, weight: Tensor) -> int:
    return 2 * x.numel() * weight.shape[0]


def _attention(q: Tensor, k: Tensor, v: Tensor) -> int:
    flops: int = sdpa_flop_count(q.shape, k.shape, v.shape)  # type: ignore[no-untyped-call]
    return flops


def _attention_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> int:
    flops: int = sdpa_backward_flop_count(  # type: ignore[no-untyped-call]
        grad.shape, q.shape, k.shape, v.shape
    )
    return flops


_MORE: Mapping[Any, tuple[int, Callable[..., int]]] = {
    _ATEN.addmm_: (3, _in_place),
    _ATEN.baddbmm_: (3, _in_place_batch),
    torch.ops.mkldnn._linear_pointwise: (2, _linear),
    _ATEN._scaled_dot_product_flash_attention_for_cpu: (3, _attention),
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: (4, _attention_backward),
}
"""What torch's table leaves out: how many of an operator's arguments the count is of, and the count."""


@final
class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts inside. ``moment`` names what is going on; ``share``: how much of a mask is set, where its values are
    asked for and there are none (its positions, then, are as many)."""

    def __init__(self, moment: Callable[[], str], share: float = 1.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.live = 0
        """Bytes that are held now."""
        self.peaks: dict[str, int] = {}
        """The most that was held in each moment, in the order of moments."""
        self._moment = moment
        self._share = share
        self._sizes: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._followed: set[int] = set()
        self._whole: set[int] = set()
        """Of those followed, what has memory."""

    def restart(self) -> None:
        """Count anew; what is held stays held."""
        self.flops = 0
        self.peaks = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = self._made_up(func, args, kwargs)
        out = func(*args, **kwargs) if out is None else out
        packet = func._overloadpacket
        if packet in _MORE:
            size, count = _MORE[packet]
            self.flops += count(*args[:size])
        elif packet in flop_registry:
            self.flops += int(flop_registry[packet](*args, **kwargs, out_val=out))
        self._see(args)
        self._see(kwargs.values())
        self._see((out,))
        self._note()
        return out

    def _made_up(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """The result of an operator whose shape depends on values, of a tensor without any; else None."""
        if not isinstance(args[0] if args else None, torch._subclasses.FakeTensor):
            return None
        x: Tensor = args[0]
        if func is _ATEN.nonzero.default:
            return torch.empty((round(x.numel() * self._share), x.dim()), dtype=torch.int64, device=x.device)
        if func is _ATEN.bincount.default:
            size = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
            return torch.empty(size, dtype=torch.int64, device=x.device)
        if func is _ATEN.index.Tensor and args[1][0] is not None and args[1][0].dtype == torch.bool:
            # Which rows are padding, or beyond an expert's capacity: at most all of them.
            return x.flatten(0, args[1][0].dim() - 1).clone()
        return None

    # --- live bytes

    def follow(self, storage: torch.UntypedStorage) -> None:
        """Look at the size of ``storage`` again and again: no operator says when it loses its memory (ZeRO 3)."""
        self._hold(storage)
        self._followed.add(storage._cdata)
        if storage.nbytes():
            self._whole.add(storage._cdata)

    def _see(self, values: Any) -> None:
        for value in values:
            if isinstance(value, Tensor) and value.device.type != "meta":
                self._hold(value.untyped_storage())
            elif isinstance(value, (list, tuple)):
                self._see(value)

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        before = self._sizes.get(key)
        if before is None:
            self._watched[key] = weakref.ref(storage, lambda _: self._drop(key))
        if before != size:
            self.live += size - (before or 0)
            self._sizes[key] = size
            if key in self._followed:
                (self._whole.add if size else self._whole.discard)(key)

    def _drop(self, key: int) -> None:
        self.live -= self._sizes.pop(key)
        self._watched.pop(key)
        self._followed.discard(key)
        self._whole.discard(key)

    def _note(self) -> None:
        for key in tuple(self._whole):
            storage = self._watched[key]()
            if storage is not None:
                self._hold(storage)
        moment = self._moment()
        if self.live > self.peaks.get(moment, -1):
            self.peaks[moment] = self.live
