"""JSON Schema of ``negativa.yaml``, for editors.

``storage/schemas/negativa.schema.json`` is what ``python -m pytest_negativa.settings.schema``
prints; a test compares the two.
"""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Mapping
from typing import Any, get_args, get_origin

from pytest_negativa.models.settings import GrowthLimits, Limits
from pytest_negativa.settings.options import (
    FILE_OPTIONS,
    REPORT_FILES,
    REPORT_FORMATS,
    SECTIONS,
    Option,
)
from pytest_negativa.settings.values import SWITCH_WORDS, type_of


def config_schema() -> dict[str, Any]:
    """The schema, made from the table of options."""
    properties: dict[str, Any] = {}
    for name, option in FILE_OPTIONS.items():
        section, dot, key = name.rpartition(".")
        if not dot:
            properties[key] = _value(option)
        elif section not in properties:
            properties[section] = _mapping(SECTIONS[section], {key: _value(option)})
        else:
            properties[section]["properties"][key] = _value(option)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "negativa.yaml",
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
    default = {} if option.default is None else {"default": _plain(option.default)}
    return {"description": description, **_form(option.name, type_of(option.name)), **default}


def _plain(default: Any) -> Any:
    return list(default) if isinstance(default, tuple) else default


_TEXT = {"type": "string", "pattern": r"\S"}
_WRITTEN: Mapping[str, dict[str, Any]] = {
    "keep.archs": {"type": "array", "items": {"type": ["string", "number"]}},
    "paths": {"type": "object", "additionalProperties": _TEXT},
    "reports.formats": {
        "anyOf": [
            {
                "type": "array",
                "items": {
                    "anyOf": [
                        {"enum": list(REPORT_FORMATS)},
                        {"type": "string", "pattern": rf"^\s*({'|'.join(REPORT_FILES)}):.*\S"},
                    ]
                },
            },
            {
                "type": "object",
                "propertyNames": {"enum": list(REPORT_FORMATS)},
                "additionalProperties": {"anyOf": [_TEXT, {"enum": [True, None]}]},
            },
        ]
    },
}
"""Options whose form in the file is not that of their record's field."""


def _form(name: str, wanted: Any) -> dict[str, Any]:
    """What an editor should accept; the file's reader knows more of texts."""
    if name in _WRITTEN:
        return _WRITTEN[name]
    if get_origin(wanted) is tuple:
        return {"type": "array", "items": _form("", get_args(wanted)[0])}
    if isinstance(wanted, type) and issubclass(wanted, enum.Enum):
        return {"enum": [word.value for word in wanted]}
    if wanted is bool:
        return {"enum": [True, False, 1, 0, *_TRUE_AND_FALSE, *SWITCH_WORDS]}
    if wanted is str:
        return _TEXT
    if wanted in (Limits, GrowthLimits):
        return {"type": ["number", "string", "array", "object"]}
    return {"type": ["integer", "string"], "minimum": 0}


_TRUE_AND_FALSE = ("true", "True", "TRUE", "false", "False", "FALSE", "1", "0")


def schema_text() -> str:
    """The schema as the file has it."""
    return json.dumps(config_schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(schema_text())
