"""CPU code in a lock: from a run to smaller libraries elsewhere, and back when it is needed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from pytest_negativa.cli.main import main
from pytest_negativa.gpucode.source import digest_of
from pytest_negativa.models.lock import seal
from pytest_negativa.models.pages import HostLibrary, HostUsage
from pytest_negativa.models.spans import PAGE_SIZE, Span, covers, size
from pytest_negativa.pages.page_logs import read_misses
from pytest_negativa.pages.page_watch import read_processor
from pytest_negativa.slimming.recipes import lock_in_words
from pytest_negativa.storage.lockfile import load_lock, save_lock
from pytest_negativa.storage.runs import Run
from tests.support.compiling import needs_compiler
from tests.support.cutting import compile_library, logged, needs_stub
from tests.support.faults import PlantedFault
from tests.support.libraries import QUICKSTART_LIBRARY
from tests.support.paged import compile_constants, needs_page_watch, symbols_of
from tests.support.recordings import rewrite
from tests.support.sessions import Project
from tests.support.sites import with_pages

SUM = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).sum(*map(int, sys.argv[2:])))"


def negativa(*words: object, status: int = 0) -> Result:
    done = CliRunner().invoke(main, [*map(str, words)], catch_exceptions=False)
    assert done.exit_code == status, done.output
    return done


@pytest.mark.slow
@needs_page_watch
@needs_stub
def test_from_a_run_to_smaller_libraries_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs, logs = tmp_path / "ours", tmp_path / "theirs", tmp_path / "logs"
    for folder in (ours, theirs):
        folder.mkdir()
    library = compile_library(ours)
    monkeypatch.chdir(ours)

    def trace(first: int, last: int) -> None:
        words = [sys.executable, "-m", "pytest_negativa", "trace", "--cpu", "--", sys.executable]
        command = [*words, "-c", SUM, str(library), str(first), str(last)]
        subprocess.run(command, check=True, capture_output=True)

    trace(0, 3)
    done = negativa("lock")
    assert done.stdout.startswith("negativa.lock: CPU code and data: ")
    assert "NOT PROVED" in done.stderr
    lock = Path("negativa.lock").rename(theirs / "negativa.lock")
    assert load_lock(lock).proof.incomplete == ()
    run = Path(".negativa/latest").resolve()

    # On another machine, without the run.
    monkeypatch.chdir(theirs)
    Path("site").mkdir()
    copy = Path(shutil.copy(library, "site"))
    stays = negativa("slim", "--no-way-back", "site", status=1).stderr
    assert "CPU code of the lock leaves with --spare alone: all of it stays" in stays
    assert stays.endswith("nothing to slim in site: the lock has CPU code alone\n")
    slim = ("slim", "--spare", theirs / "spares", "site")
    negativa(*slim)
    small = copy.stat().st_size
    assert small < library.stat().st_size - 700_000

    def missed(first: int, last: int) -> int:
        shutil.rmtree(logs, ignore_errors=True)
        command = [sys.executable, "-c", SUM, str(copy.resolve()), str(first), str(last)]
        outputs = [
            subprocess.run(words, env=logged(logs), check=True, capture_output=True).stdout
            for words in (command, [*command[:3], str(library), *command[4:]])
        ]
        assert outputs[0] == outputs[1]
        return sum(len(one.pages) for one in read_misses([logs])) if logs.exists() else 0

    assert missed(0, 3) == 0
    count = missed(100, 130)
    assert count >= 30
    then = negativa("misses", "--log", logs, "site").stderr
    assert then.endswith(f"Next: negativa lock --add-misses {logs} site\n")
    # The libraries are not needed.
    wider = negativa("lock", "--add-misses", logs, tmp_path / "ours").stdout
    assert f"{library.name}: keeps {count} pages that came back\n" in wider
    again = negativa("lock", "--add-misses", logs).stdout
    assert again == "negativa.lock: nothing of what it removes came back\n"
    negativa(*slim)
    assert copy.stat().st_size > small + 29 * PAGE_SIZE
    assert missed(100, 130) == 0

    # What another run touches stays, too.
    monkeypatch.chdir(ours)
    trace(60, 63)
    used = negativa("lock", "--add-uses", Path(".negativa/latest").resolve(), "-o", lock)
    assert f"{library.name}: keeps " in used.stdout and "pages that were used" in used.stdout
    assert negativa("lock", "--add-uses", run, "-o", lock).stdout.startswith(f"{lock}: nothing of")
    monkeypatch.chdir(theirs)
    negativa(*slim)
    assert missed(60, 63) == 0
    negativa("slim", "undo", "site")
    assert digest_of(copy) == digest_of(library)


READS = """
import ctypes, os, sys
is_again = os.path.exists("again")
open("again", "w").close()
ctypes.CDLL(sys.argv[1]).read_block(9 if is_again else 3)
"""


@pytest.mark.slow
@needs_page_watch
@needs_compiler
def test_data_that_only_the_proof_used_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, block = compile_constants(tmp_path), 256 << 10
    monkeypatch.chdir(tmp_path)
    program = [sys.executable, "-m", "pytest_negativa", "trace", "--cpu", "--", sys.executable]
    subprocess.run([*program, "-c", READS, str(library)], check=True, capture_output=True)
    negativa("verify", "--cpu")
    negativa("lock")
    rows = load_lock(Path("negativa.lock")).libraries
    [row] = [row for row in rows if row.path == library.name]
    [first] = [at for at, name in symbols_of(library).items() if name == "blocks"]
    middles = {n: first + n * block + block // 2 for n in range(12)}
    assert {n for n, at in middles.items() if not covers(row.spans, at, at + 1)} == {3, 9}


def usage_of(*libraries: Path, incomplete: tuple[str, ...] = ()) -> HostUsage:
    rows = (
        HostLibrary(
            sha256=str(digest_of(path)),
            size=path.stat().st_size,
            build_id=None,
            paths=(str(path),),
            watched=(Span(0, 2 * PAGE_SIZE),),
            touched=(Span(0, PAGE_SIZE),),
        )
        for path in libraries
    )
    return HostUsage(
        processors=(read_processor(),),
        processes={"run": 1},
        libraries=tuple(rows),
        incomplete=incomplete,
    )


def test_another_file_at_the_same_place_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only the tests or the system have is not here. Many packages have files of one name."""
    monkeypatch.chdir(tmp_path)
    files = {name: Path("site", name, "lib.so") for name in ("ours", "theirs")}
    for name, file in files.items():
        file.parent.mkdir(parents=True)
        file.write_bytes(QUICKSTART_LIBRARY.read_bytes() + name.encode())
    gone = Path(shutil.copy(QUICKSTART_LIBRARY, "lib.so"))
    lock = with_pages(usage_of(gone))
    [row] = lock.libraries

    def named(path: str) -> Result:
        here = msgspec.structs.replace(row, path=path, distribution="ours", version="1.0")
        save_lock(
            seal(msgspec.structs.replace(lock, libraries=(here,))), tmp_path / "negativa.lock"
        )
        return negativa("slim", "--spare", tmp_path / "spares", "--require", "site", status=1)

    other = named("ours/lib.so")
    assert "ours/lib.so: another file: " in other.stdout and "theirs" not in other.stdout
    assert "(of ours 1.0)" in other.stdout and "nothing was done: " in other.stderr
    assert named("gone/lib.so").stdout == ""


def test_a_lock_in_words() -> None:
    lock = with_pages(usage_of(QUICKSTART_LIBRARY))
    assert lock_in_words(lock) == f"the lock of run {lock.proof.run}, NOT PROVED"


@pytest.mark.planted_fault(
    "A lock is widened by a run that may have touched more CPU code than is known.",
    says="not added to the lock: a library was gone; trace again",
)
def test_a_run_with_an_incomplete_trace_widens_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: PlantedFault
) -> None:
    monkeypatch.chdir(tmp_path)
    lock = with_pages(usage_of(QUICKSTART_LIBRARY))
    save_lock(lock, tmp_path / "negativa.lock")
    run = Run(tmp_path / ".negativa" / "run")
    run.folder.mkdir(parents=True)
    usage = usage_of(QUICKSTART_LIBRARY, incomplete=("a library was gone",))
    run.host_usage_file.write_bytes(msgspec.json.encode(usage))
    fault.check(negativa("lock", "--add-uses", run, status=1).stderr)
    assert load_lock(tmp_path / "negativa.lock") == lock


@pytest.mark.slow
def test_beside_gpu_code(project: Project) -> None:
    """One row for both, or a reason for which the lock lacks CPU code."""
    rewrite(project, "tests/trace/h200.jsonl")
    project.negativa("combine", "tests")
    run = Run((project.results / "latest").resolve())
    here = project.folder / "quickstart" / QUICKSTART_LIBRARY.name
    gpu = ("lock", "--unproved")

    usage = usage_of(here, incomplete=("a library was gone",))
    run.host_usage_file.write_bytes(msgspec.json.encode(usage))
    done = project.negativa(*gpu)
    assert "left out: CPU code: a library was gone; trace again\n" in done.stdout
    lock = load_lock(project.folder / "negativa.lock")
    assert not lock.has_pages and not any(row.pages for row in lock.libraries)
    assert "CPU code" in {row.path for row in lock.left_out}

    run.host_usage_file.write_bytes(msgspec.json.encode(usage_of(here)))
    done = project.negativa(*gpu)
    assert "CPU code and data: 1 library, 4.1 kB unused\n" in done.stdout
    # It has to be asked for GPU code that is not proved, as ever.
    assert "it was not verified" in project.negativa("lock", status=1).stderr
    both = load_lock(project.folder / "negativa.lock")
    [old], [new] = lock.libraries, both.libraries
    assert new == msgspec.structs.replace(old, pages="1") and size(new.spans) == PAGE_SIZE
    assert done.stderr.count("NOT PROVED") == 1
