"""Packages that tests can do without."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def require_modules(*names: str, extra: str) -> None:
    """Skip the test if a module is not installed. None is imported: processes of the test do."""
    if missing := [name for name in names if find_spec(name) is None]:
        pytest.skip(f"needs {', '.join(missing)}: pip install -e '.[{extra}]'")
