"""`meet`: a part of a store that only the ranks of this start know.

torchrun keeps one store for all its restarts, and what ranks of an earlier start have left there (addresses, claims)
would be taken for that of the ranks that are there now. No number that torchrun gives to its ranks tells all starts
apart. So the ranks agree on a name: each shows a word of its own, rank 0 shows a name with the words it has read, and
whoever finds its own word there answers with the name. Rank 0 is done when all have answered with its name.
"""

from __future__ import annotations

import json
import time
import uuid

from torch.distributed.distributed_c10d import PrefixStore, Store

from plait.core.errors import RankError

_PAUSE = 0.01


def meet(store: Store, rank: int, size: int, timeout: float) -> Store:
    """The part of ``store`` for the ``size`` ranks that call this together; RankError when some do not come."""
    word, others = uuid.uuid4().hex, range(1, size)
    deadline = time.monotonic() + timeout
    if rank:
        store.set(f"plait/word/{rank}", word)
        while True:
            name, seen = json.loads(store.get("plait/name")) if store.check(["plait/name"]) else ("", {})
            if seen.get(str(rank)) == word:
                store.set(f"plait/answer/{rank}", name)
                return PrefixStore(name, store)
            _pause(deadline, f"rank {rank} waits for rank 0 to start, for {timeout:g} s")
    shown: dict[str, str] = {}
    while True:
        words = {str(other): value for other in others if (value := _read(store, f"plait/word/{other}"))}
        if words != shown or not others:
            shown = words
            store.set("plait/name", json.dumps([word, shown]))
        late = [other for other in others if _read(store, f"plait/answer/{other}") != word]
        if not late:
            return PrefixStore(word, store)
        _pause(deadline, f"rank 0 waits for ranks {late} to start, for {timeout:g} s")


def _read(store: Store, key: str) -> str:
    return str(store.get(key).decode()) if store.check([key]) else ""


def _pause(deadline: float, late: str) -> None:
    if time.monotonic() > deadline:
        raise RankError(late)
    time.sleep(_PAUSE)
