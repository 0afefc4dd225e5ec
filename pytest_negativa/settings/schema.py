"""JSON Schema of ``negativa.yaml``, for editors.

``schemas/negativa.schema.json`` is what ``python -m pytest_negativa.settings.schema`` prints;
a test compares the two.
"""

from __future__ import annotations

import inspect
import json
import sys
from typing import Any

import msgspec

from pytest_negativa.models.settings import Config
from pytest_negativa.settings.options import FILE_OPTIONS


def config_schema() -> dict[str, Any]:
    """The schema: sections from the records, values from the table of options.

    The records know keys and nesting. What a person may write for a value (``"500 MB"`` for a
    number of bytes) and what it means, only the table knows.
    """
    (reference,), components = msgspec.json.schema_components([Config])
    top: dict[str, Any] = components[reference["$ref"].rpartition("/")[2]]
    properties: dict[str, Any] = {}
    for name, field in top["properties"].items():
        if name in FILE_OPTIONS:
            properties[name] = _value(name)
            continue
        (link,) = _references(field)
        section = components[link.rpartition("/")[2]]
        properties[name] = {
            "description": _description(section),
            # A section of which all lines are comments is nothing to YAML.
            "type": ["object", "null"],
            "additionalProperties": False,
            "properties": {key: _value(f"{name}.{key}") for key in section["properties"]},
        }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "negativa.yaml",
        "description": _description(top),
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": properties,
    }


def _description(component: dict[str, Any]) -> str:
    # Up to Python 3.12 docstrings have the indentation of the source.
    return inspect.cleandoc(component["description"])


def _value(name: str) -> dict[str, Any]:
    option = FILE_OPTIONS[name]
    default = {} if option.default is None else {"default": _plain_default(option.default)}
    return {
        "description": " ".join(filter(None, (option.help, option.detail))),
        **option.type.schema(),
        **default,
    }


def _plain_default(default: Any) -> Any:
    # Reports have a form of their own in the file; all others are written as they are.
    if isinstance(default, tuple):
        return [item["format"] if isinstance(item, dict) else item for item in default]
    return default


def _references(field: dict[str, Any]) -> list[str]:
    found = [field, *field.get("anyOf", ()), *field.get("allOf", ())]
    return [part["$ref"] for part in found if "$ref" in part]


def schema_text() -> str:
    """The schema as the file has it."""
    return json.dumps(config_schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(schema_text())
