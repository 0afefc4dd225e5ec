"""Has processes to come record which pages of CPU code they touch.

glibc loads ``pages.c`` into every process whose LD_AUDIT names it. ``hostcode.page_logs`` reads
what it records.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pytest_negativa.errors import NegativaError
from pytest_negativa.processes.auditors import why_no_auditor, with_auditor

LOGS_VARIABLE = "NEGATIVA_PAGES_LOGS"
ALLOWED_VARIABLE = "NEGATIVA_PAGES_ALLOWED"


class PageWatchError(NegativaError):
    """CPU code can't be traced."""


def watch_library() -> Path | None:
    """The library for LD_AUDIT; None: it was not built."""
    path = Path(__file__).with_name("_pages.so")
    return path if path.is_file() else None


def why_unwatchable() -> str | None:
    """Why CPU code can't be traced on this machine; None if nothing speaks against it."""
    return why_no_auditor(watch_library())


def watch_environment(
    environ: Mapping[str, str], logs: Path, allowed: Path | None = None
) -> dict[str, str]:
    """The variables to set so that processes record the pages that they touch.

    Args:
        allowed: a file of ``hostcode.page_logs.encode_allowed``: which pages may be touched.

    Raises:
        PageWatchError: this machine can't do it.
    """
    library = watch_library()
    reason = why_no_auditor(library)
    if library is None or reason is not None:
        raise PageWatchError(f"CPU code can't be traced: {reason}")
    added = {**with_auditor(environ, library), LOGS_VARIABLE: str(logs.absolute())}
    if allowed is not None:
        added[ALLOWED_VARIABLE] = str(allowed.absolute())
    return added
