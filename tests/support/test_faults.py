"""The marker ``planted_fault`` and its fixture."""

from __future__ import annotations

import pytest


def test_a_test_that_checks_no_words_fails(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        pytest_plugins = ["tests.support.faults"]

        @pytest.mark.planted_fault("a disk is full", says="no space left")
        class Tests:
            def test_checked(self, fault):
                fault.check("there is no space\\n left")

            def test_wrong_words(self, fault):
                fault.check("all is well")

            def test_unchecked(self, fault):
                pass

            def test_without_fixture(self):
                pass

            def test_skipped(self, fault):
                pytest.skip("no disk")
        """
    )
    pytester.makeini("[pytest]\nmarkers = planted_fault")
    pytester.runpytest("-p", "no:negativa").assert_outcomes(passed=1, failed=3, skipped=1)
