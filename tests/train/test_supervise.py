"""What a rank of a supervised run uses, and what its supervisor decides: without processes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from plait.comm.flight import Flight, flight_file
from plait.core.config import Config, loads
from plait.core.errors import ConfigError, DivergedError, PlanError, RankError
from plait.train import elastic, restart, trainer
from plait.train.events_log import EventLog, read
from plait.train.failure import WorkerFailed
from plait.train.heartbeat import SIZE, Beat, Heartbeat, Lookout, beat_file, read_beat, state_of
from plait.train.launch import Place, Worker
from plait.train.local import Watched
from plait.train.supervise import PARTS, WINDOW_STEPS, Stop, StoppedError, Stragglers, restarted, stop_file
from tests.train.test_trainer import config as trainer_config
from tests.train.test_trainer import tokens

__all__ = ["tokens"]


def worker(rank: int, folder: Path | None) -> Worker:
    place = Place(rank=rank, local_rank=rank, world_size=2)
    return Worker(place=place, device="cpu", timeout=1.0, watch=folder)


# --- events.jsonl


def test_events_are_appended_and_a_torn_line_harms_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "events.jsonl"
    assert read(path) == []
    EventLog(path).write("restart", {"rank": 1})
    with open(path, "ab") as file:
        file.write(b'{"time": 1.0, "ki')
    EventLog(path).write("straggler", {"rank": 2})
    events = read(path)
    assert [(event.kind, event.fields) for event in events] == [("restart", {"rank": 1}), ("straggler", {"rank": 2})]
    assert abs(events[0].time - time.time()) < 60
    with pytest.raises(ValueError, match="log's own"):
        EventLog(path).write("x", {"time": 1})
    EventLog(tmp_path / "none/events.jsonl").write("lost", {"rank": 3})  # no reason to end a run
    assert '"rank": 3' in capsys.readouterr().err


# --- signs of life


def test_a_beat_says_where_a_rank_is(tmp_path: Path) -> None:
    assert read_beat(tmp_path, 1) is None
    heart = Heartbeat(worker(1, tmp_path))
    first = read_beat(tmp_path, 1)
    assert first is not None
    assert (first.phase, first.bounded, first.pid) == ("start", False, os.getpid())
    heart.beat(7, "évaluer " * 20, compute=0.5)
    second = read_beat(tmp_path, 1)
    assert second is not None
    assert second.phase.startswith("évaluer évaluer")
    assert (second.count, second.step, second.bounded, second.compute) == (2, 7, True, 0.5)
    assert first.time <= second.time <= time.monotonic()
    assert beat_file(tmp_path, 1).stat().st_size == SIZE
    Heartbeat(worker(0, None)).beat(1, "step")  # nobody watches


def test_a_rank_without_signs_of_life_is_found_and_its_victims_are_not(tmp_path: Path) -> None:
    hearts = [Heartbeat(worker(rank, tmp_path)) for rank in range(2)]
    flights = [Flight(rank, flight_file(tmp_path, rank)) for rank in range(2)]
    lookout = Lookout(tmp_path, 2, timeout=5.0)
    assert lookout.hung(0.0) is None
    for heart in hearts:
        heart.beat(3, "step")
    assert lookout.hung(1.0) is None
    group = flights[0].group("dp", (0, 1))
    flights[1].note("F of stage 0, microbatch 0")
    assert lookout.hung(4.0) is None
    flights[0].waiting(flights[0].begin("all_reduce", group, (4,)))
    assert lookout.hung(8.0) is None
    assert lookout.hung(9.5) == 1  # the last note was seen at 4, rank 0 waits for it
    flights[1].note("B of stage 0, microbatch 0")
    assert lookout.hung(10.0) is None
    assert lookout.hung(14.0) is None  # rank 0 stands still longer than that, and will say so itself
    hearts[1].beat(3, "save", bounded=False)
    assert lookout.hung(99.0) is None


def test_a_computing_rank_that_nobody_waits_for_hangs_too(tmp_path: Path) -> None:
    heart = Heartbeat(worker(0, tmp_path))
    heart.beat(1, "step")
    lookout = Lookout(tmp_path, 1, timeout=5.0)
    assert lookout.hung(1.0) is None
    assert lookout.hung(5.9) is None
    assert lookout.hung(6.1) == 0


def test_a_rank_that_is_alone_takes_its_time_while_it_computes(tmp_path: Path) -> None:
    """Of several the others would wait for it, and their time-out would end them."""
    Heartbeat(worker(0, tmp_path)).beat(1, "step")
    lookout, pair = Lookout(tmp_path, 1, timeout=0.5), Lookout(tmp_path, 2, timeout=0.5)
    assert lookout.hung(1.0) is None
    assert pair.hung(1.0) is None
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    assert lookout.hung(1.4) is None
    assert pair.hung(1.4) is None
    assert pair.hung(1.6) == 0
    assert lookout.hung(1.6) is None
    assert lookout.hung(2.0) is None
    assert lookout.hung(2.2) == 0


def test_whoever_has_not_looked_for_long_does_not_know(tmp_path: Path) -> None:
    """Ctrl-Z stops the launcher and its ranks together."""
    Heartbeat(worker(0, tmp_path)).beat(1, "step")
    lookout = Lookout(tmp_path, 1, timeout=5.0)
    assert [lookout.hung(now) for now in (1.0, 2.0, 99.0, 103.0)] == [None] * 4
    assert lookout.hung(104.1) == 0


def test_the_kernel_says_what_a_process_does() -> None:
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    try:
        os.kill(child, signal.SIGSTOP)
        os.waitid(os.P_PID, child, os.WSTOPPED | os.WNOWAIT)
        assert state_of(child) == "is stopped by a signal (SIGSTOP)"
        os.kill(child, signal.SIGKILL)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        assert state_of(child) == "is dead"
    finally:
        os.waitpid(child, 0)
    assert "does not tell" in state_of(child)


# --- signals


def test_a_signal_asks_once_and_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    with Stop(worker(0, None)) as stop:
        assert stop.requested() == 0
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.requested() == signal.SIGUSR1
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before
    assert "SIGUSR1 after 12 steps" in Stop.message(signal.SIGUSR1, 12)


def test_a_launcher_passes_a_signal_on(tmp_path: Path) -> None:
    with Stop(worker(0, tmp_path)) as stop:
        assert stop.requested() == 0
        stop_file(tmp_path).write_text(str(int(signal.SIGTERM)))
        assert stop.requested() == signal.SIGTERM


def test_torchrun_says_that_it_has_started_ranks_again() -> None:
    assert not restarted({})
    assert not restarted({"TORCHELASTIC_RESTART_COUNT": "0"})
    assert restarted({"TORCHELASTIC_RESTART_COUNT": "2"})


# --- stragglers


def windows(stragglers: Stragglers, *rows: list[float], part: int = 0) -> list[str | None]:
    """One window of equal steps a row, of each rank's forward (or other part); what each ended with."""
    return [[stragglers.observe(10, parts(row, part)) for _ in range(WINDOW_STEPS)][-1] for row in rows]


def parts(row: list[float], part: int = 0) -> list[list[float]]:
    return [[seconds * (index == part) for index in range(len(PARTS))] for seconds in row]


def test_a_rank_slower_than_its_like_is_named_once(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    stragglers = Stragglers([(0, 1, 2), (3,)], log=log)
    even, slow = [1.0, 1.0, 1.1, 3.0], [1.0, 5.0, 1.1, 3.0]
    told = windows(stragglers, even, even, slow, even, slow, slow, slow, even, slow, slow)
    assert [text is not None for text in told] == [place in (5, 9) for place in range(10)]
    assert told[5] == (
        "step 10: rank 1 is slow: 5 s of its own computing a step, 4.8 times what its like takes, "
        "above all in forward: 5 s, not 1.05"
    )
    assert [(event.kind, event.fields["rank"]) for event in read(log.path)] == [("straggler", 1)] * 2


def test_a_rank_without_its_like_is_held_against_its_own_past() -> None:
    stragglers = Stragglers([(0,), (1,), (2,)])
    assert windows(stragglers, [1.0, 2.0, 4.0], [2.0, 4.0, 8.0], [1.0, 2.0, 4.0]) == [None] * 3
    assert "rank 1 is slow" in str(windows(stragglers, [1.0, 6.0, 4.0], [1.0, 6.0, 4.0])[1])
    assert windows(Stragglers([(0,)]), [1.0], [9.0], [9.0]) == [None] * 3


def test_short_steps_are_judged_over_seconds() -> None:
    stragglers = Stragglers([(0, 1)], seconds=1.0)
    told = [stragglers.observe(step, parts([0.01, 0.05])) for step in range(50)]
    assert [step for step, text in enumerate(told) if text] == [39]


@pytest.mark.parametrize("part", range(len(PARTS)))
def test_what_a_slow_rank_is_slow_in_is_named(tmp_path: Path, part: int) -> None:
    """Beside its like: what it takes longer for than they. Without: longer than at first, as far as others have not."""
    even = [[4.0, 3.0, 2.0, 1.0]] * 3
    slow = [list(row) for row in even]
    slow[1][part] += 9.0
    log = EventLog(tmp_path / "events.jsonl")
    for peers in ([(0, 1, 2)], [(0,), (1,), (2,)]):
        stragglers = Stragglers(peers, seconds=0.0, log=log)
        for rows in (even, slow, slow):
            told = [stragglers.observe(1, rows) for _ in range(WINDOW_STEPS)][-1]
        assert f"above all in {PARTS[part]}: {even[1][part] + 9:g} s, not {even[1][part]:g}" in str(told)
    assert [event.fields["phase"] for event in read(log.path)] == [PARTS[part]] * 2


def test_the_ratio_is_a_key_of_the_run_and_0_names_nobody() -> None:
    for slow, named in ((0.0, False), (1.5, True), (5.0, True), (5.1, False)):
        told = windows(Stragglers([(0, 1, 2)], slow=slow), [1.0, 5.0, 1.0], [1.0, 5.0, 1.0])
        assert (told[1] is not None) == named
    assert loads("[run]\nstraggler = 0").run.straggler == 0
    with pytest.raises(ConfigError, match=r"\[run\] straggler = 0\.9: must be above 1, or 0"):
        loads("[run]\nstraggler = 0.9")


@pytest.mark.parametrize(
    ("settings", "watched"),
    [
        (("checkpoint.every=2",), True),
        (("run.replicas=1",), True),
        ((), False),  # nothing to go on from
        (("checkpoint.every=2", "run.max_restarts=0"), False),
        (("plan.dp=2", "run.max_restarts=0"), True),
    ],
)
def test_one_rank_is_looked_after_like_many(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...], watched: bool
) -> None:
    begun: list[str] = []
    monkeypatch.setattr(trainer, "supervise", lambda *_, **__: begun.append("supervise"))
    monkeypatch.setattr(trainer, "launch", lambda *_, **__: begun.append("launch"))
    trainer.start(trainer_config(tokens, tmp_path / "run", "run.device=cpu", *settings), as_json=True)
    assert begun == ["supervise" if watched else "launch"]


# --- what a supervisor decides


Attempt = Callable[[Config, Mapping[str, Any]], None]


class Attempts:
    """In place of `launch`: what each attempt comes to, in order; keeps what it was asked for."""

    def __init__(self, *attempts: Attempt) -> None:
        self.attempts = list(attempts)
        self.seen: list[tuple[str, int, bool]] = []

    def __call__(self, function: str, *, processes: int, args: list[Any], **rest: Any) -> None:
        config = loads(args[0])
        self.seen.append((str(config.plan), processes, config.run.resume))
        self.attempts.pop(0)(config, rest)


def done(config: Config, rest: Mapping[str, Any]) -> None:
    """An attempt that ends well."""


def fails(
    rank: int = 1,
    *,
    cause: str = "signal",
    step: int = 2,
    phase: str = "step",
    code: int = RankError.exit_code,
    saves: int | None = None,
    message: str = "rank 1 of 4 was ended",
) -> Attempt:
    """An attempt that ends in a failure of ``rank`` in ``phase`` of ``step``, after a checkpoint of step ``saves``."""

    def attempt(config: Config, rest: Mapping[str, Any]) -> None:
        assert config.run.dir is not None
        if saves is not None:
            (config.run.dir / "checkpoints" / f"step-{saves:08d}").mkdir(parents=True)
        beats = {rank: Beat(count=1, pid=1, step=step, phase=phase, time=0.0, compute=0.0, bounded=True)}
        raise WorkerFailed(
            f"{message}\nAll ranks were ended.",
            trace="",
            exit_code=code,
            rank=rank,
            cause=cause,
            diagnosis="rank 0 waits",
            flights=[{"rank": rank}],
            beats=beats,
        )

    return attempt


def supervised(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *attempts: Attempt, plan: str = "dp = 4", run: str = ""
) -> Attempts:
    """Supervise a run whose attempts are these; what was started."""
    folder.mkdir(exist_ok=True)
    made = Attempts(*attempts)
    monkeypatch.setattr(restart, "launch", made)
    text = f'[plan]\n{plan}\n[train]\nglobal_batch = 12\n[run]\ndir = "{folder}"\nmax_restarts = 2\n{run}'
    try:
        restart.supervise(loads(text), 4, as_json=True)
    finally:
        made.attempts.append(done)
    assert made.attempts == [done], "not all were taken"
    return made


def kinds(folder: Path) -> list[str]:
    return [event.kind for event in read(folder / "events.jsonl")]


def test_a_lost_rank_is_replaced_from_the_last_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = supervised(monkeypatch, tmp_path, fails(saves=4), done)
    assert made.seen == [("dp=4", 4, False), ("dp=4", 4, True)]
    failure, again = read(tmp_path / "events.jsonl")
    assert (failure.kind, failure.fields["rank"], failure.fields["cause"]) == ("failure", 1, "signal")
    assert (failure.fields["step"], failure.fields["phase"]) == (2, "step")
    assert failure.fields["diagnosis"] == "rank 0 waits"
    assert (again.kind, again.fields["from_step"]) == ("restart", 4)
    assert json.loads((tmp_path / "flight/rank-1.json").read_text()) == {"rank": 1}


def test_attempts_without_a_new_checkpoint_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WorkerFailed):
        supervised(monkeypatch, tmp_path, *[fails()] * 3)
    supervised(monkeypatch, tmp_path / "b", *[fails(saves=step, step=step) for step in range(1, 9)], done)


@pytest.mark.parametrize("code", [ConfigError.exit_code, PlanError.exit_code, DivergedError.exit_code, 8])
def test_what_would_come_again_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    with pytest.raises(WorkerFailed):
        supervised(monkeypatch, tmp_path, fails(cause="error", code=code))


def test_the_same_error_twice_at_the_same_place_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = fails(cause="error", message="ValueError: a"), fails(cause="error", message="ValueError: b")
    with pytest.raises(WorkerFailed):
        supervised(monkeypatch, tmp_path, one, one)
    supervised(monkeypatch, tmp_path, one, other, done)
    supervised(monkeypatch, tmp_path / "b", one, fails(cause="error", message="ValueError: a", saves=3), done)


def test_a_checkpoint_that_twice_could_not_be_loaded_is_set_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (2, 4):
        (tmp_path / f"checkpoints/step-{step:08d}").mkdir(parents=True)
    load = fails(phase="load", step=0)
    supervised(monkeypatch, tmp_path, load, load, done, run="resume = true")
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-00000002", "step-00000004.bad"]
    assert kinds(tmp_path) == ["failure", "restart", "failure", "quarantine", "restart"]
    # However many there are: each is tried twice, and then the run starts anew.
    for step in (2, 4, 6):
        (tmp_path / f"b/checkpoints/step-{step:08d}").mkdir(parents=True)
    supervised(monkeypatch, tmp_path / "b", *[load] * 6, done, run="resume = true")
    assert kinds(tmp_path / "b").count("quarantine") == 3


def test_a_step_whose_checkpoint_was_set_aside_may_be_saved_and_set_aside_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (2, 4):
        (tmp_path / f"checkpoints/step-{step:08d}").mkdir(parents=True)
        (tmp_path / f"checkpoints/step-{step:08d}/manifest.json").touch()
    load = fails(phase="load", step=0)
    made = supervised(monkeypatch, tmp_path, load, load, fails(saves=4, step=4), load, load, done, run="resume = true")
    assert len(made.seen) == 6
    names = ["step-00000002", "step-00000004.bad", "step-00000004.bad-2"]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == names
    assert kinds(tmp_path).count("quarantine") == 2


def test_a_signal_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stops(config: Config, rest: Mapping[str, Any]) -> None:
        (tmp_path / "checkpoints/step-00000003").mkdir(parents=True)
        raise StoppedError("stopped by SIGTERM")

    with pytest.raises(StoppedError):
        supervised(monkeypatch, tmp_path, stops)
    assert StoppedError.exit_code == 6
    assert [(event.kind, event.fields["step"]) for event in read(tmp_path / "events.jsonl")] == [("stopped", 3)]
    with pytest.raises(WorkerFailed):  # ended before they could save: no failure of a rank
        supervised(monkeypatch, tmp_path, fails(rank=-1, cause="", code=143))


# --- other ranks, other plans


def test_a_rank_that_dies_at_once_again_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = fails(rank=2, step=0)
    monkeypatch.setattr(elastic, "_best", lambda config, ranks, *, alone: None)
    made = supervised(monkeypatch, tmp_path, at_once, at_once, done)
    assert made.seen == [("dp=4", 4, False), ("dp=4", 4, True), ("dp=3", 3, True)]
    assert "lost" in kinds(tmp_path)
    # Not for errors, which a device is not to blame for; nor for ranks that worked for a while.
    with pytest.raises(WorkerFailed):
        supervised(monkeypatch, tmp_path / "b", *[fails(rank=2, cause="error", step=0)] * 2)
    with pytest.raises(WorkerFailed):
        supervised(monkeypatch, tmp_path / "c", *[fails(rank=2, step=1)] * 3)
    with pytest.raises(WorkerFailed):
        supervised(monkeypatch, tmp_path / "d", *[fails(rank=2, step=1, phase="save")] * 3)


def test_places_that_go_and_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = tmp_path / "slots"
    slots.write_text("0 1 2 3")
    monkeypatch.setenv("PLAIT_SLOTS", str(slots))
    asked: list[Watched] = []

    def changed(places: str) -> Attempt:
        def attempt(config: Config, rest: Mapping[str, Any]) -> None:
            asked.append(rest["watched"])
            assert not asked[-1].recall()
            slots.write_text(places)
            os.utime(slots, ns=(len(asked), len(asked)))
            assert asked[-1].recall()
            raise StoppedError("stopped by SIGUSR1")

        return attempt

    run = 'fallback_plans = ["pp=2 tp=1"]'
    made = supervised(monkeypatch, tmp_path / "run", changed("0 1 3"), changed("0 1 2 3 9"), done, run=run)
    assert made.seen == [("dp=4", 4, False), ("pp=2 dp=1", 2, True), ("dp=4", 4, True)]
    assert [watched.places for watched in asked] == [None, (0, 1)]
    assert kinds(tmp_path / "run") == ["recalled", "plan", "recalled"]


def test_places_that_come_back_while_a_rank_fails_are_told_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = tmp_path / "slots"
    slots.write_text("0 1")
    monkeypatch.setenv("PLAIT_SLOTS", str(slots))

    def back(config: Config, rest: Mapping[str, Any]) -> None:
        slots.write_text("0 1 2 3")
        os.utime(slots, ns=(1, 1))
        fails(rank=0, step=3)(config, rest)

    made = supervised(monkeypatch, tmp_path / "run", back, done, run='fallback_plans = ["pp=2 tp=1"]')
    assert made.seen == [("pp=2 dp=1", 2, False), ("dp=4", 4, True)]
    assert kinds(tmp_path / "run") == ["plan", "failure", "restart", "recalled"]
