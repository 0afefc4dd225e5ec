"""The hooks that this plugin calls: a conftest.py or another plugin implements them.

They are registered with pytest's own hooks. An implementation is a function of that name, with
only the arguments that it needs. The process that reports calls them (with pytest-xdist: the
controller), except for the detector's hook.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    import pytest

    from pytest_negativa.models.library import Element, LibraryMap
    from pytest_negativa.models.report import RunReport
    from pytest_negativa.models.settings import Settings
    from pytest_negativa.models.trace import Header, Usage
    from pytest_negativa.tracing.detector import Detector

hookspec = pluggy.HookspecMarker("pytest")


@hookspec(firstresult=True)
def pytest_negativa_register_detector(
    settings: Settings, path: Path, header: Header
) -> Detector | None:
    """Trace with a detector of your own instead of CUPTI.

    Every process that runs tests calls it before conftest.py files are imported, so that the
    detector sees what they import. Implement it in an installed plugin or in one given with
    ``-p``. The first detector that an implementation returns is taken.

    Args:
        settings: all options in force.
        path: the trace file to write.
        header: its first line; replace ``detector`` by the name of yours.

    Returns:
        A detector that was not started, or None to leave it to others.
    """


@hookspec
def pytest_negativa_libraries(
    config: pytest.Config, settings: Settings, usage: Usage
) -> Iterable[str] | None:
    """Add libraries to the report that no traced process had loaded.

    Args:
        config: pytest's configuration.
        settings: all options in force; ``libraries`` selects from your libraries too.
        usage: the merged trace.

    Returns:
        Paths of libraries, or None.
    """


@hookspec(firstresult=True)
def pytest_negativa_keep_element(
    settings: Settings, library: LibraryMap, element: Element
) -> str | None:
    """Keep an element that the plan would call unused, as a whole or in part.

    The plan asks only about elements that nothing else keeps. At granularity ``kernel`` it also
    asks about elements that would lose some of their kernels. No hook can give up code that a
    test uses.

    Args:
        settings: all options in force.
        library: the map of the library; ``library.kernels_of(element.content)`` returns the
            kernels that could be read.
        element: an entry of a region, or a bare frame.

    Returns:
        The reason to keep it, which the report shows, or None.
    """


@hookspec
def pytest_negativa_report(
    config: pytest.Config, settings: Settings, report: RunReport
) -> str | None:
    """Add a report: return lines for the terminal, or write a file.

    Args:
        config: pytest's configuration.
        settings: all options in force.
        report: the rows that all reports are made from.

    Returns:
        Lines for the terminal, shown below the tables, or None.
    """
