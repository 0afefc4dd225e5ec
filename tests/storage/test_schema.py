"""Schemas are made from the models, and real output fits them."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner

from pytest_negativa.cli.main import main
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.models.library import Scope
from pytest_negativa.storage.records import write_record
from pytest_negativa.storage.schema import SCHEMA_NAMES, schema_text
from tests.support.libraries import MULTIARCH, SHARED_OBJECTS


@pytest.mark.parametrize("name", SCHEMA_NAMES)
def test_each_is_a_schema_with_a_title(name: str) -> None:
    schema = json.loads(schema_text(name))
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["title"]


def test_only_the_configuration_has_a_file() -> None:
    """Editors read it from the package; all others are made from the records."""
    files = (resources.files("pytest_negativa.storage") / "schemas").iterdir()
    assert [file.name for file in files] == ["negativa.schema.json"]


def test_map_files_fit(tmp_path: Path) -> None:
    schema = jsonschema.Draft202012Validator(json.loads(schema_text("library-map")))
    for library in SHARED_OBJECTS:
        write_record(tmp_path / "map.json", read_library(library, Scope()))
        schema.validate(json.loads((tmp_path / "map.json").read_bytes()))


@pytest.mark.parametrize(
    "options", [[], ["--elements"], ["--kernels"], ["--headers-only"], ["--arch=9.0"]]
)
def test_output_fits(options: list[str], tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(MULTIARCH.read_bytes()[:2000])
    arguments = ["inspect", "--json", *options, *map(str, SHARED_OBJECTS), str(broken)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    jsonschema.validate(document, json.loads(schema_text("inspection")))
    assert len(document["libraries"]) == len(SHARED_OBJECTS)
    assert len(document["errors"]) == 1


def test_command_prints_them() -> None:
    listed = CliRunner().invoke(main, ["schema"])
    assert listed.stdout.split() == list(SCHEMA_NAMES)
    assert {"inspection", "library-map", "verdict"} <= set(SCHEMA_NAMES)
    shown = CliRunner().invoke(main, ["schema", "inspection"])
    assert shown.stdout == schema_text("inspection")
    wrong = CliRunner().invoke(main, ["schema", "../nothing"])
    assert wrong.exit_code == 2
    assert "is none of" in wrong.stderr
