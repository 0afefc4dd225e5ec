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

from pytest_negativa.models.settings import Limits
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
        "$defs": _FORMS,
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


def _one_or_more(item: Mapping[str, Any]) -> dict[str, Any]:
    """A list, or one item of it alone."""
    return {"anyOf": [item, {"type": "array", "items": item}]}


def _shared(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}


_TRUE_AND_FALSE = ("true", "True", "TRUE", "false", "False", "FALSE", "1", "0")
_FORMS: Mapping[str, dict[str, Any]] = {
    "text": {"type": "string", "pattern": r"\S"},
    "texts": _one_or_more(_shared("text")),
    "switch": {"enum": [True, False, 1, 0, *_TRUE_AND_FALSE, *SWITCH_WORDS]},
    "number": {"type": ["integer", "string"], "minimum": 0},
    "limits": {"type": ["number", "string", "array", "object"]},
    "format": {
        "anyOf": [
            {"enum": list(REPORT_FORMATS)},
            {"type": "string", "pattern": rf"^\s*({'|'.join(REPORT_FILES)}):.*\S"},
        ]
    },
}
"""Forms of several options; the file's reader knows more of texts."""

_WRITTEN: Mapping[str, dict[str, Any]] = {
    "keep.archs": _one_or_more({"type": ["string", "number"]}),
    "paths": {"type": ["string", "array", "object"], "additionalProperties": _shared("text")},
    "reports.formats": {
        "anyOf": [
            *_one_or_more(_shared("format"))["anyOf"],
            {
                "type": "object",
                "propertyNames": {"enum": list(REPORT_FORMATS)},
                "additionalProperties": {"anyOf": [_shared("text"), {"enum": [True, None]}]},
            },
        ]
    },
}
"""Options whose form in the file is not that of their record's field."""


def _form(name: str, wanted: Any) -> dict[str, Any]:
    """What an editor should accept."""
    if name in _WRITTEN:
        return _WRITTEN[name]
    if get_origin(wanted) is tuple:
        (item, _) = get_args(wanted)
        return _shared("texts") if item is str else _one_or_more(_form("", item))
    if isinstance(wanted, type) and issubclass(wanted, enum.Enum):
        return {"enum": [word.value for word in wanted]}
    return _shared(_NAMES.get(get_origin(wanted) or wanted, "number"))


_NAMES = {bool: "switch", str: "text", Limits: "limits"}


def schema_text() -> str:
    """The schema as the file has it."""
    return json.dumps(config_schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(schema_text())
