"""A lock is widened by what came back to libraries that were slimmed with it."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from pytest_negativa.analysis.lock import missed_code, widen_files, widen_lock
from pytest_negativa.arch import ComputeCapability
from pytest_negativa.cli.main import main
from pytest_negativa.installed.sites import find_code_distributions
from pytest_negativa.models.code_files import WatchedFiles
from pytest_negativa.models.lock import Lock, LockedLibrary, Place
from pytest_negativa.models.plan import KeepReason
from pytest_negativa.models.trace import LibraryRecord, Role, TracedLibrary, Usage
from pytest_negativa.pages.misses import Miss, Misses
from pytest_negativa.pages.page_logs import read_misses
from pytest_negativa.planning.lock import make_lock
from pytest_negativa.slimming.request import SlimOptions, SlimRequest
from pytest_negativa.slimming.slim import slim_trees
from pytest_negativa.slimming.spares import SpareTarget, find_spare
from pytest_negativa.storage.lockfile import load_lock, save_lock
from pytest_negativa.tracing.merge import merge_traces
from tests.support.code_files import planned_files
from tests.support.compacting import needs_compiler, read, vaddr_of
from tests.support.cutting import logged, needs_stub
from tests.support.made_site import ONE, Made
from tests.support.sites import digest_field
from tests.support.traces import header, records, write

SM_90 = ComputeCapability(9, 0)
READ = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
base = ctypes.c_size_t.from_address(library._handle).value
ctypes.string_at(base + int(sys.argv[2]), int(sys.argv[3]))
"""


def slim(site: Made, lock: Lock, spares: Path) -> None:
    options = SlimOptions(spare=SpareTarget(spares))
    report = slim_trees(SlimRequest(paths=(site.folder,), lock=lock, options=options))
    assert not report.failed, [row.detail for row in report.rows]


@needs_compiler
@needs_stub
@pytest.mark.slow
def test_what_came_back_stays(site: Made, tmp_path: Path) -> None:
    library_map = read(site.one)
    kept = {code.offset for row in site.lock.libraries for code in row.kept if row.path == ONE}
    block = next(
        b
        for b in library_map.iter_code()
        if b.payload.start not in kept and b.payload.size > 39_000
    )
    lock_file, logs = tmp_path / "negativa.lock", tmp_path / "logs"
    save_lock(site.lock, lock_file)

    def use() -> list[Misses]:
        words = (site.one, str(vaddr_of(library_map, block.payload.start)), str(block.payload.size))
        environ = logged(logs)
        subprocess.run([sys.executable, "-c", READ, *words], env=environ, check=True)
        return [misses for misses in read_misses([logs]) if misses.pages]

    slim(site, site.lock, tmp_path / "spares")
    assert use()
    command = ["lock", "--add-misses", *map(str, (logs, site.folder, "-o", lock_file))]
    done = CliRunner().invoke(main, command, catch_exceptions=False)
    assert done.stdout == f"{ONE}: keeps 1 element that came back\n"
    widened = load_lock(lock_file)
    assert widened.proof == site.lock.proof
    [row] = [row for row in widened.libraries if row.path == ONE]
    [before] = [row for row in site.lock.libraries if row.path == ONE]
    [new] = [code for code in row.kept if code not in before.kept]
    assert (new.offset, new.region, new.reason) == (
        block.payload.start,
        block.anchor,
        KeepReason.MISSED,
    )
    assert new.detail == "it came back 1 time"
    assert row.unused_bytes == before.unused_bytes - block.payload.size

    # A damaged spare could hide code.
    spare = find_spare(site.one)
    sound = spare.read_bytes()
    inside = block.payload.start + 8192
    spare.write_bytes(sound[:inside] + b"\xff" * 8 + sound[inside + 8 :])
    failed = CliRunner().invoke(main, command, catch_exceptions=False)
    assert failed.exit_code == 1
    assert "with its spare it does not give the original back" in failed.stderr
    spare.write_bytes(sound)

    slim(site, widened, tmp_path / "spares")
    for log in logs.iterdir():
        log.unlink()
    assert not use()
    again = CliRunner().invoke(main, command, catch_exceptions=False)
    assert again.stdout == f"{lock_file}: nothing of what it removes came back\n"
    assert load_lock(lock_file) == widened


@needs_compiler
def test_pages_that_elements_share(site: Made) -> None:
    """Headers are read of all elements; the payloads that were read are told from the others."""
    library_map = read(site.one)
    region = next(r for r in library_map.iter_regions() if len(r.elements) == 4)
    chosen, other, *_ = region.elements

    def missed(*firsts: int) -> set[int]:
        pages = {first // 4096: Miss(1, first, False) for first in firsts}
        misses = Misses("libone.so.1", bytes(32), library_map.library.size, pages)
        return set(missed_code(misses, library_map, [SM_90]))

    # A device with sm_90 loads the first element of the region.
    assert missed(chosen.header_offset) >= {chosen.payload.start}
    assert missed(other.header_offset) <= {chosen.payload.start}
    assert missed(other.payload.start + 100) >= {other.payload.start}
    inside = (other.payload.start // 4096 + 1) * 4096
    assert inside + 4096 <= other.payload.end
    assert missed(inside) == {other.payload.start}


@pytest.mark.slow
@needs_compiler
def test_a_library_that_is_not_in_the_lock(site: Made) -> None:
    """All of it may leave but for what came back, each time."""
    misses = Misses("libother.so", bytes(32), 12_000, {0: Miss(1, 0, False)})
    once, added = widen_lock(site.lock, [misses], [])
    assert added == {("libother.so", "page"): 1}
    *others, row = once.libraries
    assert others == [*site.lock.libraries] and (row.pages, row.loaded) == ("1-2", False)
    more = Misses("libother.so", bytes(32), 12_000, {1: Miss(1, 0, False)})
    twice, _ = widen_lock(once, [more], [])
    assert twice.libraries[-1].pages == "2"


@pytest.fixture
def cubins(tmp_path: Path) -> LockedLibrary:
    """A distribution in a folder ``site``; a lock keeps one of its four files."""
    names = [f"k/{letter}.cubin" for letter in "abcd"]
    rows = [f"{name},{digest_field(name.encode())},10" for name in names]
    metadata = tmp_path / "site" / "kit-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kit\nVersion: 1.0\n\n")
    (metadata / "RECORD").write_text("".join(f"{row}\n" for row in rows))
    [found] = find_code_distributions([str(tmp_path / "site")])
    sizes = dict.fromkeys(names, 10)
    opened = {"k/d.cubin": sizes.pop("k/d.cubin")}
    plan = planned_files(sizes, opened, distribution="kit", digest=found.code_digest)
    place = Place("kit (files)", "kit", "1.0")
    [files] = make_lock("run", [plan], None, lambda path: place, unproved=True).files
    return files


def kept(files: LockedLibrary) -> list[str | None]:
    assert files.kept_elements == len(files.kept)
    return [code.detail for code in files.kept]


def loaded(folder: Path, *libraries: TracedLibrary) -> Usage:
    """What samples tell that loaded these files."""
    folder.mkdir()
    lines = [
        replace(line, library=one) if isinstance(line, LibraryRecord) else line
        for one in libraries
        for line in records("k")
    ]
    return merge_traces([write(folder, header(role=Role.SAMPLE), lines)])


def test_files_that_samples_loaded_stay(cubins: LockedLibrary, tmp_path: Path) -> None:
    site = str(tmp_path / "site")
    usage = loaded(tmp_path / "by-path", TracedLibrary(path=f"{site}/k/a.cubin", size=10))
    [more] = widen_files([cubins], usage, (), [site])
    assert (kept(more), more.unused_bytes) == (["k/a.cubin", "k/d.cubin"], 20)
    # In a container, at another path.
    digest = hashlib.sha256(b"k/b.cubin").hexdigest()
    usage = loaded(tmp_path / "by-digest", TracedLibrary(path="/b", size=10, sha256=digest))
    [more] = widen_files([cubins], usage, (), [site])
    assert kept(more) == ["k/b.cubin", "k/d.cubin"]
    # Another run watched which files were opened.
    opened = WatchedFiles(
        distribution="kit", version="1.0", site="/", digest=cubins.sha256, files={},
        opened=("k/c.cubin",),
    )  # fmt: skip
    [more] = widen_files([cubins], usage, [opened], [site])
    assert kept(more) == ["k/b.cubin", "k/c.cubin", "k/d.cubin"]
    assert list(widen_files([more], usage, [opened], [site])) == [more]


def test_all_files_stay_if_nothing_tells_which(cubins: LockedLibrary, tmp_path: Path) -> None:
    usage = loaded(tmp_path / "traces", TracedLibrary(path="/b", size=10))
    assert list(widen_files([cubins], usage, (), [str(tmp_path)])) == []
    unseen = WatchedFiles(
        distribution="kit", version="1.0", site="/", digest=cubins.sha256, files={},
        opened=(), unseen="too many",
    )  # fmt: skip
    assert list(widen_files([cubins], usage, [unseen], [str(tmp_path / "site")])) == []
