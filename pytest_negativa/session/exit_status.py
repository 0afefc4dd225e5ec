"""The exit status of a traced pytest session.

The status of a proof is ``verifying.verification.exit_code``, that of a measurement
``measuring.session.measure_session``; their supervisor ends with it (``session.request.fulfil``).
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest


def exit_status(tests: int, failures: Sequence[str]) -> int:
    """The status that the pytest process ends with; pytest's session keeps that of its tests.

    Args:
        tests: pytest's own status.
        failures: why the session fails, whatever its tests did: crossed thresholds, no report, or
            no trace although one is required.
    """
    if tests == pytest.ExitCode.OK and failures:
        return pytest.ExitCode.TESTS_FAILED
    return tests
