"""Activations that go to the host's memory: what their copies take, and when compute hides them."""

from __future__ import annotations

import dataclasses

import pytest

from plait.planner.activations import layer_steps, total
from plait.planner.constants import DEFAULT
from plait.planner.cost import predict
from plait.planner.job import Practice
from plait.planner.saved import local_of
from tests.planner.jobs import LLAMA, job

OFFLOAD = Practice(offload=True)


def waited(on: str, practice: Practice, link: float | None = None) -> float:
    """Seconds of a step that copies add."""
    table = DEFAULT if link is None else DEFAULT.replace({"host_link": link, "host_link.GB200": link})
    given = job("micro=2", on=on, practice=practice)
    plain = predict(dataclasses.replace(given, practice=Practice()), table)
    return predict(given, table).step_time - plain.step_time


def test_slow_links_add_what_compute_does_not_hide() -> None:
    assert waited("h100", OFFLOAD) > 0
    assert waited("gb200", OFFLOAD, link=1e15) == 0
    some = dataclasses.replace(OFFLOAD, offload_share=0.05)
    assert waited("h100", some) == 0


def test_every_kept_byte_goes_and_comes_back() -> None:
    link = 1e6
    given = job("micro=2", practice=OFFLOAD)
    at = local_of(LLAMA, given.plan, given.seq, False)
    kept = LLAMA.num_layers * total(layer_steps(LLAMA, given.plan, OFFLOAD, at, 0, "none"))
    copies = 2 * given.microbatches * kept / link
    step = predict(dataclasses.replace(given, practice=Practice())).step_time
    assert waited("h100", OFFLOAD, link=link) == pytest.approx(copies, abs=step)


def test_parts_make_up_the_step() -> None:
    found = predict(job("pp=2 micro=2", practice=OFFLOAD))
    for rank in found.ranks:
        spent = rank.compute + rank.bubble + rank.optimizer + rank.other + sum(rank.exposed.values())
        assert spent == pytest.approx(found.step_time, rel=1e-9)
