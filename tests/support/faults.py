"""Planted faults: ways to get a wrong verdict or to lose a file, and what the product says.

A test carries ``@pytest.mark.planted_fault(what, says=words)`` and takes the fixture ``fault``.
The page docs/reference/planted-faults.md is generated from these markers.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest


class PlantedFault:
    """The fault that a test plants.

    Attributes:
        says: the words by which the product reports the fault.
    """

    def __init__(self, says: str) -> None:
        self.says = says
        self.checked = False

    def check(self, output: str) -> None:
        """Assert that the product's output reports the fault."""
        self.checked = True
        assert self.says in " ".join(output.split())


@pytest.fixture
def fault(request: pytest.FixtureRequest) -> PlantedFault:
    """The planted fault of the test's marker."""
    marker = request.node.get_closest_marker("planted_fault")
    assert marker is not None, "the test lacks the marker planted_fault"
    (_what,) = marker.args
    return PlantedFault(**marker.kwargs)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test that carries the marker and never compared what the product says."""
    result = yield
    if item.get_closest_marker("planted_fault") is not None:
        planted = getattr(item, "funcargs", {}).get("fault")
        assert planted is not None and planted.checked, "the test never called fault.check()"
    return result
