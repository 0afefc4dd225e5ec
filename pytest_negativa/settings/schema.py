"""JSON Schema of ``negativa.yaml``, for editors.

``storage/schemas/negativa.schema.json`` is what ``python -m pytest_negativa.settings.schema``
prints; a test compares the two.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pytest_negativa.settings.options import FILE_OPTIONS, SECTIONS, Option


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
    default = {} if option.default is None else {"default": _plain_default(option.default)}
    return {"description": description, **option.type.schema(), **default}


def _plain_default(default: Any) -> Any:
    # Reports have a form of their own in the file; all others are written as they are.
    if isinstance(default, tuple):
        return [item["format"] if isinstance(item, dict) else item for item in default]
    return default


def schema_text() -> str:
    """The schema as the file has it."""
    return json.dumps(config_schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(schema_text())
