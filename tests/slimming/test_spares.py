"""Slimming with a spare: what was removed comes back, and so does the original."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.cli.main import main
from pytest_negativa.models.slimming import SlimRow, SlimStatus
from pytest_negativa.slimming.check import check_tree
from pytest_negativa.slimming.slim import SlimReport, SlimRequest, scan, slim_trees
from pytest_negativa.slimming.slimmer import SlimOptions
from pytest_negativa.slimming.spares import SparePolicy
from pytest_negativa.slimming.tree import MANIFEST_NAME
from pytest_negativa.slimming.undo import undo_trees
from tests.support.compacting import needs_compiler
from tests.support.cutting import needs_runtime
from tests.support.made_site import ONE, TWO, Made
from tests.support.sites import digests, wrong_files

pytestmark = [needs_compiler, needs_runtime]

SM_80 = ComputeCapability(8, 0)
"""The libraries have no code for it."""
# Prints digests of the registered GPU code, as a driver would read it, before and after a fork.
SCRIPT = """
import ctypes, hashlib, os, sys
library = ctypes.CDLL(sys.argv[1])
library.registered.restype = ctypes.c_void_p
def digest():
    data = ctypes.string_at(library.registered(), int(sys.argv[2]))
    return hashlib.sha256(data).hexdigest() + " " + str(library.catches(1))
if os.fork() == 0:
    os._exit(print(digest(), flush=True) or 0)
os.wait()
print(digest())
"""
CODE = 238_000
"""Bytes of it that the library registers."""


def options(tmp_path: Path, **others: object) -> SlimOptions:
    return SlimOptions(spare=SparePolicy(tmp_path / "spares"), **others)  # type: ignore[arg-type]


def slim(site: Made, tmp_path: Path, *, lock: bool = False, **others: object) -> SlimReport:
    request = SlimRequest(
        paths=(site.folder,),
        lock=site.lock if lock else None,
        devices=() if lock else (SM_80,),
        force_archs=True,
        options=options(tmp_path, **others),
    )
    return slim_trees(request)


def statuses(rows: object) -> dict[str, SlimStatus]:
    assert isinstance(rows, tuple | list)
    return {row.path: row.status for row in rows if isinstance(row, SlimRow)}


def code_of(path: Path, logs: Path | None = None) -> str:
    environ = {} if logs is None else {"NEGATIVA_SPARE_LOG": str(logs)}
    command = [sys.executable, "-I", "-S", "-c", SCRIPT, str(path), str(CODE)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_code_comes_back_and_so_does_the_original(site: Made, tmp_path: Path) -> None:
    before, code = digests(site.folder), code_of(site.one)
    report = slim(site, tmp_path)
    assert not report.failed
    found = statuses(report.rows)
    # What fills no page of its own, or lies in data that programs write to, stays.
    assert found == {ONE: SlimStatus.SLIMMED, TWO: SlimStatus.SLIMMED}
    [row] = [row for row in report.rows if row.path == ONE]
    assert row.after == site.one.stat().st_size < row.before - 150_000
    logs = tmp_path / "logs"
    logs.mkdir()
    # With an empty environment, too.
    assert code_of(site.one) == code_of(site.one, logs) == code
    assert list(logs.iterdir())
    assert wrong_files(site.folder) == []
    assert {row.detail for tree in scan((site.folder,)) for row in check_tree(tree)} == {
        "its spare fits"
    }
    rows = undo_trees((site.folder,))
    assert set(statuses(rows).values()) == {SlimStatus.UNDONE}
    assert digests(site.folder) == before
    assert not (site.folder / MANIFEST_NAME).exists()


def test_without_a_spare_a_library_may_refuse_to_start(site: Made, tmp_path: Path) -> None:
    folder = tmp_path / "spares"
    command = ["slim", "--lock", site.lock_file, "--spare", folder, "--spare-missing=error"]
    done = CliRunner().invoke(main, [str(word) for word in (*command, site.folder)])
    assert done.exit_code == 0, done.output
    code_of(site.one)
    folder.rename(tmp_path / "elsewhere")
    script = "import ctypes, sys; print('before'); ctypes.CDLL(sys.argv[1])"
    words = [sys.executable, "-I", "-c", script, str(site.one)]
    refused = subprocess.run(words, capture_output=True, text=True, check=False)
    assert refused.returncode == 127
    assert f"{site.one}: code was taken out, and its spare libone.so.1." in refused.stderr
    assert "then negativa lock --add-misses DIR, and slim again.\n" in refused.stderr
    environ = {"NEGATIVA_SPARE_DIR": str(tmp_path / "elsewhere")}
    assert subprocess.run(words, env=environ, check=False).returncode == 0
