"""The shipped schemas are those of the models, and real output fits them."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner

from pytest_negativa.cli.main import main
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.models.library import Scope
from pytest_negativa.storage.maps import save_map
from pytest_negativa.storage.records import (
    inspection_schema,
    listing_schemas,
    lock_schema,
    map_schema,
    report_schema,
    schema_names,
    schema_text,
    shipped_schema,
    verdict_schema,
    vulnerabilities_schema,
)
from tests.support.libraries import MULTIARCH, SHARED_OBJECTS


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        ("library-map", map_schema()),
        ("inspection", inspection_schema()),
        ("verdict", verdict_schema()),
        ("lock", lock_schema()),
        ("report", report_schema()),
        ("vulnerabilities", vulnerabilities_schema()),
        *listing_schemas().items(),
    ],
)
def test_shipped_is_generated(name: str, schema: dict[str, object]) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)
    assert shipped_schema(name) == schema_text(schema), (
        "run: python -m pytest_negativa.storage.records"
    )


@pytest.mark.parametrize("library", SHARED_OBJECTS, ids=lambda path: path.stem)
def test_map_files_fit(library: Path, tmp_path: Path) -> None:
    save_map(read_library(library, Scope()), tmp_path / "map.json")
    document = json.loads((tmp_path / "map.json").read_bytes())
    jsonschema.validate(document, json.loads(shipped_schema("library-map")))


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
    jsonschema.validate(document, json.loads(shipped_schema("inspection")))
    assert len(document["libraries"]) == len(SHARED_OBJECTS)
    assert len(document["errors"]) == 1


def test_schema_rejects_other_documents() -> None:
    schema = json.loads(shipped_schema("inspection"))
    for document in ({}, {"format_version": 1, "libraries": [{}], "errors": []}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(document, schema)


def test_command_prints_them() -> None:
    listed = CliRunner().invoke(main, ["schema"])
    assert listed.stdout.split() == list(schema_names())
    assert {"inspection", "library-map", "verdict"} <= set(schema_names())
    shown = CliRunner().invoke(main, ["schema", "inspection"])
    assert shown.stdout == shipped_schema("inspection")
    wrong = CliRunner().invoke(main, ["schema", "../nothing"])
    assert wrong.exit_code == 2
    assert "is none of" in wrong.stderr
