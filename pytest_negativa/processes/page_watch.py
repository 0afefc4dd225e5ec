"""Has processes to come record which pages they touch: of CPU code, or of what a spare brings back.

glibc loads ``pages.c`` into every process whose LD_AUDIT names it. ``hostcode.page_logs`` reads
what it records.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pytest_negativa.processes.auditors import why_no_auditor, with_auditor

LOGS_VARIABLE = "NEGATIVA_PAGES_LOGS"
ONLY_GPU_VARIABLE = "NEGATIVA_PAGES_GPU"
ARMED_VARIABLE = "NEGATIVA_PAGES_ARMED"
MISSES_VARIABLE = "NEGATIVA_SPARE_LOG"


def watch_library() -> Path | None:
    """The library for LD_AUDIT; None: it was not built."""
    path = Path(__file__).with_name("_pages.so")
    return path if path.is_file() else None


def why_unwatchable() -> str | None:
    """Reason for which this machine can't trace CPU code; None if it can."""
    return why_no_auditor(watch_library())


def watch_environment(
    environ: Mapping[str, str],
    logs: Path,
    *,
    only_gpu: bool = False,
    armed: Path | None = None,
) -> dict[str, str]:
    """The variables to set so that processes record the pages that they touch.

    Args:
        only_gpu: record nothing of CPU code.
        armed: a file of ``verifying.tripwire``: of GPU code, record touches of removed code alone.

    Raises:
        NegativaError: this machine can't do it.
    """
    return {
        **with_auditor(environ, watch_library()),
        LOGS_VARIABLE: str(logs.absolute()),
        ONLY_GPU_VARIABLE: "1" if only_gpu else "",
        ARMED_VARIABLE: "" if armed is None else str(armed.absolute()),
    }


def misses_environment(environ: Mapping[str, str], logs: Path) -> dict[str, str]:
    """The variables to set so that processes record what comes back to libraries with a spare.

    Raises:
        NegativaError: this machine can't do it.
    """
    # Those that trace CPU code take precedence.
    traced = {LOGS_VARIABLE: ""} if LOGS_VARIABLE in environ else {}
    return {
        **with_auditor(environ, watch_library()),
        **traced,
        MISSES_VARIABLE: str(logs.absolute()),
    }
