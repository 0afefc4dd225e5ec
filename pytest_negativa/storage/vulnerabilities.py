"""Reads the list of vulnerabilities that ``negativa vex`` takes."""

from __future__ import annotations

from pathlib import Path

from pytest_negativa.errors import StoreError
from pytest_negativa.models.vex import VULNERABILITIES_VERSION, Vulnerabilities
from pytest_negativa.storage.urls import read_input
from pytest_negativa.storage.yaml_document import YamlError, parse_document
from pytest_negativa.storage.yaml_records import convert

_MAX_BYTES = 16 << 20
_MAX_ITEMS = 200_000
_EXPECTED = "expected a list of vulnerabilities (see: negativa schema vulnerabilities)"


def load_vulnerabilities(path: Path) -> Vulnerabilities:
    """Read a list of vulnerabilities, in YAML or JSON.

    Raises:
        StoreError: it can't be read, or is no such list.
    """
    data = read_input(path, _MAX_BYTES)
    try:
        root = parse_document(data, _MAX_ITEMS)
        found = convert(root, Vulnerabilities)
    except YamlError as e:
        raise StoreError(f"{path}:{e.place.line}: {e}; {_EXPECTED}") from e
    if found.format_version != VULNERABILITIES_VERSION:
        raise StoreError(
            f"{path}: format_version {found.format_version}, this release reads "
            f"{VULNERABILITIES_VERSION}"
        )
    return found
