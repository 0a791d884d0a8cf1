"""Which token file a run reads: its own, or one made from text once and kept in the cache folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from plait.core.cache import cache_folder
from plait.core.config import Config
from plait.core.errors import ConfigError


def token_path(config: Config) -> Path:
    """The file, made from text where it is not there yet. ConfigError where there is no folder to keep it in."""
    from plait.train.data import default_tokens, encode_text

    data = config.data
    if data.tokens is not None:
        return data.tokens
    cache = _cache_folder(config)
    if data.text is None:
        return default_tokens(cache)
    path = cache / f"{data.text.stem}-{_fingerprint((data.text, data.tokenizer))}.bin"
    if not path.exists():
        encode_text([data.text], path, data.tokenizer)
    return path


def _cache_folder(config: Config) -> Path:
    """Where tokens made from text are kept: the user's cache, or the run folder where there is none to write in."""
    cache = cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if os.access(cache, os.W_OK):
            return cache
    except OSError:
        pass
    if config.run.dir is None:
        raise ConfigError(f"{cache} cannot be written: set XDG_CACHE_HOME, or run.dir, to a folder for the tokens")
    return config.run.dir


def _fingerprint(sources: Sequence[Path | str]) -> str:
    """Changes when a source file changes: of its path, size and time of modification."""
    import hashlib

    facts = []
    for source in sources:
        if os.path.exists(source):
            state = os.stat(source)
            facts.append(f"{source} {state.st_size} {state.st_mtime_ns}")
        else:
            facts.append(str(source))
    return hashlib.blake2b("\n".join(facts).encode(), digest_size=6).hexdigest()
