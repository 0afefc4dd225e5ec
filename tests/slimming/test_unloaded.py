"""Libraries that no test loaded: ``slim --never-loaded --spare`` moves their code into spares."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from pytest_negativa.cli.main import main
from pytest_negativa.gpucode.source import digest_of
from pytest_negativa.images.report import report_image
from pytest_negativa.models.base import Listing
from pytest_negativa.models.lock import LeftOut, Lock, seal
from pytest_negativa.models.pages import HostUsage
from pytest_negativa.models.slimming import SlimRow, SlimStatus
from pytest_negativa.pages.misses import Misses
from pytest_negativa.pages.page_logs import read_misses
from pytest_negativa.slimming.check import check_tree
from pytest_negativa.slimming.manifest import load_manifest
from pytest_negativa.slimming.request import SlimOptions, SlimRequest
from pytest_negativa.slimming.slim import slim_trees, undo_trees
from pytest_negativa.slimming.spares import SpareTarget
from pytest_negativa.slimming.tree import scan
from pytest_negativa.slimming.worklist import runs_below
from pytest_negativa.storage.lockfile import save_lock
from tests.support.compacting import needs_compiler
from tests.support.cutting import PAGES, compile_library, logged, needs_stub, trace_of
from tests.support.made_site import HOST, ONE, TWO, Made
from tests.support.sites import digests, with_pages, wrong_files

pytestmark = [needs_compiler, needs_stub]

OTHER = "other/libother.so"
PAGES_NAME = "host/libpages.so"
NOT_LOADED = "not loaded by any test"
CODE = 238_000
"""Bytes of GPU code that a library registers."""
# Prints what the GPU code and the functions of a library give.
USE = """
import ctypes, hashlib, sys
library = ctypes.CDLL(sys.argv[1])
library.registered.restype = ctypes.c_void_p
print(hashlib.sha256(ctypes.string_at(library.registered(), int(sys.argv[2]))).hexdigest())
"""
SUM = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).sum(0, int(sys.argv[2])))"


@dataclass(frozen=True)
class Deployment:
    """A site whose tests loaded ``ONE`` and ``HOST`` alone; ``pages`` holds CPU code."""

    site: Made
    lock: Lock
    folder: Path

    @property
    def pages(self) -> Path:
        return self.site.folder / PAGES_NAME

    @property
    def trace(self) -> HostUsage:
        """Of a run that loaded ``HOST``."""
        trace, host = trace_of(self.folder / self.pages.name), self.site.host
        sha256 = digest_of(host)
        assert sha256 is not None
        [one] = trace.libraries
        one = msgspec.structs.replace(
            one, sha256=sha256, size=host.stat().st_size, paths=(str(host),), watched=(), touched=()
        )
        return msgspec.structs.replace(trace, libraries=(one,))

    def slim(self, **request: object) -> dict[str, SlimRow]:
        """Slim with a trace of CPU code; nothing is loaded for a check."""
        values = {
            "paths": (self.site.folder,),
            "lock": with_pages(self.trace, self.lock),
            "never_loaded": True,
            "options": SlimOptions(spare=SpareTarget(self.folder / "spares")),
            **request,
        }
        report = slim_trees(SlimRequest(**values))  # type: ignore[arg-type]
        return {row.path: row for row in report.rows}

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    def use(self, pages: int = PAGES) -> tuple[list[str], list[Misses]]:
        """What the two libraries do, and what came back for it, which the log has."""
        logs = self.logs
        shutil.rmtree(logs, ignore_errors=True)
        outputs = [
            subprocess.run(
                [sys.executable, "-c", script, str(path), str(size)],
                env=logged(logs),
                capture_output=True, text=True, check=True,
            ).stdout
            for script, path, size in ((USE, self.site.two, CODE), (SUM, self.pages, pages))
        ]  # fmt: skip
        return outputs, [one for one in read_misses([logs]) if one.pages] if logs.exists() else []


@pytest.fixture
def deployment(site: Made, tmp_path: Path) -> Deployment:
    lock = seal(msgspec.structs.replace(site.lock, libraries=site.lock.libraries[:1]))
    made = Deployment(site, lock, tmp_path)
    shutil.copy(compile_library(tmp_path), made.pages)
    return made


@pytest.mark.slow
def test_their_code_comes_back_and_so_do_the_originals(deployment: Deployment) -> None:
    site, folder = deployment.site, deployment.folder
    before = digests(site.folder)
    output, _ = deployment.use()
    lock, logs = folder / "negativa.lock", deployment.logs
    save_lock(with_pages(deployment.trace, deployment.lock), lock)
    words = ["slim", "--lock", lock, "--spare", folder / "spares"]

    def slim(*more: object) -> dict[str, SlimRow]:
        arguments = map(str, (*words, "--never-loaded", "--json", *more, site.folder))
        done = CliRunner().invoke(main, [*arguments], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        rows = msgspec.json.decode(done.stdout, type=Listing[SlimRow]).rows
        return {row.path: row for row in rows}

    foreseen = slim("--dry-run")
    assert digests(site.folder) == before
    rows = slim()
    assert {path for path, row in rows.items() if row.detail == NOT_LOADED} == {
        TWO,
        PAGES_NAME,
    }
    for path in (TWO, PAGES_NAME):
        assert rows[path].status is SlimStatus.SLIMMED
        assert rows[path].after == foreseen[path].after < rows[path].before // 2
        assert load_manifest(site.folder).slimmed[path].never_loaded
    assert wrong_files(site.folder) == []

    # All of it works, and a second run finds nothing to do.
    again, came_back = deployment.use()
    assert again == output
    assert {one.name for one in came_back} == {site.two.name, deployment.pages.name}
    rows = slim()
    assert rows[TWO].status is SlimStatus.ALREADY and rows[TWO].detail == NOT_LOADED
    sound = [row for tree in scan((site.folder,)) for row in check_tree(tree)]
    assert sound and all(row.status is SlimStatus.SOUND for row in sound)

    # What came back stays, if the lock knows it.
    some, _ = deployment.use(30)
    command = ["lock", "--add-misses", *map(str, (logs, site.folder, "-o", lock))]
    done = CliRunner().invoke(main, command, catch_exceptions=False)
    pages = {one.name: len(one.pages) for one in read_misses([logs])}
    told = (f"{name}: keeps {count} pages that came back" for name, count in pages.items() if count)
    assert sorted(done.stdout.splitlines()) == sorted(told)
    kept = slim()
    assert kept[TWO].after > rows[TWO].after
    assert deployment.use(30) == (some, [])

    assert not [row for row in undo_trees((site.folder,)) if row.status is not SlimStatus.UNDONE]
    assert digests(site.folder) == before


@pytest.mark.slow
def test_libraries_that_the_lock_or_the_trace_may_know_stay(deployment: Deployment) -> None:
    """By name, by content, or because the project keeps them."""
    site, lock = deployment.site, deployment.lock

    def is_left(**changed: object) -> bool:
        rows = deployment.slim(
            lock=with_pages(deployment.trace, msgspec.structs.replace(lock, **changed)),
            options=SlimOptions(spare=SpareTarget(deployment.folder / "spares"), dry_run=True),
        )
        # The trace has their content.
        assert {rows[name].status for name in (HOST, OTHER)} == {SlimStatus.LEFT}
        assert rows[PAGES_NAME].status is SlimStatus.WOULD_SLIM
        row = rows.get(TWO)
        if row is None or row.detail == NOT_LOADED:
            return row is None
        assert row.status is SlimStatus.LEFT and "of the project keeps it" in (row.detail or "")
        return True

    assert not is_left()
    assert is_left(exclude=("libtwo.so",))
    assert is_left(exclude=("dist:GPU_code",))
    assert is_left(left_out=(LeftOut(path="elsewhere/libtwo.so", reason="not verified"),))
    soname = LeftOut(path="elsewhere/libnew.so", soname="libtwo.so", reason="not verified")
    assert is_left(left_out=(soname,))

    # An upgraded library of the lock is reported as without the option.
    shutil.copy(site.two, site.one)
    rows = deployment.slim()
    assert rows[ONE].status is SlimStatus.DIFFERENT and rows[TWO].status is SlimStatus.SLIMMED
    assert digest_of(site.one) != digest_of(site.two)


@pytest.mark.slow
def test_without_a_trace_gpu_code_goes_alone(deployment: Deployment) -> None:
    output, _ = deployment.use()
    rows = deployment.slim(lock=deployment.lock)
    assert rows[TWO].status is SlimStatus.SLIMMED and PAGES_NAME not in rows
    again, came_back = deployment.use()
    assert again == output
    assert [one.name for one in came_back] == [deployment.site.two.name]

    # A lock that needs all of it brings the original back.
    left = LeftOut(path=TWO, reason="not verified")
    lock = seal(msgspec.structs.replace(deployment.lock, left_out=(left,)))
    row = deployment.slim(lock=lock)[TWO]
    assert row.status is SlimStatus.UNDONE and "the lock leaves it out" in (row.detail or "")

    # With a trace, all goes that can; and a lock that knows it gives it back.
    both = deployment.slim()
    assert both[PAGES_NAME].after < both[PAGES_NAME].before // 2
    # Also those that have no GPU code.
    assert len(report_image(deployment.site.folder).slimmed) == 3
    lock = with_pages(deployment.trace, deployment.site.lock)
    known = deployment.slim(lock=lock, never_loaded=False)
    assert known[TWO].status is SlimStatus.SLIMMED and known[TWO].detail is None
    assert known[TWO].after > both[TWO].after
    assert not load_manifest(deployment.site.folder).slimmed[TWO].never_loaded


@pytest.mark.slow
def test_what_processes_need_before_pages_come_back_stays(deployment: Deployment) -> None:
    loader = deployment.pages.with_name("ld-linux-x86-64.so.2")
    deployment.pages.rename(loader)
    rows = deployment.slim()
    assert {(row.path, row.detail) for row in rows.values() if row.status is SlimStatus.LEFT} >= {
        (f"host/{loader.name}", "it is a part of the C library"),
    }


@pytest.mark.parametrize(
    ("path", "is_kept"),
    [
        ("lib/libc.so.6", True),
        ("lib/ld-2.31.so", True),
        ("lib/libpython3.12.so.1.0", True),
        ("site-packages/pytest_negativa/pages/_watch.so", True),
        ("lib/libc10.so", False),
        ("lib/libcudart.so.13", False),
    ],
)
def test_what_stays_by_its_name(path: str, is_kept: bool) -> None:
    assert (runs_below(Path("/env", path), (path,)) is not None) == is_kept
