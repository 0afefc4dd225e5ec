"""How often slim opens a library, and lists its folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pytest_negativa.gpucode.source import digest_of
from pytest_negativa.models.pages import HostUsage
from pytest_negativa.storage.lockfile import save_lock
from tests.support.compacting import needs_compiler
from tests.support.cutting import compile_library, trace_of
from tests.support.made_site import HOST, ONE, TWO, Made
from tests.support.sites import lock_of, with_pages

pytestmark = needs_compiler

PAGES = "host/libpages.so"
ARCH, LOCK = ["--arch", "sm_75"], ["--lock", "both.lock"]
SPARE = ["--spare", "spares"]

# What a program that gets a library's path does with it, Python doesn't tell: it counts as one.
_COUNTING = """
import collections, json, os, sys, threading
from pathlib import Path
from pytest_negativa.__main__ import main

root, log, *options = sys.argv[1:]
opened, listed, in_threads = (collections.Counter() for _ in range(3))
def count(event, args):
    if event == "open" and isinstance(args[0], str):
        opened[args[0]] += 1
        in_threads[args[0]] += threading.current_thread() is not threading.main_thread()
    elif event == "subprocess.Popen":
        opened.update(map(str, args[1]))
    elif event in ("os.scandir", "os.listdir"):
        listed[str(args[0])] += 1
sys.addaudithook(count)
sys.argv = ["negativa", "slim", *options, root]
try:
    main()
finally:
    Path(log).write_text(json.dumps([opened, listed, in_threads]))
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with CPU code."""
    return compile_library(tmp_path_factory.mktemp("pages"), pages=200)


def slim(site: Path, log: Path, *options: str) -> list[dict[str, Any]]:
    """Slim, check or undo; by path below the site: openings, listings, openings in threads."""
    command = [sys.executable, "-c", _COUNTING, str(site), str(log), *options]
    subprocess.run(command, check=True, capture_output=True, cwd=log.parent)
    return [
        {key.removeprefix(f"{site}/"): count for key, count in found.items()}
        for found in json.loads(log.read_text())
    ]


def trace(site: Path) -> HostUsage:
    """A trace of CPU code that knows all libraries of a site, and a part of one."""
    usage = trace_of(site / PAGES)
    [pages] = usage.libraries
    others = [
        msgspec.structs.replace(
            pages,
            sha256=digest_of(site / name),
            size=(site / name).stat().st_size,
            paths=(str(site / name),),
            watched=(),
            touched=(),
        )
        for name in (ONE, TWO)
    ]
    return msgspec.structs.replace(usage, libraries=(pages, *others))


@pytest.mark.parametrize(
    ("options", "slimmed"),
    [
        ([*ARCH, "--no-way-back"], [ONE, TWO]),
        ([*ARCH, "--keep-originals", "originals"], [ONE, TWO]),
        ([*ARCH, *SPARE], [ONE, TWO]),
        (["--lock", "pages.lock", *ARCH, *SPARE], [ONE, TWO, PAGES]),
        # They are found by digest.
        ([*LOCK, "--no-way-back"], [ONE, TWO]),
        (["--lock", "all.lock", *SPARE], [ONE, TWO, PAGES]),
        # The other libraries of its distributions are searched for GPU code.
        (["--lock", "one.lock", *ARCH, "--no-way-back"], [ONE, TWO]),
    ],
)
def test_openings_for_facts_work_and_check_and_one_listing(
    site: Made, pages: Path, tmp_path: Path, options: Sequence[str], slimmed: Sequence[str]
) -> None:
    # As pip install --target makes it: its name doesn't tell that distributions are there.
    folder = site.folder.rename(tmp_path.resolve() / "target")
    shutil.copy(pages, folder / PAGES)
    save_lock(with_pages(trace(folder)), tmp_path / "pages.lock")
    save_lock(with_pages(trace(folder), site.lock), tmp_path / "all.lock")
    save_lock(site.lock, tmp_path / "both.lock")
    save_lock(lock_of(folder / ONE), tmp_path / "one.lock")
    opened, listed, _ = slim(folder, tmp_path / "log.json", *options, "--yes")
    # All are planned before the first is cut: the shortest holes of all stay.
    times = 4 if "--spare" in options else 3
    assert {name: opened[name] for name in slimmed} == dict.fromkeys(slimmed, times)
    assert {opened[name] for name in {ONE, TWO, PAGES, HOST}.difference(slimmed)} == {1}
    assert listed[str(folder)] == listed["gpu/lib"] == 1


def test_openings_of_slimmed_libraries(site: Made, tmp_path: Path) -> None:
    """For facts, which have the digest if it is asked for; then for the work, or the check."""
    folder = site.folder.resolve()
    again = [*ARCH, *SPARE, "--yes"]
    slim(folder, tmp_path / "log.json", *again)
    for options, most in ((again, 1), (["check"], 2), (["undo", "--yes"], 2)):
        opened, *_ = slim(folder, tmp_path / "log.json", *options)
        assert {opened[ONE], opened[TWO]} == {most}, options


def test_check_reads_record_files_before_there_are_threads(site: Made, tmp_path: Path) -> None:
    """Each thread would read all of them, and hold up those that hash."""
    folder = site.folder.resolve()
    slim(folder, tmp_path / "log.json", *ARCH, "--no-way-back", "--yes")
    record = f"{site.info.name}/RECORD"
    opened, _, in_threads = slim(folder, tmp_path / "log.json", "check")
    assert (opened[record], in_threads[record], in_threads[ONE]) == (1, 0, 1)
