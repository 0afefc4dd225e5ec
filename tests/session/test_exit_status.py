"""The exit status of a traced session."""

from __future__ import annotations

import pytest
from pytest import ExitCode

from pytest_negativa.session.exit_status import exit_status


@pytest.mark.parametrize("tests", ExitCode)
def test_a_failure_of_the_session_changes_that_of_passed_tests_alone(tests: ExitCode) -> None:
    assert exit_status(tests, ()) == tests
    expected = ExitCode.TESTS_FAILED if tests == ExitCode.OK else tests
    assert exit_status(tests, ("50% of the GPU code is unused",)) == expected
