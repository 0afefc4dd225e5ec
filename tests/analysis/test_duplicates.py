"""The same bytes in several files are found by content, and each copy counts once."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from pathlib import Path

import jsonschema
from click.testing import CliRunner

from pytest_negativa.analysis.duplicates import find_duplicates
from pytest_negativa.cli.main import main
from pytest_negativa.models.duplicates import CodeDigest, LibraryContent, SameFiles, SharedCode
from pytest_negativa.storage.schema import schema_text
from tests.support.libraries import BIN, MULTIARCH, PLAIN

FRAMES = BIN / "libframes.so"
A, B, C = (CodeDigest(size, bytes([size])) for size in (10, 20, 40))


def library(path: str, digest: str, *code: CodeDigest) -> LibraryContent:
    return LibraryContent(path=path, size=100, sha256=digest, code=code)


def test_code_of_files_that_are_the_same_counts_once() -> None:
    found = find_duplicates(
        [library("1", "x", A, B), library("2", "x", A, B), library("3", "y", A, C)]
    )
    assert found.files == (SameFiles(sha256="x", size=100, paths=("1", "2")),)
    assert found.code == (SharedCode(paths=("1", "3"), regions=1, size=10),)
    assert found.saved_bytes == 100 + 10


def test_code_is_grouped_by_the_files_that_share_it() -> None:
    found = find_duplicates(
        [library("1", "x", A, B, C), library("2", "y", A, B), library("3", "z", C, C)]
    )
    assert found.files == ()
    assert found.code == (
        SharedCode(paths=("1", "3", "3"), regions=1, size=40),
        SharedCode(paths=("1", "2"), regions=2, size=30),
    )
    assert found.saved_bytes == 2 * 40 + 30


def test_a_path_that_is_named_twice() -> None:
    assert find_duplicates([library("1", "x", A), library("1", "x", A)]).saved_bytes == 0


def test_the_command(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    for name, source in (("a.so", MULTIARCH), ("b.so", MULTIARCH), ("f.so", FRAMES)):
        shutil.copyfile(source, site / name)
    os.link(site / "a.so", site / "link.so")
    # Other bytes behind the end: another file with the same code.
    (site / "tail.so").write_bytes(MULTIARCH.read_bytes() + b"tail")
    wheel = tmp_path / "w.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(FRAMES, "f.so")
    arguments = ["inspect", "--duplicates", str(site), str(wheel)]

    shown = CliRunner().invoke(main, arguments, catch_exceptions=False)
    as_json = CliRunner().invoke(main, [*arguments, "--json"], catch_exceptions=False)

    assert shown.exit_code == as_json.exit_code == 0
    document = json.loads(as_json.stdout)
    jsonschema.validate(document, json.loads(schema_text("inspection")))
    files, code = document["duplicates"]["files"], document["duplicates"]["code"]
    assert {tuple(row["paths"]) for row in files} == {
        (f"{site}/a.so", f"{site}/b.so"),
        (f"{site}/f.so", f"{wheel}/f.so"),
    }
    [row] = code
    assert row["paths"] == [f"{site}/a.so", f"{site}/tail.so"] and row["regions"] == 3
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert ["a.so,", "tail.so", "2", "3", "23.5", "kB", "23.5", "kB"] in lines
    alone = CliRunner().invoke(main, ["inspect", "--duplicates", str(PLAIN)])
    assert alone.stdout == "No GPU code is stored more than once.\n"
