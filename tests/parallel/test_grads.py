"""`Slot`: what it adds up, in which precision, when it says that it is whole; `Deferred`."""

from __future__ import annotations

import pytest
import torch

from plait.parallel.grads import Deferred, Slot


class Count:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1


def slot(*shape: int, uses: int = 1) -> tuple[Slot, Count, Deferred]:
    ready, deferred = Count(), Deferred()
    return Slot(torch.full(shape, float("nan")), uses, ready, deferred), ready, deferred


def test_the_first_contribution_of_a_step_overwrites() -> None:
    one, _, _ = slot(3)
    for value in (2.0, 5.0):
        one.restart()
        one.add(torch.full((3,), value))
        one.add(torch.ones(3))
        assert one.grad.tolist() == [value + 1] * 3


def test_products_and_rows_add_up() -> None:
    one, _, _ = slot(4, 3)
    one.restart()
    outer, inner = torch.randn(5, 4), torch.randn(5, 3)
    one.add_product(outer, inner)
    one.add_product(outer, inner)
    one.add_rows(torch.tensor([1, 1, 3]), torch.ones(3, 3))
    wanted = 2 * outer.t() @ inner
    wanted[1] += 2
    wanted[3] += 1
    torch.testing.assert_close(one.grad, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_add_up_and_those_without_rows_are_zero(dtype: torch.dtype) -> None:
    """Expert 1 gets rows in the second microbatch only, expert 2 never; one contribution each time."""
    one, ready, deferred = slot(4, 3, 2)
    one.restart()
    one.arm()
    outer, inner = torch.randn(5, 3).to(dtype), torch.randn(5, 2).to(dtype)
    one.add_slices([(3, outer, inner), (0, outer[:2], inner[:2])])
    assert ready.calls == 1
    one.restart()
    one.add_slices([(3, outer, inner), (0, outer[:0], inner[:0])])
    deferred.on = True
    one.add_slices([(1, outer[2:], inner[2:]), (3, outer, inner), (3, outer, inner)])
    deferred.on = False
    assert not one.grad[1].any()
    for work in deferred.take():
        work()
    product = (outer.t() @ inner).float()
    wanted = torch.stack([torch.zeros(3, 2), (outer[2:].t() @ inner[2:]).float(), torch.zeros(3, 2), 3 * product])
    torch.testing.assert_close(one.grad, wanted)


def test_rows_into_an_empty_slot_leave_the_others_zero() -> None:
    one, _, _ = slot(3, 2)
    one.restart()
    one.add_rows(torch.tensor([2]), torch.ones(1, 2))
    assert one.grad.tolist() == [[0, 0], [0, 0], [1, 1]]


def test_small_gradients_of_many_microbatches_are_not_lost() -> None:
    """1 + 1000 * 0.001: added up in bf16 it would stay 1, because 0.001 is below half its step of 2^-7 there."""
    one, _, _ = slot(1, 1)
    one.restart()
    small = torch.full((1, 1), 0.001, dtype=torch.bfloat16)
    lost = torch.ones(1, 1, dtype=torch.bfloat16)
    one.add(lost)
    for _ in range(500):
        one.add(small)
        one.add_product(small, torch.ones(1, 1, dtype=torch.bfloat16))
        lost = lost + small + small
    assert one.grad.dtype == torch.float32
    assert float(one.grad) == pytest.approx(1 + 1000 * float(small), rel=1e-5)
    assert float(lost) == 1.0


def test_ready_is_said_once_with_the_last_use() -> None:
    one, ready, _ = slot(2, uses=2)
    one.restart()
    one.add(torch.ones(2))
    one.add(torch.ones(2))
    assert ready.calls == 0
    one.arm()
    one.add(torch.ones(2))
    assert ready.calls == 0
    one.add(torch.ones(2))
    assert ready.calls == 1
    with pytest.raises(AssertionError, match="more gradient contributions"):
        one.add(torch.ones(2))


def test_a_slot_asks_for_its_buffer_before_each_contribution() -> None:
    given, deferred = torch.full((2, 2), float("nan")), Deferred()
    asked = Count()

    def coming() -> None:
        asked()
        if asked.calls in (1, 3):
            one.put(given)

    one = Slot(None, 1, Count(), deferred, coming)
    with pytest.raises(AssertionError, match="without a buffer"):
        _ = one.grad
    one.add(torch.ones(2, 2))
    one.add_rows(torch.tensor([1]), torch.ones(1, 2))
    assert given.tolist() == [[1, 1], [2, 2]]
    deferred.on = True
    one.add_product(torch.eye(2), torch.eye(2))
    deferred.on = False
    assert asked.calls == 2
    deferred.take()[0]()
    assert torch.equal(given, torch.eye(2))


def test_a_slot_without_contributions_closes_as_zero() -> None:
    one, _, _ = slot(2)
    one.restart()
    one.close()
    assert one.grad.tolist() == [0, 0]
    one.restart()
    one.add(torch.ones(2))
    one.close()
    assert one.grad.tolist() == [1, 1]


def test_deferred_products_wait_for_their_turn() -> None:
    one, ready, deferred = slot(2, 2)
    one.restart()
    one.arm()
    deferred.on = True
    one.add_product(torch.eye(2), torch.eye(2))
    deferred.on = False
    assert one.grad.isnan().all()
    assert ready.calls == 0
    (work,) = deferred.take()
    assert deferred.take() == []
    work()
    assert torch.equal(one.grad, torch.eye(2))
    assert ready.calls == 1
