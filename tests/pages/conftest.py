"""Fixtures of the tests that use a library whose pages come back."""

from __future__ import annotations

import pytest

from pytest_negativa.rewriting.compact.records import Cut
from tests.support.cutting import Kit, build_kit


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    """The library, and programs that use it."""
    return build_kit(tmp_path_factory.mktemp("kit"))


@pytest.fixture(scope="module")
def cut(kit: Kit, tmp_path_factory: pytest.TempPathFactory) -> Cut:
    """The library without its pages, and its spare."""
    return kit.cut(tmp_path_factory.mktemp("cut"))
