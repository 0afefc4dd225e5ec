"""JSON Schema of negativa.yaml."""

from __future__ import annotations

import json
from typing import Any

import jsonschema

from pytest_negativa.settings.options import OPTIONS
from tests.support.config_schema import COMMITTED, config_schema, schema_text


def test_the_committed_schema_is_the_generated_one() -> None:
    run = "run python -m tests.support.config_schema"
    assert COMMITTED.read_text(encoding="utf-8") == schema_text(), run


def test_the_schema_is_one_and_describes_every_option() -> None:
    schema = config_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    for option in OPTIONS:
        if option.in_file:
            at: Any = schema
            for key in option.name.split("."):
                at = at["properties"][key]
            assert at["description"].startswith(option.help)
            if option.default is not None:
                jsonschema.validate(at["default"], {"$defs": schema["$defs"], **at})
    assert json.loads(schema_text()) == schema
