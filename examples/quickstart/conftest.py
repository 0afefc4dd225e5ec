"""Skips the tests that need a GPU if there is none."""

from __future__ import annotations

import pytest
import quickstart


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    try:
        quickstart.device_name()
    except quickstart.QuickstartError as e:
        skip = pytest.mark.skip(reason=f"no GPU: {e}")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
