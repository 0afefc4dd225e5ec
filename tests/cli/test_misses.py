"""The command ``negativa misses``: functions and GPU code that came back, by name."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner

from pytest_negativa.cli.main import main
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.models.library import Element, Scope
from pytest_negativa.pages.page_logs import read_misses
from pytest_negativa.rewriting.compact.cut import cut_library
from pytest_negativa.rewriting.compact.records import Cut
from pytest_negativa.storage.schema import schema_text
from tests.support.cutting import OPTIONS, build_kit, logged, needs_stub
from tests.support.libraries import QUICKSTART_LIBRARY
from tests.support.paged import needs_page_watch
from tests.support.sessions import Project

pytestmark = needs_stub

USE = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
base = ctypes.c_size_t.from_address(library._handle).value
for start, end in zip(*[map(int, sys.argv[2:])] * 2):
    ctypes.string_at(base + start, end - start)
"""


def use(cut: Cut, logs: Path, *blocks: Element) -> None:
    """Read GPU code of a cut library, as the driver does; a log tells what came back."""
    words = [str(place) for block in blocks for place in (block.payload.start, block.payload.end)]
    subprocess.run(
        [sys.executable, "-c", USE, cut.library, *words],
        env=logged(logs),
        check=True,
    )


@pytest.fixture
def cut(tmp_path: Path) -> Cut:
    """A library without its GPU code."""
    regions = read_library(QUICKSTART_LIBRARY, Scope(headers_only=True)).iter_regions()
    containers = [(region.span.start, region.span.end) for region in regions]
    target = tmp_path / "cut" / QUICKSTART_LIBRARY.name
    target.parent.mkdir()
    return cut_library(QUICKSTART_LIBRARY, target, target.parent, [], OPTIONS, containers)


def sm_90_code() -> list[Element]:
    blocks = read_library(QUICKSTART_LIBRARY, Scope(headers_only=True)).iter_code()
    return [block for block in blocks if str(block.arch) == "sm_90"]


@pytest.mark.slow
def test_gpu_code_that_came_back(project: Project, cut: Cut, tmp_path: Path) -> None:
    one, other = tmp_path / "logs", tmp_path / "of another machine"
    first, second, *_ = sm_90_code()
    for logs, blocks in ((one, [first, second]), (one, [second]), (other, [second])):
        logs.mkdir(exist_ok=True)
        use(cut, logs, *blocks)
    command: list[str | Path] = ["misses", "--log", one, "--log", other, cut.library.parent]
    found = json.loads(project.negativa(*command, "--json").stdout)
    jsonschema.validate(found, json.loads(schema_text("misses")))
    [library] = found["rows"]
    assert (library["path"], library["sha256"], library["unknown"]) == (
        str(cut.library), cut.original_sha256, None
    )  # fmt: skip
    assert (library["pages"], library["misses"]) == (2, 4)
    rows = [(code["offset"], code["misses"], code["arch"]) for code in library["code"]]
    assert rows == [(second.payload.start, 3, "sm_90"), (first.payload.start, 1, "sm_90")]
    assert library["code"][0]["region"] == second.anchor

    # Names are read for what is shown.
    top = project.negativa(*command, "--top", "1").stdout
    assert f"sm_90 code at {second.payload.start:#x}: " in top and "1 more" in top

    done = project.negativa(*command)
    assert done.stderr.endswith(f"Next: negativa slim check {cut.library.parent}\n")
    project.write("negativa.lock", "")
    then = project.negativa(*command).stderr.splitlines()[-1]
    added = f"--add-misses {one} --add-misses '{other}'"
    assert then == f"Next: negativa lock {added} {cut.library.parent}"
    shown = done.stdout
    lines = shown.splitlines()
    assert lines[0] == "2 pages (8.2 kB) came back to 1 library, 4 times in all processes."
    assert library["code"][0]["kernels"][0].startswith("_Z")
    row = ["3", "1", *f"sm_90 code at {second.payload.start:#x}:".split()]
    assert any(line.split()[: len(row)] == row for line in lines), shown
    # A template and a count, for a signature is wider than a terminal.
    assert re.search(
        rf"{second.payload.start:#x}: [\w:]+ and 1 more, 3 kernels$", shown, re.MULTILINE
    )


@pytest.mark.slow
def test_functions_by_name(project: Project, tmp_path: Path) -> None:
    """They come from the original, which library and spare give back, or which lies there."""
    kit = build_kit(tmp_path)
    cut = kit.cut(tmp_path / "cut")
    logs = tmp_path / "logs"
    logs.mkdir()
    kit.run("plain", cut.library, environ=logged(logs))

    def misses(folder: Path) -> str:
        return project.negativa("misses", folder, "--top", "0", NEGATIVA_SPARE_LOG=str(logs)).stdout

    shown = misses(cut.library.parent)
    for name in ("_GLOBAL__sub_I_library.cpp", "void thrower<", "other: .gcc_except_table"):
        assert name in shown, shown
    cut.spare.unlink()
    assert f"its spare {cut.spare.name} can't be used" in misses(cut.library.parent)
    cut.library.unlink()
    assert misses(kit.library.parent) == shown


# The files of a folder that were opened, and what was printed when the folder was listed.
_WATCHED = """
import json, os, sys
from pytest_negativa.__main__ import main

folder, printed, log, *words = sys.argv[1:]
opened, before = [], []
def note(event, args):
    if event == "open" and str(args[0]).startswith(folder + os.sep):
        opened.append(os.path.basename(args[0]))
    elif event == "os.scandir" and str(args[0]) == folder:
        with open(printed) as file:
            before.append(file.readline())
sys.addaudithook(note)
sys.argv = ["negativa", "misses", "--log", log, *words, folder]
try:
    main()
finally:
    print(json.dumps([opened, before]), file=sys.stderr)
"""


def test_only_libraries_of_the_logs_are_opened_and_sums_come_first(
    cut: Cut, tmp_path: Path
) -> None:
    first, *_ = sm_90_code()
    use(cut, tmp_path / "logs", first)
    folder = cut.library.parent
    for number in range(9):
        shutil.copy(QUICKSTART_LIBRARY, folder / f"libother{number}.so")
    printed = tmp_path / "printed"
    words = [str(folder), str(printed), str(tmp_path / "logs")]
    with printed.open("w") as out:
        done = subprocess.run(
            [sys.executable, "-c", _WATCHED, *words], stdout=out, stderr=subprocess.PIPE, check=True
        )
    opened, before = json.loads(done.stderr.splitlines()[-1])
    assert set(opened) == {cut.library.name}
    assert before == ["1 page (4.1 kB) came back to 1 library, 1 time in all processes.\n"]


@pytest.mark.slow
def test_nothing_and_no_logs(project: Project, tmp_path: Path) -> None:
    assert project.negativa("misses", "--log", tmp_path).stdout.startswith("Nothing came back")
    assert "no --log LOG, and NEGATIVA_SPARE_LOG" in project.negativa("misses", status=2).stderr
    gone = project.negativa("misses", "--log", tmp_path / "gone", status=2).stderr
    assert "gone: no such file or folder" in gone
    (tmp_path / "a.pages").write_bytes(b"")
    assert (
        "a.pages: has no record" in project.negativa("misses", "--log", tmp_path, status=1).stderr
    )
    (tmp_path / "a.pages").write_bytes(b"NEG")
    assert "a damaged one" in project.negativa("misses", "--log", tmp_path, status=1).stderr


@needs_page_watch
def test_the_variables_of_a_service(cut: Cut, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["misses", "--attach-env", str(tmp_path / "logs"), "--json"])
    variables = json.loads(done.output)
    done = CliRunner().invoke(main, ["misses", "--attach-env", str(tmp_path / "logs")])
    script = f'{done.output}\nexec "$@"'
    first, *_ = sm_90_code()
    words = [
        sys.executable,
        "-c",
        USE,
        str(cut.library),
        str(first.payload.start),
        str(first.payload.end),
    ]
    subprocess.run(["sh", "-c", script, "sh", *words], env={}, check=True)
    assert variables["NEGATIVA_SPARE_LOG"] == str(tmp_path / "logs")
    assert [one.name for one in read_misses([tmp_path / "logs"])] == [cut.library.name]
