"""LD_AUDIT and NEGATIVA_PAGES_*: which auditors glibc loads, and on which machines (glibc 2.35).

``redirect.c`` replaces libraries, see ``processes.redirect``. ``watch.c`` records which pages the
processes touch: of CPU code, or of what a spare brings back. ``pages.page_logs`` reads that.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

from pytest_negativa.errors import NegativaError

# The oldest glibc with which all tests of this module passed (2.35, 2.36, 2.39, 2.41 did; with
# 2.31, dlmopen crashes in a process with any auditor).
OLDEST_GLIBC = (2, 35)
MACHINES = ("x86_64",)

WATCH = Path(__file__).with_name("_watch.so")
"""Records pages. Not there if no compiler built it."""
LOGS_VARIABLE = "NEGATIVA_PAGES_LOGS"
ONLY_GPU_VARIABLE = "NEGATIVA_PAGES_GPU"
ARMED_VARIABLE = "NEGATIVA_PAGES_ARMED"
MISSES_VARIABLE = "NEGATIVA_SPARE_LOG"
AUDIT_VARIABLE = "LD_AUDIT"
TUNABLES_VARIABLE = "GLIBC_TUNABLES"
# With an auditor, glibc lays out thread-local storage before it loads the program's libraries.
# Libraries with initial-exec storage share the space that it leaves free. By default a library
# with 1.5 KB loads and one with 2 KB does not ("cannot allocate memory in static TLS block").
# The space is part of each thread's stack, so more of it would break threads with the smallest
# stacks. See _dl_tls_static_surplus_init of glibc's elf/dl-tls.c.
_TUNABLE = "glibc.rtld.optional_static_tls=4096"


def why_no_auditor(library: Path) -> str | None:
    """Reason for which processes can't load an auditor on this machine; None if they can."""
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (ValueError, OSError):
        # musl has no such value.
        name = version = ""
    if name != "glibc":
        return "it needs glibc's LD_AUDIT, and this Python runs on another C library (musl?)"
    found = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if found < OLDEST_GLIBC:
        oldest = ".".join(map(str, OLDEST_GLIBC))
        return f"glibc {version} is older than {oldest}, the oldest it was tested with"
    if platform.machine() not in MACHINES:
        return f"it was not tested on {platform.machine()}, only on {', '.join(MACHINES)}"
    if not library.is_file():
        return (
            "the native library was not built; install pytest-negativa again where there is "
            "a C compiler"
        )
    if re.search(r"[:$]", str(library)):
        return f"the path of {library} can't stand in LD_AUDIT because of its ':' or '$'"
    return None


def with_auditor(environ: Mapping[str, str], library: Path) -> dict[str, str]:
    """The variables to set so that processes load an auditor, before those of ``environ``.

    Raises:
        NegativaError: this machine can't do it.
    """
    if (reason := why_no_auditor(library)) is not None:
        raise NegativaError(f"processes can't be watched or redirected here: {reason}")
    return {
        AUDIT_VARIABLE: _first(str(library), environ.get(AUDIT_VARIABLE, "")),
        # The last value of a tunable counts, so a user's own stays.
        TUNABLES_VARIABLE: _first(_TUNABLE, environ.get(TUNABLES_VARIABLE, "")),
    }


def why_unwatchable() -> str | None:
    """Reason for which this machine can't trace CPU code; None if it can."""
    return why_no_auditor(WATCH)


def traces_cpu(environ: Mapping[str, str]) -> bool:
    """Whether processes with this environment record what they touch of CPU code."""
    return LOGS_VARIABLE in environ and not environ.get(ONLY_GPU_VARIABLE)


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
        **with_auditor(environ, WATCH),
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
        **with_auditor(environ, WATCH),
        **traced,
        MISSES_VARIABLE: str(logs.absolute()),
    }


def _first(part: str, own: str) -> str:
    """A list whose first part is ``part``, once. glibc warns of an empty part."""
    return ":".join((part, *(other for other in own.split(":") if other not in ("", part))))
