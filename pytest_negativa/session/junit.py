"""The report ``junit``: properties of the test suite in the XML file that pytest itself writes."""

from __future__ import annotations

import pytest
from _pytest.junitxml import xml_key

from pytest_negativa.models.report import RunReport
from pytest_negativa.reporting.properties import iter_properties


def add_properties(config: pytest.Config, report: RunReport) -> bool:
    """Add the figures of a report to the session's XML file, which pytest has written.

    Returns:
        False if the session writes none (``--junitxml``).
    """
    xml = config.stash.get(xml_key, None)
    if xml is None:
        return False
    for name, value in iter_properties(report):
        xml.add_global_property(name, value)
    # All hooks of the session's end have run, so pytest writes the same results once more.
    xml.pytest_sessionfinish()
    return True
