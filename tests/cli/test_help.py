"""help TOPIC: the pages that a wheel brings along, and the help of commands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pytest_negativa.cli.main import main
from tests.support.libraries import DOCS, ROOT


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["help", *arguments])


def topics() -> set[str]:
    _, _, listed = run().stdout.partition("\nPages:\n")
    return {line.split()[0] for line in listed.splitlines() if line}


def test_the_index_and_every_guide_and_explanation_is_a_topic() -> None:
    pages = [DOCS / "index.md", *DOCS.glob("guides/*.md"), *DOCS.glob("explanation/*.md")]
    assert topics() == {page.stem for page in pages}
    assert len(topics()) == len(pages)
    assert re.search("^  spares +Spares$", run().stdout, re.MULTILINE)


def test_a_page_is_plain_text_with_links_to_topics() -> None:
    text = run("small-images").stdout
    assert text.startswith("# ")
    assert "(negativa help spares)" in text
    assert "<!--" not in text
    assert ".md" not in text


def test_without_a_topic_it_begins_with_the_help_of_negativa() -> None:
    for words in (["--help"], []):
        shown = CliRunner().invoke(main, words).output
        assert shown.startswith("Usage: main") and run().stdout.startswith(shown)
    command = [sys.executable, "-m", "pytest_negativa", "-h"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: ")


def test_a_command_without_a_page_is_a_topic() -> None:
    assert run("slim").stdout == CliRunner().invoke(main, ["slim", "--help"]).stdout
    assert run("inspect").stdout.startswith("# ")


def test_a_wrong_topic_has_a_hint() -> None:
    done = run("spare")
    assert done.exit_code == 2
    assert "no page and no command 'spare'; did you mean spares?" in done.output


def test_messages_name_topics_that_are_there_and_no_file_of_the_source() -> None:
    named = set()
    for source in (ROOT / "pytest_negativa").rglob("*.py"):
        text = source.read_text()
        named |= set(re.findall(r"negativa help ([a-z][\w-]+)", text)) - {"lists"}
        assert not re.search(r"docs/(guides|explanation|reference)", text), source
    assert {"spares", "licences"} <= named <= topics()


@pytest.mark.real_libs
def test_a_wheel_has_the_pages(tmp_path: Path) -> None:
    """The build fetches setuptools from the package index, and needs no compiler."""
    unwanted = shutil.ignore_patterns(".*", "build", "*.egg-info", "tests", "__pycache__")
    shutil.copytree(ROOT, tmp_path / "source", ignore=unwanted)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "./source"]
    environ = {**os.environ, "CC": "/bin/false"}
    subprocess.run(command, cwd=tmp_path, env=environ, check=True)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {Path(name) for name in archive.namelist()}
    inside = {name.stem for name in names if name.parts[:2] == ("pytest_negativa", "docs")}
    assert inside == topics()
    html = Path("pytest_negativa/reporting/html")
    assert {html / path.name for path in (ROOT / html).iterdir() if path.is_file()} <= names


def test_a_command_of_two_words_is_a_topic() -> None:
    assert run("slim", "undo").stdout == run("slim undo").stdout
    assert "Put back the originals" in run("slim", "undo").stdout
