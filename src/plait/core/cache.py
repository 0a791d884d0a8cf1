"""Where plait keeps what it can make again: tokens, and what was measured of this machine."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/plait``, or ``~/.cache/plait``. It need not be there."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "plait"
