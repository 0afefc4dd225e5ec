"""Generates the reference from the code: options, commands, files, hooks, exit statuses, API.

MkDocs calls ``on_page_markdown`` for every page (``hooks`` in mkdocs.yml). A page of the
reference holds lines ``<!-- generated: NAME -->``; each becomes the text of the generator NAME.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import itertools
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec

import pytest_negativa
from pytest_negativa import hookspecs, models, plugin
from pytest_negativa.cli.main import main
from pytest_negativa.settings.options import MODES, OPTIONS, SECTIONS, Option
from pytest_negativa.storage.schema import SCHEMA_NAMES, schema_text
from pytest_negativa.tracing import detector

_MARKER = re.compile(r"^<!-- generated: (\S+) -->$", re.MULTILINE)
_LISTS = re.compile(r"^(Attributes|Args|Returns|Raises):\n", re.MULTILINE)
_FIELD = re.compile(r"^ {4}(\w[\w, ]*):\s+(.*(?:\n {5,}.*)*)", re.MULTILINE)
_EVERYWHERE = {
    "format": "number of this form; others are refused",
    "type": "tells the records apart",
}


def on_page_markdown(markdown: str, **_: object) -> str:
    """MkDocs' hook: the text of a page with the generated parts filled in."""
    return expand(markdown)


def expand(markdown: str) -> str:
    """Replace each line ``<!-- generated: NAME -->`` by what its generator makes.

    Raises:
        KeyError: there is no such generator.
    """
    return _MARKER.sub(lambda found: "\n".join(GENERATORS[found[1]]()), markdown)


# Options


def generate_options() -> Iterator[str]:
    """Every option: file, flags, variable, values, default; by section of ``negativa.yaml``."""
    commands = commands_by_flag()
    section = None
    for option in OPTIONS:
        if option.name.partition(".")[0] != section:
            section = option.name.partition(".")[0]
            if section in SECTIONS:
                yield f"## {section}\n\n{SECTIONS[section]}\n"
        yield f"### {option.name if option.in_file else option.flag} {{: #{_anchor(option)} }}\n"
        yield f"{' '.join(filter(None, (option.help, option.detail)))}\n"
        yield _table(("where", "how"), _option_rows(option, commands))


def _anchor(option: Option) -> str:
    return option.flag.removeprefix("--")


def _option_rows(option: Option, commands: Mapping[str, list[str]]) -> Iterator[tuple[str, str]]:
    if option.in_file:
        yield "`negativa.yaml`", f"`{option.name}`"
    value = f" {option.value}".rstrip()
    off = f", `{option.off_flag}`" if option.off_flag else ""
    if option.requires or option.name in MODES:
        yield "pytest", f"`{option.flag}{value}`{off}"
    if names := commands.get(option.cli_flag):
        links = [f"[{name}](commands.md#{_command_anchor(name)})" for name in names if name]
        place = f"of {', '.join(links)}" if links else "before the command"
        yield "`negativa`", f"`{option.cli_flag}{value}` {place}"
    if option.variable:
        yield "environment", f"`{option.variable}`"
    yield "default", f"`{option.default_text or 'not set'}`"


# Commands


class Command(NamedTuple):
    """A command of ``negativa``: its name behind that word, and its context."""

    name: str
    command: click.Command
    context: click.Context


def iter_commands(command: click.Command = main, *names: str) -> Iterator[Command]:
    """All commands that help shows, subcommands too, by name; the group itself first."""
    context = click.Context(command, info_name=" ".join(("negativa", *names)))
    yield Command(" ".join(names), command, context)
    if isinstance(command, click.Group):
        for word in command.list_commands(context):
            child = command.get_command(context, word)
            if child is not None and not child.hidden:
                yield from iter_commands(child, *names, word)


def commands_by_flag() -> dict[str, list[str]]:
    """The commands that take a flag, by the flag."""
    found: dict[str, list[str]] = {}
    for one in iter_commands():
        for parameter in one.command.get_params(one.context):
            for flag in parameter.opts:
                found.setdefault(flag, []).append(one.name)
    return found


def generate_commands() -> Iterator[str]:
    """Every command: usage, what it does, its options."""
    for one in iter_commands():
        if one.name:
            yield f"## negativa {one.name} {{: #{_command_anchor(one.name)} }}\n"
        usage = " ".join((one.context.command_path, *one.command.collect_usage_pieces(one.context)))
        yield f"```text\n{usage.strip()}\n```\n"
        yield _help_text(one.command)
        records = [
            parameter.get_help_record(one.context)
            for parameter in one.command.get_params(one.context)
            if not getattr(parameter, "hidden", False)
        ]
        yield _table(
            ("option", "meaning"),
            ((f"`{record[0]}`", _cell(record[1])) for record in records if record and record[1]),
        )


def _command_anchor(name: str) -> str:
    return f"negativa-{name.replace(' ', '-')}"


def _help_text(command: click.Command) -> str:
    """A command's help as Markdown; click keeps a paragraph that begins with \\b as it is."""
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    return (
        "\n\n".join(
            f"```text\n{text.removeprefix(chr(8)).strip(chr(10))}\n```"
            if text.startswith("\b")
            else _escape(text)
            for text in paragraphs
        )
        + "\n"
    )


def generate_exit_statuses() -> Iterator[str]:
    """What each command's help says of its exit status."""
    yield _table(
        ("command", "exit status"),
        (
            (f"`negativa {one.name}`".replace(" `", "`"), _cell(" ".join(found[1].split())))
            for one in iter_commands()
            if (
                found := re.search(
                    r"Exit status: (.*?)(?:\n\n|\Z)",
                    inspect.cleandoc(one.command.help or ""),
                    re.DOTALL,
                )
            )
        ),
    )


# Files


def generate_files() -> Iterator[str]:
    """Every file that has a JSON Schema, record by record."""
    for name in SCHEMA_NAMES:
        schema = msgspec.json.decode(schema_text(name))
        if "$defs" not in schema:
            continue  # negativa.yaml: its keys are the options.
        yield f"## {name} {{: #{name} }}\n"
        yield f"`negativa schema {name}` prints the schema.\n"
        for title, record in schema["$defs"].items():
            yield f"### {title} {{: #{name}-{title.lower()} }}\n"
            text, described = split_docstring(record.get("description", ""))
            yield f"{_escape(text)}\n"
            if "enum" in record:
                yield f"One of {', '.join(f'`{value}`' for value in record['enum'])}.\n"
            if "prefixItems" in record:
                fields = zip(_fields_of(title), record["prefixItems"], strict=True)
                items = (f"`{field}` ({_type_of(item, name)})" for field, item in fields)
                yield f"An array: {', '.join(items)}.\n"
            yield _table(
                ("field", "type", "meaning"),
                (
                    (
                        f"`{field}`",
                        _type_of(value, name),
                        _cell(described.get(field, _EVERYWHERE.get(field, ""))),
                    )
                    for field, value in record.get("properties", {}).items()
                ),
            )


def _fields_of(title: str) -> tuple[str, ...]:
    """The fields of a record that is an array in JSON: its schema doesn't name them."""
    modules = map(importlib.import_module, _models())
    record = next(getattr(module, title) for module in modules if hasattr(module, title))
    fields = record._fields if issubclass(record, tuple) else record.__struct_fields__
    return tuple(fields)


def _type_of(value: Mapping[str, Any], schema: str) -> str:
    if "$ref" in value:
        title = value["$ref"].rpartition("/")[2]
        return f"[{title}](#{schema}-{title.lower()})"
    if "anyOf" in value:
        return " or ".join(_type_of(part, schema) for part in value["anyOf"])
    if value.get("type") == "array" and isinstance(value.get("items"), Mapping):
        return f"array of {_type_of(value['items'], schema)}"
    if "enum" in value:
        return " or ".join(f"`{choice}`" for choice in value["enum"])
    return str(value.get("type", "any"))


# Hooks and API


def generate_hooks() -> Iterator[str]:
    """Every hook, with its arguments."""
    for name, function in inspect.getmembers(hookspecs, inspect.isfunction):
        if function.__module__ == hookspecs.__name__:
            yield f"### {name}\n"
            yield f"```python\ndef {name}{_signature(function)}\n```\n"
            yield from _documented(function)


def generate_fixture() -> Iterator[str]:
    """The marker and the fixture ``negativa_off``."""
    name, _, meaning = plugin.MARKER.partition(": ")
    yield f"`@pytest.mark.{name}`: {meaning}.\n"
    yield f"Fixture `negativa_off`: {_escape(inspect.getdoc(plugin.negativa_off) or '')}\n"


def generate_api() -> Iterator[str]:
    """The public names: ``why``, the detector's protocol, the records."""
    yield "### pytest_negativa.why\n"
    yield f"```python\nwhy{_signature(pytest_negativa.why)}\n```\n"
    yield from _documented(pytest_negativa.why)
    yield "### pytest_negativa.tracing.detector\n"
    yield _escape(inspect.getdoc(detector) or "") + "\n"
    yield _table(("name", "meaning"), _classes(detector.__name__))
    for module in _models():
        if rows := [*_classes(module)]:
            yield f"### {module}\n"
            yield _table(("record", "meaning"), rows)


def _models() -> list[str]:
    return [f"{models.__name__}.{module.name}" for module in pkgutil.iter_modules(models.__path__)]


def _classes(module: str) -> Iterator[tuple[str, str]]:
    loaded = importlib.import_module(module)
    for name, value in inspect.getmembers(loaded, inspect.isclass):
        if value.__module__ == module and not name.startswith("_"):
            yield f"`{name}`", _cell(split_docstring(inspect.getdoc(value) or "")[0])


def _signature(function: Callable[..., object]) -> str:
    return str(inspect.signature(function)).replace("'", "")


def _documented(function: Callable[..., object]) -> Iterator[str]:
    text, described = split_docstring(inspect.getdoc(function) or "")
    yield f"{_escape(text)}\n"
    yield _table(
        ("argument", "meaning"), ((f"`{name}`", _cell(what)) for name, what in described.items())
    )


# Tests


def generate_planted_faults() -> Iterator[str]:
    """Every planted fault, by folder and witness: what goes wrong, what the product says."""
    *witnesses, _all = _read_witnesses()
    for folder, faults in itertools.groupby(iter_planted_faults(), lambda fault: fault.folder):
        rows = []
        for fault in faults:
            is_its = re.compile(fault.tests).fullmatch
            names = [one.witness for one in witnesses if any(map(is_its, one.caught))]
            rows.append(("; ".join(names), _cell(fault.what), _cell(fault.says)))
        yield f"## {folder}\n"
        if any(names for names, *_ in rows):
            heads = ("what goes wrong", "the product says", "caught by")
            yield _table(heads, ((*said, names) for names, *said in sorted(rows, key=_by_witness)))
        else:
            yield _table(("what goes wrong", "the product says"), (row[1:] for row in rows))


def _by_witness(row: tuple[str, ...]) -> tuple[bool, str]:
    return not row[0], row[0]


def generate_witnesses() -> Iterator[str]:
    """Table of the witnesses: faults of the recorded attempts that each catches."""
    heads = ("witness", "catches", "it alone")
    yield _table(
        heads,
        ((one.witness, str(len(one.caught)), str(len(one.alone))) for one in _read_witnesses()),
    )


@functools.cache
def _read_witnesses() -> tuple[Any, ...]:
    """Rows of ``tests.support.witnesses``, which judges some hundred attempts."""
    root = str(Path(__file__).parents[1])
    sys.path.insert(0, root)
    try:
        from tests.support.witnesses import caught_faults
    finally:
        sys.path.remove(root)
    return tuple(caught_faults())


class PlantedFault(NamedTuple):
    """A fault that tests plant; see tests/support/faults.py. ``tests``: pattern of their ids."""

    tests: str
    folder: str
    what: str
    says: str


def iter_planted_faults() -> Iterator[PlantedFault]:
    """Read the markers ``planted_fault`` of all tests, by folder and file."""
    root = Path(__file__).parents[1] / "tests"
    for path in sorted(root.rglob("test_*.py")):
        file = path.relative_to(root)
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef):
                marks, test = node.decorator_list, rf"{node.name}(\[.*)?"
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.param":
                marks = [keyword.value for keyword in node.keywords]
                case = node.args[0].value if isinstance(node.args[0], ast.Constant) else ""
                test = rf"\w+\[{re.escape(str(case))}[-\]].*"
            else:
                continue
            for mark in marks:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func).endswith(".planted_fault"):
                    (says,) = mark.keywords
                    words = map(ast.literal_eval, (*mark.args, says.value))
                    tests = f"tests/{re.escape(file.as_posix())}::{test}"
                    yield PlantedFault(tests, file.parts[0], *words)


# Text


def split_docstring(docstring: str) -> tuple[str, dict[str, str]]:
    """A docstring without its field lists, and the fields' meanings by name."""
    # Up to Python 3.12 docstrings have the indentation of the source.
    text, *lists = _LISTS.split(inspect.cleandoc(docstring))
    fields: dict[str, str] = {}
    for title, body in zip(lists[::2], lists[1::2], strict=True):
        if title in ("Returns", "Raises"):
            fields[title.lower()] = " ".join(body.split())
            continue
        for names, meaning in _FIELD.findall(body):
            for name in names.split(","):
                fields[name.strip()] = " ".join(meaning.split())
    return text.strip(), fields


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join((_row(heads), _row(("---",) * len(heads)), *lines, "")) if lines else ""


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    return _escape(" ".join(text.split())).replace("|", "\\|")


def _escape(text: str) -> str:
    """A docstring as Markdown: code between double backquotes, all other characters plain."""
    parts = text.replace("``", "`").split("`")
    parts[::2] = (part.replace("<", "&lt;").replace("*", "\\*") for part in parts[::2])
    return "`".join(parts)


GENERATORS: Mapping[str, Callable[[], Iterator[str]]] = {
    "options": generate_options,
    "commands": generate_commands,
    "exit-statuses": generate_exit_statuses,
    "files": generate_files,
    "hooks": generate_hooks,
    "fixture": generate_fixture,
    "api": generate_api,
    "planted-faults": generate_planted_faults,
    "witnesses": generate_witnesses,
}
