"""JSON Schema of ``negativa.yaml``, for editors.

``python -m tests.support.config_schema`` writes it to the package. Editors, and
``negativa schema``, read it from there.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from typing import Any, get_origin

from pytest_negativa.models.settings import Limits, Report, ReportFormat
from pytest_negativa.settings.options import (
    FILE_OPTIONS,
    REPORT_FILES,
    SECTIONS,
    Option,
)
from pytest_negativa.settings.values import type_of
from tests.support.libraries import ROOT

COMMITTED = ROOT / "pytest_negativa" / "storage" / "schemas" / "negativa.schema.json"


def config_schema() -> dict[str, Any]:
    """The schema, made from the table of options."""
    properties: dict[str, Any] = {}
    for name, option in FILE_OPTIONS.items():
        section, dot, key = name.rpartition(".")
        if not dot:
            properties[key] = _value(option)
        else:
            found = properties.setdefault(section, _mapping(SECTIONS[section], {}))
            found["properties"][key] = _value(option)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "negativa.yaml",
        "$defs": {**_FORMS, **_LISTS},
        **_mapping("The configuration of pytest-negativa.", properties),
    }


def _mapping(description: str, properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "description": description,
        # YAML reads a section that has comments alone as null.
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": properties,
    }


def _value(option: Option) -> dict[str, Any]:
    description = " ".join(filter(None, (option.help, option.detail)))
    given = option.default
    default = {} if given is None else {"default": [*given] if type(given) is tuple else given}
    return {"description": description, **_form(option), **default}


_FORMS: Mapping[str, dict[str, Any]] = {
    "text": {"type": "string", "pattern": r"\S"},
    "switch": {
        "enum": [True, False, 1, 0, "true", "True", "TRUE", "false", "False", "FALSE", "1", "0"]
    },
    "number": {"type": ["integer", "string"], "minimum": 0},
    "figure": {"type": ["number", "string"]},
    "report": {
        "anyOf": [
            {"enum": [kind.value for kind in ReportFormat]},
            {"type": "string", "pattern": rf"^\s*({'|'.join(REPORT_FILES)}):.*\S"},
        ]
    },
}
"""Forms of several options; the file's reader knows more of texts."""


def _list_of(item: dict[str, Any]) -> dict[str, Any]:
    """A list, or one item of it alone."""
    return {"anyOf": [item, {"type": "array", "items": item}]}


def _shared(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}


_LISTS = {f"{name}s": _list_of(_shared(name)) for name in ("text", "figure", "report")}
_NAMES = {bool: "switch", str: "text", dict: "text", Report: "report", Limits: "figure"}


def _form(option: Option) -> dict[str, Any]:
    """Schema of an option's value."""
    wanted = type_of(option.name)
    if isinstance(wanted, type) and issubclass(wanted, enum.Enum):
        words = {"enum": [word.value for word in wanted]}
        return _list_of(words) if option.is_repeated else words
    # YAML reads 9.0 as a number.
    is_arch = option.name == "keep.archs"
    name = "figure" if is_arch else _NAMES.get(get_origin(wanted) or wanted, "number")
    return _shared(f"{name}s" if option.is_repeated else name)


def schema_text() -> str:
    """The schema as the file has it."""
    return json.dumps(config_schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    COMMITTED.write_text(schema_text(), "utf-8")
