from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.errors import PlanError, ScheduleError
from plait.schedule.generate import NAMES, generate
from plait.schedule.ir import Action, Kind, Schedule
from plait.schedule.lower import lower
from plait.schedule.placement import V_SHAPED

ACTIONS = st.builds(Action, st.sampled_from(Kind), st.integers(0, 999), st.integers(0, 999)).map(
    lambda action: Action(action.kind, action.stage) if action.kind is Kind.REDUCE else action
)


@given(ACTIONS)
def test_action_text_round_trip(action: Action) -> None:
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Action(Kind.F, 2, 0), "2F0"),
        (Action(Kind.W, 10, 13), "10W13"),
        (Action(Kind.SEND_F, 3, 1), "3SEND_F1"),
        (Action(Kind.RECV_B, 0, 7), "0RECV_B7"),
        (Action(Kind.REDUCE, 2), "2REDUCE"),
    ],
)
def test_action_text(action: Action, text: str) -> None:
    assert str(action) == text


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2REDUCE1", "-1F0", "2f0", "2F0 ", "9999999F0", "２F0"])
def test_action_refuses(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not an action"):
        Action.parse(text)


@given(st.lists(st.lists(ACTIONS, max_size=6), min_size=1, max_size=4))
def test_any_lists_round_trip(rows: list[list[Action]]) -> None:
    schedule = Schedule(name="any", stages=1000, microbatches=1000, ranks=tuple(map(tuple, rows)))
    assert Schedule.parse(schedule.text()) == schedule


@pytest.mark.parametrize("name", NAMES)
def test_generated_round_trip(name: str) -> None:
    schedule = generate(name, ranks=3, microbatches=5, virtual=2 if name in V_SHAPED else 1)
    assert Schedule.parse(schedule.text()) == schedule
    assert Schedule.parse(lower(schedule).text()) == lower(schedule)


def test_parse_without_header_derives_the_sizes() -> None:
    schedule = Schedule.parse("# two ranks\n\n1: 1F0 1B0 1F1 1B1\n0: 0F0 0F1 0B0 0B1  # first stage\n")
    assert (schedule.name, schedule.stages, schedule.microbatches) == ("custom", 2, 2)
    assert schedule.placement == (0, 1)
    assert schedule.ranks[1][0] == Action(Kind.F, 1, 0)


def test_properties() -> None:
    schedule = Schedule.parse("0: 0F0 0B0\n1: 1F0 1B0 1W0")
    assert schedule.splits == {1}
    assert not schedule.forward_only
    assert not schedule.lowered
    assert Schedule.parse("0: 0F0 0B0 0REDUCE").lowered
    assert Schedule.parse("0: 0F0 0SEND_F0\n1: 1RECV_F0 1F0").forward_only
    assert lower(schedule).compute_only() == schedule


def test_placement_names_a_stage_that_is_nowhere() -> None:
    with pytest.raises(ScheduleError, match="stage 1 of 3 is on no rank"):
        _ = Schedule.parse("schedule x stages=3\n0: 0F0\n1: 2F0").placement


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0: 0F0\n1: 1F0 1Q0", "line 2, at '1Q0'"),
        ("schedule x stages=2 microbatches=2\n0: 0F0 2F0", "line 2, at '2F0': stage 2 is not among 2 stages"),
        ("schedule x microbatches=2\n0: 0F2", "line 2, at '0F2': microbatch 2 is not among 2 microbatches"),
        ("schedule x stages=two\n0: 0F0", "line 1, at 'stages=two'"),
        ("schedule x stages=0\n0: 0F0", "line 1, at 'stages=0': at least 1"),
        ("schedule x stages=2 stages=3\n0: 0F0", "line 1, at 'stages=3'"),
        ("0: 0F0\nschedule x", "line 2, at 'schedule'"),
        ("0: 0F0\n0: 0B0", "line 2, at '0:': rank 0 has a list already"),
        ("0: 0F0\n2: 1F0", "no rank 1"),
        ("rank zero", "line 1, at 'rank'"),
        ("# nothing\n", "no rank line"),
        ("", "no rank line"),
    ],
)
def test_parse_errors_name_line_and_token(text: str, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule.parse(text)
    assert message in str(caught.value)
    assert isinstance(caught.value, PlanError)


@given(st.text(alphabet="0123456789:FBWREDUCSNV_ =#\nschedultagmirob", max_size=80))
def test_parse_of_junk_is_a_schedule_or_a_schedule_error(text: str) -> None:
    try:
        schedule = Schedule.parse(text)
    except ScheduleError:
        return
    assert Schedule.parse(schedule.text()) == schedule


@pytest.mark.parametrize("fields", [{"name": "two words"}, {"stages": 0}, {"microbatches": 0}, {"ranks": ()}])
def test_schedule_refuses(fields: dict[str, object]) -> None:
    good: dict[str, object] = {"name": "x", "stages": 1, "microbatches": 1, "ranks": ((Action(Kind.F, 0, 0),),)}
    with pytest.raises(ScheduleError):
        Schedule(**{**good, **fields})  # type: ignore[arg-type]
