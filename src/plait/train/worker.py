"""How a rank runs its function and ends, and the start of one that `plait.train.launch` started."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import importlib.util
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from plait.core.errors import ConfigError, PlaitError, RankError

BROKEN_PIPE = 128 + signal.SIGPIPE
"""Exit code of a rank whose output nobody reads any more (``plait train | head``)."""
_PR_SET_PDEATHSIG = 1


def call(address: str, worker: object, args: Sequence[object]) -> None:
    """Run ``module:name`` or ``file.py:name`` with ``worker`` and ``args``."""
    resolve(address)(worker, *args)


def resolve(address: str) -> Callable[..., object]:
    """The function at ``module:name`` or ``file.py:name``; ConfigError where there is none."""
    home, _, name = address.rpartition(":")
    try:
        if home.endswith(".py"):
            module = sys.modules.get("__main__")
            if module is None or os.path.abspath(getattr(module, "__file__", None) or "") != home:
                spec = importlib.util.spec_from_file_location(Path(home).stem, home)
                if spec is None or spec.loader is None:
                    raise ImportError(f"{home} cannot be loaded")
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
        else:
            module = importlib.import_module(home)
        function: Callable[..., object] = getattr(module, name)
        return function
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"launch: no function {address!r}: {error}") from error


def write_error(error: BaseException) -> int:
    """Leave ``error`` where the launcher looks for it, in torch elastic's form; returns the exit code."""
    code = error.exit_code if isinstance(error, PlaitError) else RankError.exit_code
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        trace = "".join(traceback.format_exception(error))
        summary = "".join(traceback.format_exception_only(error)).strip()
        if isinstance(error, PlaitError):
            summary = str(error)
        now = time.time()
        message = {"message": summary, "extraInfo": {"py_callstack": trace, "timestamp": str(int(now))}}
        report = {"summary": summary, "trace": trace, "exit_code": code, "time": now}
        Path(file).write_text(json.dumps({"message": message, "plait": report}), encoding="utf-8")
    return code


def run(address: str, worker: object, args: Sequence[object]) -> tuple[int, Exception | None]:
    """`call`, and what this process has to end with: an exit code, and the error that is to be told."""
    try:
        call(address, worker, args)
        sys.stdout.flush()
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        return (stop.code if isinstance(stop.code, int) else int(stop.code is not None)) & 0xFF, None
    except BrokenPipeError as error:
        if not _reader_left():
            return write_error(error), error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE, None
    except Exception as error:
        return write_error(error), error
    return 0, None


def _reader_left() -> bool:
    """Whether nobody reads standard output any more: then, and not for another pipe, a rank ends without a word."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # asks for nothing: errors are told in any case
    return bool(poll.poll(0))


def _end_with(parent: int) -> None:
    """Let the kernel end this process when the launcher dies, whatever becomes of it (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def start(path: str) -> NoReturn:
    """Run the job in the file at ``path`` as one local rank, and end this process."""
    # A signal ends a rank at once and without a word, also inside torch: the launcher has the message to give.
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # the launcher heeds none either: a script's background job
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    job: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    _end_with(job["parent"])
    # Before torch is imported, which reads them then.
    os.environ["OMP_NUM_THREADS"] = str(job["threads"])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from plait.train.launch import Worker, placed

    place = placed()
    assert place is not None, "the launcher sets RANK and WORLD_SIZE"
    worker = Worker(place=place, device=job["device"], timeout=job["timeout"], watch=Path(job["watch"]))
    if job["memory"] is not None:
        worker = dataclasses.replace(worker, memory=Path(job["memory"]))
    code, _ = run(job["function"], worker, job["args"])
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of a process group that is no longer whole would keep the interpreter from ending.
    os._exit(code)
