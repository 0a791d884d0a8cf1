"""The boundaries of a commit, by name: whoever tests one is told of each as it is passed."""

from __future__ import annotations

from collections.abc import Callable

Probe = Callable[[str], None]
SAVING = "plait-save"
"""Name of the thread that saves."""
EVERYWHERE = (
    "begin.enter",
    "begin.agree",
    "begin.agreed",
    "write.enter",
    "file.opened",
    "file.half",
    "file.written",
    "file.synced",
    "write.done",
    "write.agree",
    "write.agreed",
    "end.enter",
    "end.agree",
    "end.agreed",
    "tidy.enter",
)
"""The boundaries that every rank passes in a commit, in order."""
COMMITTER = (
    "begin.cleaned",
    "begin.folder",
    "manifest.encoded",
    "manifest.opened",
    "manifest.written",
    "manifest.synced",
    "commit.checked",
    "commit.synced",
    "commit.renamed",
    "commit.durable",
    "latest.written",
    "latest.replaced",
    "latest.durable",
    "prune.renamed",
    "prune.removed",
    "prune.end",
)
"""The boundaries that rank 0 alone passes, or the first rank of each host (``prune.renamed`` and ``.removed`` for each
checkpoint that goes)."""
