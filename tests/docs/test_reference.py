"""The generated reference has everything that the code has."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

import pytest

from pytest_negativa import hookspecs
from pytest_negativa.settings.options import MODES, OPTIONS
from pytest_negativa.storage.schema import SCHEMA_NAMES
from tests.support.libraries import DOCS


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page(generate: ModuleType, name: str) -> str:
    text: str = generate.expand((DOCS / "reference" / name).read_text())
    assert "generated:" not in text
    return text


def test_every_option_is_documented(generate: ModuleType) -> None:
    text = page(generate, "options.md")
    for option in OPTIONS:
        assert f"\n{option.help}" in text
        is_of_sessions = option.requires or option.name in MODES
        assert f"`{option.flag if is_of_sessions else option.cli_flag}" in text
        assert option.variable is None or f"| `{option.variable}` |" in text
    assert "`--keep-ptx {off,newest,all}` of [debloat](commands.md#negativa-debloat)" in text


def test_every_command_is_documented_with_its_options(generate: ModuleType) -> None:
    text = page(generate, "commands.md")
    for one in generate.iter_commands():
        if one.name:
            assert f"\n## negativa {one.name} " in text
    assert "| `--headers-only` |" in text
    assert "\nnegativa slim undo [OPTIONS] [PATH]...\n" in text


def test_exit_statuses_are_those_of_the_help(generate: ModuleType) -> None:
    assert re.search(r"\| `negativa lock` \| 0, or 1 if ", page(generate, "exit-statuses.md"))


def test_every_schema_is_documented_with_its_fields(generate: ModuleType) -> None:
    text = page(generate, "files.md")
    for name in SCHEMA_NAMES:
        if name != "negativa":
            assert f"\n## {name} " in text
    assert re.search(r"\| `sha256` \| string \| \w", text)
    assert "An array: `start` (integer), `end` (integer)." in text
    assert "Attributes:" not in text
    assert not re.findall(r"^\| `.* \| .* \|  \|$", text, re.MULTILINE), "a field without a meaning"


def test_every_hook_is_documented_with_its_arguments(generate: ModuleType) -> None:
    text = page(generate, "hooks.md")
    names = [name for name in vars(hookspecs) if name.startswith("pytest_negativa_")]
    assert len(names) == 4
    for name in names:
        assert f"\n### {name}\n" in text
    assert text.count("| `settings` | ") == 4
    assert "@pytest.mark.negativa_off(reason)" in text


def test_the_public_names_are_documented(generate: ModuleType) -> None:
    text = page(generate, "api.md")
    for name in ("pytest_negativa.why", "pytest_negativa.models.library", "`Detector`", "`Usage`"):
        assert name in text


def test_fields_of_a_docstring(generate: ModuleType) -> None:
    assert generate.split_docstring(
        "One line.\n\nMore.\n\nArgs:\n    a: one\n        and more.\n    b, c: two\n"
        "\nReturns:\n    three.\n"
    ) == ("One line.\n\nMore.", {"a": "one and more.", "b": "two", "c": "two", "returns": "three."})


@pytest.mark.slow
def test_planted_faults_are_told_apart(generate: ModuleType) -> None:
    faults = list(generate.iter_planted_faults())
    assert len({fault.what for fault in faults}) == len(faults)
    text = generate.expand((DOCS / "reference" / "planted-faults.md").read_text())
    assert all(fault.says for fault in faults)
    assert "generated:" not in text
    for what, witness in (
        (
            "asked for on the copies, and nobody looks",
            "what the driver refused; touches of armed code",
        ),
        ("reads removed code past the driver", "touches of armed code"),
        ("pytest_sessionfinish calls os._exit(0)", "ends of processes"),
    ):
        [line] = [line for line in text.splitlines() if what in line]
        assert line.endswith(f"| {witness} |")
