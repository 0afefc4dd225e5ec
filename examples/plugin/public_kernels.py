"""A pytest plugin on top of pytest-negativa: the kernels that a library promises to others.

A file lists them, one glob on their qualified names per line. The plugin keeps every element that
holds one of them, and reports which of them no test uses. It imports only pytest-negativa's public
records.
"""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path
from typing import TYPE_CHECKING

import cxxfilt
import pytest

if TYPE_CHECKING:
    from pytest_negativa.models.library import Element, LibraryMap
    from pytest_negativa.models.report import RunReport
    from pytest_negativa.models.trace import Usage


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("public-kernels")
    group.addoption("--public-kernels", metavar="FILE", help="Globs on kernels, one a line.")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--public-kernels")
    # Without --negativa the hooks are never called.
    if file is not None and config.pluginmanager.has_plugin("negativa-reporter"):
        config.pluginmanager.register(PublicKernels(read_globs(file)), "public-kernels")


def read_globs(file: str) -> tuple[str, ...]:
    """The lines of ``file`` without comments."""
    try:
        text = Path(file).read_text("utf-8")
    except OSError as e:
        raise pytest.UsageError(f"--public-kernels: {file}: {e.strerror}") from e
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return tuple(line for line in lines if line)


def qualified_name(mangled: str) -> str:
    """``ns::multiply<16>`` for ``void ns::multiply<16>(float const*, int)``."""
    return re.sub(r"^void ", "", cxxfilt.demangle(mangled)).partition("(")[0]


class PublicKernels:
    """Implements three of the hooks of pytest-negativa."""

    def __init__(self, globs: tuple[str, ...]) -> None:
        self._globs = globs
        self._used: set[str] = set()

    def is_public(self, mangled: str) -> bool:
        name = qualified_name(mangled)
        return any(fnmatch.fnmatchcase(name, glob) for glob in self._globs)

    def pytest_negativa_libraries(self, usage: Usage) -> None:
        """Adds no library: this is the hook that sees what was traced."""
        self._used = {name for image in usage.iter_images() for name in image.kernels}

    def pytest_negativa_keep_element(self, library: LibraryMap, element: Element) -> str | None:
        for kernel in library.kernels_of(element.content):
            if self.is_public(kernel.name):
                return f"{qualified_name(kernel.name)} is public"
        return None

    def pytest_negativa_report(self, report: RunReport) -> str:
        public = {
            kernel
            for path in (Path(report.directory) / "plan").glob("*.json")
            for kernel in kernels_in(path)
            if self.is_public(kernel)
        }
        untested = sorted(qualified_name(kernel) for kernel in public - self._used)
        lines = [f"Public kernels: {len(public) - len(untested)} of {len(public)} are tested."]
        lines += [f"  not tested: {name}" for name in untested]
        return "\n".join(lines)


def kernels_in(path: Path) -> set[str]:
    """The kernels of a library that a device of the run could load, from its plan."""
    # Not at the top: every session imports this module, and few need it.
    import msgspec

    from pytest_negativa.models.plan import LibraryPlan

    plan = msgspec.json.decode(path.read_bytes(), type=LibraryPlan)
    return {*(kernel.name for kernel in plan.used_kernels), *plan.unused_kernels}
