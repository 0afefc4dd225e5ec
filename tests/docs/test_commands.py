"""Every command in README and docs runs, or says why it is not run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from pytest_negativa.cli.main import main
from pytest_negativa.settings.options import OPTIONS
from tests.support.libraries import DOCS, EXAMPLES, FIXTURES, ROOT

PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(DOCS.rglob("*.md")),
    *sorted(EXAMPLES.glob("*/README.md")),
    ROOT / "benchmarks" / "paper" / "README.md",
    FIXTURES / "README.md",
)
BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?```(?:bash|console)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A fenced block of commands, and why it is not run, if so."""

    page: Path
    text: str
    reason: str | None


def blocks_of(page: Path) -> list[Block]:
    return [
        Block(page, found["text"], found["reason"]) for found in BLOCK.finditer(page.read_text())
    ]


def to_run(page: Path) -> list[Block]:
    return [block for block in blocks_of(page) if block.reason is None]


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the examples in which quickstart was traced once."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("quickstart", "plugin"):
        shutil.copytree(EXAMPLES / name, folder / name)
    shutil.rmtree(folder / "quickstart" / ".negativa", ignore_errors=True)
    run("pytest -q --negativa", folder)
    return folder


def run(text: str, examples: Path) -> None:
    """Run a block in quickstart as a user would, who has this environment's commands."""
    environ = {n: v for n, v in os.environ.items() if not n.startswith(("NEGATIVA", "PYTEST_"))}
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    environ["XDG_CACHE_HOME"] = str(examples / "cache")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=examples / "quickstart",
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}"


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if to_run(p)], ids=page_id)
def test_the_commands_of_a_page_run(page: Path, traced: Path, tmp_path: Path) -> None:
    shutil.copytree(traced, tmp_path, symlinks=True, dirs_exist_ok=True)
    for block in to_run(page):
        run(block.text, tmp_path)


def test_every_block_is_seen() -> None:
    fences = sum(
        bool(re.fullmatch("```(bash|console|sh|shell)", line))
        for page in PAGES
        for line in page.read_text().splitlines()
    )
    assert sum(len(blocks_of(page)) for page in PAGES) == fences > 40


def iter_lines() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        for block in blocks_of(page):
            yield from ((page, line) for line in block.text.replace("\\\n", " ").splitlines())


def test_every_command_and_its_options_exist() -> None:
    wrong = []
    for page, line in iter_lines():
        for part in re.split(r"&&|;|\||>", line.partition(" #")[0]):
            words = shlex.split(part)
            if words[:1] != ["negativa"]:
                continue
            try:
                parse(words[1:])
            except click.UsageError as e:
                wrong.append(f"{page_id(page)}: {line.strip()}: {e.format_message()}")
    assert not wrong


def parse(words: list[str]) -> None:
    """Let click parse a command line without running it; values are not converted."""
    command: click.Command = main
    context = click.Context(command, info_name="negativa")
    while isinstance(command, click.Group):
        found = command.get_command(context, words[0]) if words else None
        if found is None:
            break
        command, context = found, click.Context(found, info_name=words[0], parent=context)
        del words[0]
    if command is main:
        raise click.UsageError(f"no such command: {words}")
    command.make_parser(context).parse_args(words)


def test_every_flag_of_pytest_exists() -> None:
    known = {option.flag for option in OPTIONS}
    known |= {f"--no-{option.flag[2:]}" for option in OPTIONS if option.off_flag}
    unknown = {
        f"{page_id(page)}: {flag}"
        for page in PAGES
        for flag in re.findall(r"--(?:no-)?negativa[a-z-]*[a-z]", page.read_text())
        if flag not in known
    }
    assert not unknown


def test_every_ci_job_that_proves_fails_without_a_gpu() -> None:
    found = [
        block
        for page in PAGES
        for block in re.findall(r"^```yaml\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
        if "pytest --negativa --negativa-verify" in block
    ]
    assert len(found) >= 2
    assert all(re.search(r'NEGATIVA_REQUIRE_GPU: "1"', block) for block in found)
