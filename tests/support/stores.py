"""Places for tests of URLs."""

from __future__ import annotations

import itertools

from pytest_negativa.storage.urls import Url

_NUMBERS = itertools.count()


def memory_url() -> Url:
    """A URL in this process's memory that no other test has."""
    return Url(f"memory://test-{next(_NUMBERS)}/folder")
