from __future__ import annotations

import random

import pytest

from plait.core.errors import ScheduleError
from plait.schedule.check import check
from plait.schedule.generate import gpipe, interleaved, one_f_one_b
from plait.schedule.ir import Action, Kind, Schedule
from plait.schedule.lower import lower

ZERO_BUBBLE = """
schedule zb-h1 stages=3 microbatches=4   # Qi et al. 2024, arXiv:2401.10241, figure 3
0: 0F0 0F1 0F2 0B0 0F3 0W0 0B1 0W1 0B2 0W2 0B3 0W3
1: 1F0 1F1 1B0 1F2 1B1 1W0 1F3 1B2 1W1 1B3 1W2 1W3
2: 2F0 2B0 2F1 2B1 2W0 2F2 2B2 2W1 2F3 2B3 2W2 2W3
"""


def refused(schedule: Schedule, *, forward_only: bool = False) -> str:
    with pytest.raises(ScheduleError) as caught:
        check(schedule, forward_only=forward_only)
    rows = str(caught.value).splitlines()[1:]
    assert [row.split(":")[0].strip() for row in rows] == [f"rank {rank}" for rank in range(len(schedule.ranks))]
    return str(caught.value)


def test_p26_missing_backward() -> None:
    text = one_f_one_b(2, 4).text().replace(" 1B3", "")
    message = refused(Schedule.parse(text))
    assert "stage 1 microbatch 3 has a forward on rank 1 but no backward" in message
    assert ">>1F3<<" in message
    assert "missing >>1B3<<" in message.splitlines()[2]


def test_p26_deadlock() -> None:
    message = refused(Schedule.parse("0: 0F0 0B0 0F1 0B1\n1: 1F0 1F1 1B0 1B1"))
    reason, *rows = message.splitlines()
    assert reason.endswith(
        "deadlock: rank 0 waits for 0B0, which needs 1B0 on rank 1, which waits for 1F1, "
        "which needs 0F1 on rank 0, which itself waits for 0B0 first"
    )
    assert ">>0B0<<" in rows[0]
    assert ">>1F1<<" in rows[1]


def test_deadlock_across_three_ranks_names_each() -> None:
    message = refused(Schedule.parse("0: 0F0 0B0 0F1 0B1\n1: 1F0 1F1 1B0 1B1\n2: 2F1 2F0 2B0 2B1"))
    assert "deadlock" in message
    assert ">>0B0<<" in message and ">>1F1<<" in message


@pytest.mark.parametrize(
    ("text", "reason", "mark"),
    [
        ("0: 0F0 0B0 0B0", "stage 0 microbatch 0 has 2 backwards on rank 0, not one", ">>0B0<<"),
        ("0: 0B0", "has a backward on rank 0 but no forward", ">>0B0<<"),
        ("0: 0F0 0B0 0F1 0B1\n1: 1F0 1B0", "stage 1 microbatch 1 has no forward on rank 1", "missing >>1F1<<"),
        ("0: 0B0 0F0", "rank 0 has 0B0 before 0F0, which it needs", ">>0B0<<"),
        ("0: 0F0 0W0 0B0", "rank 0 has 0W0 before 0B0, which it needs", ">>0W0<<"),
        ("0: 0F0 0F1 0B0 0B1 0W1", "no weight-gradient backward on rank 0, though stage 0 splits", "missing >>0W0<<"),
        ("0: 0F0 0B0\n1: 1F0 1B0 0F1 0B1", "stage 0 is on rank 0, but rank 1 has 0F1", ">>0F1<<"),
        ("schedule x stages=3\n0: 0F0 0B0\n1: 1F0 1B0", "stage 2 of 3 is on no rank", "rank 0"),
        ("0: 0F0 0B0\n1:", "rank 1 has no stage", "rank 1:"),
        ("0: 0F0 0B0 0REDUCE\n1: 1F0 1B0 1REDUCE", "0SEND_F0 with its 1RECV_F0 is due once", "missing >>0SEND_F0<<"),
        ("0: 0F0 0B0 0REDUCE 1F0 1B0", "stage 1 has 0 REDUCE on rank 0, not one", "missing >>1REDUCE<<"),
        ("0: 0F0 0F1 0B0 0REDUCE 0B1", "rank 0 has 0REDUCE before 0B1", ">>0REDUCE<<"),
        (
            "0: 0F0 0SEND_F0 1F0 1B0 0B0 0REDUCE 1REDUCE",
            "0SEND_F0 is a message that no stage on another",
            ">>0SEND_F0<<",
        ),
    ],
)
def test_refusals_say_why_and_mark_the_action(text: str, reason: str, mark: str) -> None:
    message = refused(Schedule.parse(text))
    assert reason in message
    assert mark in message


def test_actions_outside_the_sizes_are_refused() -> None:
    for action in (Action(Kind.F, 1, 0), Action(Kind.F, 0, 1), Action(Kind.F, -1, 0), Action(Kind.F, 0, -1)):
        row = (Action(Kind.F, 0, 0), Action(Kind.B, 0, 0), action)
        message = refused(Schedule(name="x", stages=1, microbatches=1, ranks=(row,)))
        assert "not among" in message
        assert f">>{action}<<" in message


def test_forward_only() -> None:
    assert "a backward on rank 0, in a forward-only schedule" in refused(
        Schedule.parse("0: 0F0 0B0"), forward_only=True
    )
    schedule = Schedule.parse("0: 0F0 0SEND_F0 0REDUCE\n1: 1RECV_F0 1F0")
    assert "0REDUCE in a forward-only schedule" in refused(schedule, forward_only=True)


def test_messages_out_of_order_are_refused_even_where_blocking_receives_get_through() -> None:
    text = lower(gpipe(2, 2)).text()
    swapped = text.replace("1RECV_F0 1F0 1RECV_F1", "1RECV_F1 1RECV_F0 1F0")
    assert swapped != text
    message = refused(Schedule.parse(swapped))
    assert "rank 1 receives 1RECV_F1 from rank 0, which sends 0SEND_F0 first" in message
    assert ">>1RECV_F1<<" in message


def test_lowered_deadlock() -> None:
    """Each rank receives what the other sends only after its own receive: compute alone would get through."""
    text = lower(one_f_one_b(2, 2)).text()
    late = text.replace("0F1 0SEND_F1 0RECV_B0", "0RECV_B0 0F1 0SEND_F1").replace(
        "1RECV_F1 1B0 1SEND_B0", "1RECV_F1 1B0 1SEND_B0"
    )
    assert late != text
    schedule = Schedule.parse(late)
    assert check(schedule.compute_only())
    message = refused(schedule)
    assert "deadlock: rank 0 waits for 0RECV_B0, which needs 1SEND_B0 on rank 1, which waits for 1RECV_F1" in message
    assert ">>0RECV_B0<<" in message and ">>1RECV_F1<<" in message


def test_zero_bubble_text_passes() -> None:
    schedule = Schedule.parse(ZERO_BUBBLE)
    assert schedule.splits == {0, 1, 2}
    assert check(schedule).live == (4, 3, 2)  # held until W
    lowered = lower(schedule)
    assert check(lowered).live == (4, 3, 2)
    assert [str(action) for action in lowered.ranks[2][-2:]] == ["2W3", "2REDUCE"]


def test_marks_stay_visible_in_a_long_schedule() -> None:
    text = one_f_one_b(8, 24).text().replace(" 5B22", "")
    with pytest.raises(ScheduleError) as caught:
        check(Schedule.parse(text))
    assert "missing >>5B22<<" in str(caught.value)
    assert max(map(len, str(caught.value).splitlines())) <= 160


def runs(schedule: Schedule) -> bool:
    """A slow reference, apart from the engine: step ranks until nothing moves; receives block on per-pair queues."""
    done: set[tuple[str, int, int]] = set()
    wires: dict[tuple[int, int], list[Action]] = {}
    at = [0] * len(schedule.ranks)
    home = schedule.homes

    def step(rank: int, action: Action) -> bool:
        kind, s, m = action.kind, action.stage, action.microbatch
        if kind in (Kind.SEND_F, Kind.SEND_B):
            if ("F" if kind is Kind.SEND_F else "B", s, m) not in done:
                return False
            wires.setdefault((rank, home.get(s + (1 if kind is Kind.SEND_F else -1), -1)), []).append(action)
            return True
        if kind in (Kind.RECV_F, Kind.RECV_B):
            source = s - 1 if kind is Kind.RECV_F else s + 1
            wire = wires.get((home.get(source, -1), rank), [])
            if not wire or wire[0] != Action(Kind.SEND_F if kind is Kind.RECV_F else Kind.SEND_B, source, m):
                return False
            wire.pop(0)
            done.add((str(kind), s, m))
            return True
        wanted = {Kind.F: [("F", s - 1)], Kind.B: [("F", s), ("B", s + 1)], Kind.W: [("B", s)], Kind.REDUCE: []}[kind]
        for what, stage in wanted:
            if not 0 <= stage < schedule.stages:
                continue
            received = schedule.lowered and home[stage] != rank
            if (f"RECV_{what}" if received else what, s if received else stage, m) not in done:
                return False
        done.add((str(kind), s, m))
        return True

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.ranks):
            while at[rank] < len(row) and step(rank, row[at[rank]]):
                at[rank] += 1
                moved = True
    return all(at[rank] == len(row) for rank, row in enumerate(schedule.ranks)) and not any(wires.values())


@pytest.mark.parametrize("lowered", [False, True])
def test_swapped_actions_pass_exactly_if_they_run(lowered: bool) -> None:
    """Reordering inside a rank leaves a complete schedule: the verdict must be the reference executor's."""
    rng = random.Random(0)
    bases = [gpipe(2, 3), one_f_one_b(3, 4), interleaved(2, 3, 2), interleaved(3, 5, 2), one_f_one_b(4, 2)]
    verdicts = []
    for _ in range(400):
        base = rng.choice(bases)
        base = lower(base) if lowered else base
        rows = [list(row) for row in base.ranks]
        for _ in range(rng.randint(1, 3)):
            row = rng.choice(rows)
            i = rng.randrange(len(row) - 1)
            row[i], row[i + 1] = row[i + 1], row[i]
        mutant = Schedule(name="x", stages=base.stages, microbatches=base.microbatches, ranks=tuple(map(tuple, rows)))
        try:
            check(mutant)
            verdicts.append(True)
        except ScheduleError as error:
            verdicts.append(False)
            early = "REDUCE before" in str(error)
            assert early or not runs(mutant), str(error)
        else:
            assert runs(mutant)
    assert 20 < sum(verdicts) < 380


@pytest.mark.parametrize("lowered", [False, True])
def test_dropped_doubled_and_moved_actions_are_refused(lowered: bool) -> None:
    rng = random.Random(1)
    bases = [gpipe(2, 3), one_f_one_b(3, 4), interleaved(2, 3, 2), Schedule.parse(ZERO_BUBBLE)]
    for _ in range(300):
        base = rng.choice(bases)
        base = lower(base) if lowered else base
        rows = [list(row) for row in base.ranks]
        row = rng.choice(rows)
        i = rng.randrange(len(row))
        change = rng.choice(("drop", "double", "move"))
        action = row[i] if change == "double" else row.pop(i)
        if change != "drop":
            target = row if change == "double" else rng.choice([other for other in rows if other is not row])
            target.insert(rng.randrange(len(target) + 1), action)
        ranks = tuple(map(tuple, rows))
        with pytest.raises(ScheduleError) as caught:
            check(Schedule(name="x", stages=base.stages, microbatches=base.microbatches, ranks=ranks))
        assert ">>" in str(caught.value)
