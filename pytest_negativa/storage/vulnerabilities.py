"""Reads the list of vulnerabilities that ``negativa vex`` takes."""

from __future__ import annotations

from pathlib import Path

from pytest_negativa.models.vex import VULNERABILITIES_VERSION, Vulnerabilities
from pytest_negativa.storage.urls import read_input
from pytest_negativa.storage.yaml_records import decode_yaml

_MAX_BYTES = 16 << 20
_MAX_ITEMS = 200_000


def load_vulnerabilities(path: Path) -> Vulnerabilities:
    """Read a list of vulnerabilities, in YAML or JSON.

    Raises:
        StoreError: it can't be read, or is no such list.
    """
    found, _ = decode_yaml(
        read_input(path, _MAX_BYTES),
        Vulnerabilities,
        VULNERABILITIES_VERSION,
        origin=path,
        max_items=_MAX_ITEMS,
        what="a list of vulnerabilities",
        remedy="negativa schema vulnerabilities describes one",
    )
    return found
