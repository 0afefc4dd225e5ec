"""A session's options (which don't matter), variables, and the project's files that it ran."""

from __future__ import annotations

import contextlib
import enum
import hashlib
import importlib.machinery
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from pytest_negativa.installed.sites import is_installed
from pytest_negativa.models.outcomes import Circumstances
from pytest_negativa.storage.records import utf8
from pytest_negativa.storage.system import read_regular

# --lf, --ff, --nf, --sw, --sw-skip, --sw-reset
BY_CACHE = ("lf", "failedfirst", "newfirst", "stepwise", "stepwise_skip", "stepwise_reset")
"""Options that select or order tests by what ran before, by attribute."""

_OURS = "negativa"
_EXTENSIONS = tuple(importlib.machinery.EXTENSION_SUFFIXES)
# How many processes run the tests, and what is shown of them, decide nothing in a test. A round
# switches off those by pytest's cache.
_NO_MATTER = {
    *BY_CACHE,
    *("basetemp", "cacheclear", "capture", "code_highlight", "color", "dist", "distload"),
    *("durations", "durations_min", "fold_skipped", "force_short_summary", "fulltrace"),
    *("junitprefix", "maxprocesses", "maxschedchunk", "no_header", "no_summary", "numprocesses"),
    *("px", "quiet", "reportchars", "rsyncdir", "rsyncignore", "showcapture", "showlocals"),
    *("tbstyle", "testrunuid", "tx", "verbose", "xmlpath"),
}
_PLAIN = (str, int, float, bool, type(None), os.PathLike, enum.Enum)


def circumstances_of(
    config: pytest.Config, variables: Mapping[str, str], files: Collection[str]
) -> Circumstances:
    """The circumstances of the session that this process reports.

    Args:
        config: the session's.
        variables: its environment when it began.
        files: paths below the root folder of the files with tests, and of modules.
    """
    path = Path(sys.argv[0])
    program = path.parent.name if path.name == "__main__.py" else path.name
    digests = {utf8(n): _digest(v.encode(errors="surrogateescape")) for n, v in variables.items()}
    return Circumstances(
        program="pytest" if program == "py.test" else utf8(program),
        options=dict(_options(vars(config.option))),
        variables={name: digests[name][:4] for name in sorted(digests)},
        files=dict(_digests(config, files)),
    )


def modules_below(root: Path) -> list[str]:
    """Paths below a folder of the modules that this process imported, but for installed ones."""
    found = set()
    for module in tuple(sys.modules.values()):
        # Some programs put objects there that import more when they are asked.
        names = getattr(module, "__dict__", None)
        path = names.get("__file__") if isinstance(names, dict) else None
        if isinstance(path, str) and not is_installed(path):
            with contextlib.suppress(ValueError):
                found.add(str(Path(path).relative_to(root)))
    return sorted(found)


def _options(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in sorted(values.items()):
        parts = value if isinstance(value, list | tuple) else [value]
        # The text of other objects may have their address.
        if all(isinstance(part, _PLAIN) for part in parts) and not (
            name.startswith(_OURS) or name in _NO_MATTER
        ):
            yield name, utf8(repr(value))


def _digests(config: pytest.Config, files: Collection[str]) -> Iterator[tuple[str, str]]:
    above = {os.path.dirname(file) for file in files}  # noqa: PTH120 (below the root)
    for folder in tuple(above):
        above.update(str(parent) for parent in Path(folder).parents)
    conftests = {os.path.normpath(os.path.join(folder, "conftest.py")) for folder in above}
    if config.inipath is not None:
        conftests.add(os.path.relpath(config.inipath, config.rootpath))
    for file in sorted({*files, *conftests}):
        # Most folders have no conftest.py.
        with contextlib.suppress(OSError):
            yield utf8(file), _digest(_version(config.rootpath / file))


def _version(path: Path) -> bytes:
    """The content of a source file; an extension module's size and time.

    An extension module may be an original: a proof fails if anyone opens it, and so would we.
    """
    if path.name.endswith(_EXTENSIONS):
        status = path.stat()
        return f"{status.st_size} {status.st_mtime_ns}".encode()
    return read_regular(path)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
