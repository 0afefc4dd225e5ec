"""Settings of which every option has its default."""

from __future__ import annotations

from pytest_negativa.settings.resolve import resolve

DEFAULTS = resolve({}, {}, None, root="/")
