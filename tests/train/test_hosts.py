"""Two hosts under torchrun: one is cut off in the middle of a step (they are made of network namespaces), or dies with
all its memory and is replaced (they are two agents, with a folder of memory files each). The run loses that step alone.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from plait.core.config import dump
from plait.telemetry.record import read_metrics
from plait.train.events_log import EVENTS, read
from plait.train.replicas import MEMORY
from tests.pool import Pool
from tests.train import jobs
from tests.train.test_launch import ENV
from tests.train.test_trainer import config, same_run, settings, tokens

__all__ = ["tokens"]

RUN = (
    "train.steps=8",
    "train.eval_every=0",
    "checkpoint.every=4",
    "checkpoint.asynchronous=false",
    "run.replicas=1",
    "run.device=cpu",
    "plan.tp=1",
    "plan.pp=1",
    "plan.dp=2",
    "plan.zero=1",  # each rank has masters and moments that the other has not
)
ADDRESSES = ("10.213.77.1", "10.213.77.2")
SCRIPT = """\
import os, subprocess, sys
from plait.comm.group import Group
from plait.core.config import load
from plait.train import trainer
from plait.train.heartbeat import Heartbeat

beat, under_way, armed = Heartbeat.beat, Group._under_way, []

def beat_and_arm(self, step, phase, **rest):
    beat(self, step, phase, **rest)
    if os.environ.get("CUT") and (step, phase) == (5, "step"):
        armed.append(True)

def stumble(self, *arguments):
    while armed:
        armed.pop()
        subprocess.run(["ip", "link", "set", "wire", "down"], check=True)
    return under_way(self, *arguments)

Heartbeat.beat, Group._under_way = beat_and_arm, stumble
trainer.start(load(None, sys.argv[1:]), as_json=True)
"""


@pytest.fixture(scope="module")
def calm(pool: Pool, tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing befalls."""
    folder = tmp_path_factory.mktemp("calm") / "run"
    pool.run(2, jobs.train_in_pool, dump(config(tokens, folder, *RUN)), 2)
    return folder


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """The names of two namespaces with a wire between them."""
    names = [f"plait-{os.getpid()}-{which}" for which in "ab"]
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("no ip and unshare commands: hosts cannot be made of network namespaces")
    try:
        for name in names:
            ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
    try:
        first, second = names
        ip("-n", first, "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", second)
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "wire")
            ip("-n", name, "link", "set", "wire", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def agent(host: str, number: int, script: Path, arguments: list[str]) -> subprocess.Popen[str]:
    """torchrun on one host, for one rank there, under a host name of its own."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=2"]
    torchrun += ["--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESSES[0]}:29411", "--rdzv-id=plait"]
    torchrun += ["--rdzv-conf=last_call_timeout=2,join_timeout=90,keep_alive_interval=1,keep_alive_max_attempt=3"]
    torchrun += [f"--local-addr={ADDRESSES[number]}", str(script), *arguments]
    # A host has a name (here one that resolves without a name server) and a start of its own: ranks with the same
    # boot_id would talk through memory.
    boot = script.with_name(f"boot-{number}")
    boot.write_text(f"host {number}\n")
    own = f'hostname {ADDRESSES[number]} && mount --bind {boot} /proc/sys/kernel/random/boot_id && exec "$@"'
    named = ["unshare", "--uts", "--mount", "sh", "-c", own, "sh"]
    env = {**ENV, "GLOO_SOCKET_IFNAME": "wire", "OMP_NUM_THREADS": "1", **({"CUT": "1"} if number else {})}
    command = ["ip", "netns", "exec", host, *named, *torchrun]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=pipe, text=True, start_new_session=True)


def test_one_host_is_cut_off_in_a_step_and_the_other_goes_on(
    calm: Path, tokens: Path, tmp_path: Path, hosts: list[str]
) -> None:
    """Its rank is told of nothing: it waits for ``run.timeout``; then torchrun starts it again, alone."""
    script, folder = tmp_path / "rank.py", tmp_path / "run"
    script.write_text(SCRIPT)
    arguments = settings(tokens, folder, *RUN, "run.timeout=4")
    agents = [agent(host, number, script, arguments) for number, host in enumerate(hosts)]
    try:
        _, errors = agents[0].communicate(timeout=200)
    finally:
        for one in agents:  # the one that is cut off would wait for minutes
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGKILL)
        _, cut_off = agents[1].communicate()
        for left in MEMORY.glob(f"plait-memory-{agents[1].pid}-*"):  # of an agent that died: the next run's to remove
            shutil.rmtree(left)
    assert agents[0].returncode == 0, f"{errors}\n--- the other host:\n{cut_off}"
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == list(range(8))
    (resume,) = [event.fields for event in read(folder / EVENTS) if event.kind == "resume"]
    assert (resume["step"], resume["source"]) == (5, "memory")  # half of it was in the memory of the other host
    assert "dp=1" in resume["plan"]
    same_run(folder, calm)


DIES = """\
import os, shutil, signal, sys
from pathlib import Path
from plait.core.config import load
from plait.train import trainer
from plait.train.heartbeat import Heartbeat
from plait.train.replicas import launched_folder

beat = Heartbeat.beat
config = load(None, sys.argv[1:])

def beat_and_die(self, step, phase, **rest):
    beat(self, step, phase, **rest)
    if os.environ.get("DIES") and (step, phase) == (6, "step"):
        os.kill(os.getppid(), signal.SIGKILL)
        shutil.rmtree(launched_folder(config.run.dir))
        os.kill(os.getpid(), signal.SIGKILL)

Heartbeat.beat = beat_and_die
trainer.start(config, as_json=True)
"""


def test_a_host_dies_and_another_takes_its_place(calm: Path, tokens: Path, tmp_path: Path) -> None:
    """The new one has nothing in its memory; its rank's masters and moments come from the other's."""
    script, folder = tmp_path / "rank.py", tmp_path / "run"
    script.write_text(DIES)
    arguments = settings(tokens, folder, *RUN, "run.timeout=60", "run.resume=true")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]

    def start(number: int, **more: str) -> subprocess.Popen[str]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        torchrun += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=plait", "--max-restarts=3"]
        torchrun += [f"--rdzv-conf=is_host={int(not number)},keep_alive_interval=1,keep_alive_max_attempt=3"]
        torchrun += ["--monitor-interval=0.1", "--local-addr=127.0.0.1", str(script), *arguments]
        # Without the second, torch's agents look for each other at the store of the first round, and a new one in vain.
        env = {**ENV, "GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        return subprocess.Popen(torchrun, env=env | more, stdout=subprocess.DEVNULL, stderr=pipe, text=True)

    agents = [start(0), start(1, DIES="1")]
    try:
        _, died = agents[1].communicate(timeout=120)
        agents.append(start(1))
        errors = [one.communicate(timeout=120)[1] for one in (agents[0], agents[2])]
    finally:
        for one in agents:
            one.terminate()
            one.wait(30)
    assert [one.returncode for one in agents] == [0, -signal.SIGKILL, 0], "\n---\n".join([*errors, died])
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == list(range(8))
    (resume,) = [event.fields for event in read(folder / EVENTS) if event.kind == "resume"]
    assert (resume["step"], resume["source"]) == (6, "memory")
    same_run(folder, calm, loss=0.0, weights=0.0)
    owners = {int(name.split("-")[2]) for name in os.listdir(MEMORY) if name.startswith("plait-memory-")}
    assert not owners & {one.pid for one in agents}
