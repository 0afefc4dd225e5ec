"""Libraries that no run opened: ``slim`` moves those that ``remove`` names whole into the spare."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from pytest_negativa.analysis.lock import widen_lock
from pytest_negativa.cli.main import main
from pytest_negativa.models.base import Listing
from pytest_negativa.models.lock import LeftOut, Lock, seal
from pytest_negativa.models.pages import HostLibrary, HostUsage
from pytest_negativa.models.slimming import SlimRow, SlimStatus
from pytest_negativa.pages.misses import Miss, Misses
from pytest_negativa.pages.page_watch import read_processor
from pytest_negativa.slimming.check import check_tree
from pytest_negativa.slimming.explain import explain_error, slimmed_in
from pytest_negativa.slimming.manifest import load_manifest
from pytest_negativa.slimming.request import SlimOptions, SlimRequest
from pytest_negativa.slimming.slim import slim_trees
from pytest_negativa.slimming.spares import SpareTarget, find_spare
from pytest_negativa.slimming.tree import MANIFEST_NAME, scan
from pytest_negativa.slimming.worklist import _libraries_of_negativa
from pytest_negativa.storage.lockfile import save_lock
from tests.support.compacting import needs_compiler
from tests.support.compiling import compile_c, compile_shared
from tests.support.cutting import needs_stub
from tests.support.faults import PlantedFault
from tests.support.kills import points, run
from tests.support.libraries import NEGATIVA
from tests.support.made_site import HOST, ONE, TWO, Made
from tests.support.sites import digests, make_wheel, pip_install, with_pages, wrong_files

pytestmark = [needs_compiler, needs_stub]

LATER, FIRST = "used/liblater.so", "used/libfirst.so"
WHY = "no run opened it"
LOAD = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"


@dataclass(frozen=True)
class Deployment:
    """A site whose traced run opened ``ONE`` and ``HOST``, and a program that needs ``LATER``.

    Attributes:
        before: digests of the files.
        sizes: of the libraries, in bytes.
    """

    site: Path
    folder: Path
    program: Path
    before: dict[str, str]
    sizes: dict[str, int] = field(default_factory=dict)

    def trace(self, *names: str, folder: str | None = None) -> HostUsage:
        """The trace of a run that opened these libraries, and touched no page that was watched."""
        libraries = (
            HostLibrary(
                sha256=self.before[name],
                size=self.sizes[name],
                build_id=None,
                paths=(f"{folder or self.site}/{name}",),
                watched=(),
                touched=(),
            )
            for name in names
        )
        return HostUsage(
            processors=(read_processor(),),
            processes={"run": 1},
            libraries=tuple(libraries),
            incomplete=(),
        )

    def words(self, *more: object, opened: tuple[str, ...] = (ONE, HOST)) -> list[str]:
        lock = self.folder / "negativa.lock"
        save_lock(with_pages(self.trace(*opened)), lock)
        spare = ["--spare", self.folder / "spares", "--lock", lock]
        return [str(word) for word in ("slim", "--arch=sm_90", *spare, *more, self.site)]

    def slim(self, *more: object, opened: tuple[str, ...] = (ONE, HOST)) -> dict[str, SlimRow]:
        return rows_of(invoke(*self.words("--json", *more, opened=opened)))

    def slim_by(self, lock: Lock, *remove: str, dry_run: bool = False) -> dict[str, SlimRow]:
        spare = SpareTarget(self.folder / "spares", remove=remove)
        options = SlimOptions(spare=spare, dry_run=dry_run)
        report = slim_trees(SlimRequest((self.site,), lock, options=options))
        return {row.path: row for row in report.rows}

    def undo(self) -> dict[str, SlimRow]:
        return rows_of(invoke("slim", "undo", "--json", self.site))

    def load(self, path: Path) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-I", "-c", LOAD, str(path)]
        return subprocess.run(words, capture_output=True, text=True, check=False)


def invoke(*words: object) -> Result:
    return CliRunner().invoke(main, [*map(str, words)], catch_exceptions=False)


def rows_of(done: Result) -> dict[str, SlimRow]:
    assert done.exit_code == 0, done.output
    rows = msgspec.json.decode(done.stdout, type=Listing[SlimRow]).rows
    return {row.path: row for row in rows}


def moved(rows: Mapping[str, SlimRow]) -> set[str]:
    return {path for path, row in rows.items() if row.moved}


@pytest.fixture
def deployment(site: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    build = tmp_path / "build"
    first = compile_shared("spare/later.c", build / "libfirst.so", "-DFIRST")
    flags = ("-L", str(build), "-Wl,--no-as-needed", "-lfirst", "-Wl,-rpath,$ORIGIN")
    large = ("-Wl,-z,noexecstack", f"-Wl,--format=binary,{site.one},--format=default")
    later = compile_shared("spare/later.c", build / "liblater.so", *flags, *large)
    rpath = (f"-Wl,-rpath,{site.folder / 'used'}", f"-Wl,-rpath-link,{build}")
    program = compile_c("spare/main.c", tmp_path / "program", *flags[:2], "-llater", *rpath)
    wheel = make_wheel(tmp_path, "used-code", "1.0", {LATER: later, FIRST: first})
    pip_install(site.folder, wheel)
    monkeypatch.chdir(tmp_path)
    made = Deployment(site.folder, tmp_path, program, digests(site.folder))
    made.sizes.update({name: (site.folder / name).stat().st_size for name in made.before})
    return made


@pytest.mark.slow
def test_from_the_list_to_undo(deployment: Deployment) -> None:
    site = deployment.site
    (deployment.folder / "negativa.yaml").write_text("remove: [dist:used_code, dist:gpu-code]\n")
    foreseen = deployment.slim("--dry-run")
    assert digests(site) == deployment.before
    done = invoke(*deployment.words())
    assert done.exit_code == 0, done.output
    table = done.stdout.partition("moved whole")[2]
    assert all(name in table for name in (TWO, LATER)) and ONE not in table
    # Of a library that is too small, nothing is told.
    known = f"negativa: not moved whole: {ONE} (a run opened it, "
    assert known in done.stderr
    rows = deployment.slim()
    assert moved(rows) == moved(foreseen) == {TWO, LATER}
    for name in moved(rows):
        row, entry = rows[name], load_manifest(site).slimmed[name]
        assert (row.status, row.detail) == (SlimStatus.ALREADY, WHY)
        assert row.after == foreseen[name].after == (site / name).stat().st_size < 6000
        assert entry.spare == str(find_spare(site / name)) and entry.certificate is None
        assert entry.original_sha256 == deployment.before[name]
    assert load_manifest(site).slimmed[TWO].gpu_code_removed > 200_000
    assert wrong_files(site) == []
    checked = {row.path: row for tree in scan((site,)) for row in check_tree(tree)}
    is_whole = {name for name in checked if checked[name].detail == "moved whole; its spare fits"}
    assert is_whole == {TWO, LATER}
    assert {row.status for row in checked.values()} == {SlimStatus.SOUND}
    assert invoke("inspect", site).exit_code == 0

    assert {row.status for row in deployment.undo().values()} == {SlimStatus.UNDONE}
    assert digests(site) == deployment.before
    assert list((deployment.folder / "spares").glob("*.spare")) == []
    assert deployment.load(site / LATER).returncode == 0


def test_globs_that_match_nothing_and_libraries_that_are_kept(deployment: Deployment) -> None:
    """One typo beside a glob that matches is told; what keep.libraries names is not moved."""
    settings = "remove: [libtwo.so, liblatre.so, dist:used-code]\nkeep: {libraries: [libtwo.*]}\n"
    (deployment.folder / "negativa.yaml").write_text(settings)
    done = invoke(*deployment.words("--dry-run"))
    assert "remove: liblatre.so names no library here that can go whole" in done.stderr
    assert done.stderr.count("names no library") == 1
    assert f"not moved whole: {TWO} (" in done.stderr and "keep.libraries" in done.stderr
    assert moved(deployment.slim("--dry-run")) == {LATER}


def test_a_moved_tree(deployment: Deployment) -> None:
    """The message holds no folder that was moved away, and the command that it names works."""
    deployment.slim("--remove", "liblater.so")
    site = deployment.site.rename(deployment.folder / "moved")
    message = deployment.load(site / LATER).stderr
    assert f"{site / LATER}: undefined symbol: " in message and str(deployment.site) not in message
    assert "run negativa slim undo on the folder above that has negativa-slim.json" in message
    [folder] = [above for above in (site / LATER).parents if (above / MANIFEST_NAME).is_file()]
    undone = invoke("slim", "undo", "--yes", folder)
    assert undone.exit_code == 0, undone.output
    assert deployment.load(site / LATER).returncode == 0
    assert digests(site)[LATER] == deployment.before[LATER]
    assert wrong_files(site) == []


def test_no_trace_of_this_environment_or_of_all_tests_moves_nothing(
    deployment: Deployment,
) -> None:
    foreign = invoke(*deployment.words("--remove", "lib*.so", opened=()))
    assert foreign.exit_code == 1 and "nothing of the lock is there" in foreign.stderr
    assert "remove: lib*.so names no library here that can go whole" in foreign.stderr
    words = deployment.words("--remove", "lib*.so")
    trace = msgspec.structs.replace(deployment.trace(ONE, HOST), failed=("R: 7 tests failed",))
    save_lock(with_pages(trace), deployment.folder / "negativa.lock")
    failed = invoke(*words)
    assert "remove moves no library: it goes with " in failed.stderr
    assert "R: 7 tests failed; CPU code that only such tests need" in failed.stderr
    assert not moved(deployment.slim(opened=(ONE, HOST)))


def test_a_spare_that_is_named_around_its_tree_is_left_alone(deployment: Deployment) -> None:
    """undo holds the tree: it would wait for itself to hold a folder around it."""
    deployment.slim("--remove", "libtwo.so")
    manifest, named = deployment.site / MANIFEST_NAME, deployment.folder / "libtwo.so.spare"
    named.write_bytes(b"not ours")
    spare = load_manifest(deployment.site).slimmed[TWO].spare
    assert spare is not None
    manifest.write_text(manifest.read_text().replace(spare, str(named)))
    words = (NEGATIVA, "slim", "undo", "--yes", deployment.site)
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode in (0, 1) and named.read_bytes() == b"not ours"


def test_the_python_that_runs_negativa_stays(deployment: Deployment) -> None:
    own = Path(sysconfig.get_config_var("DESTSHARED")).resolve()
    libraries = _libraries_of_negativa(scan((deployment.site,))[0])
    assert {str(path) for path in own.glob("*.so")} <= libraries
    assert any("libc.so" in path for path in libraries)


def test_trees_share_a_folder_of_spares(deployment: Deployment, tmp_path: Path) -> None:
    """Messages of different lengths name the trees, and the spare of the content is one."""
    other = tmp_path / "an-environment-with-a-longer-path"
    shutil.copytree(deployment.site, other, symlinks=True)
    trees = [deployment, replace(deployment, site=other)]
    for tree in trees:
        assert TWO in moved(tree.slim("--remove", "libtwo.so"))
    for tree in trees:
        assert invoke("slim", "check", tree.site).exit_code == 0
    for tree in trees:
        assert {row.status for row in tree.undo().values()} == {SlimStatus.UNDONE}
        assert digests(tree.site) == deployment.before


@pytest.mark.planted_fault(
    "a program needs a library that was moved whole", says="it was moved whole into its spare"
)
def test_the_message_names_library_spare_and_command(
    deployment: Deployment, fault: PlantedFault
) -> None:
    site = deployment.site

    def start() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [deployment.program], env={"SETTING": "on"}, capture_output=True, text=True, check=False
        )

    assert (start().returncode, start().stdout) == (0, "42 on of program\n")
    deployment.slim("--remove", "liblater.so")
    spare = find_spare(site / LATER)
    message = (
        f"{site / LATER}: undefined symbol: [negativa] it was moved whole into its spare "
        f"{spare.name}. To have it back, run negativa slim undo on the folder above that has "
        "negativa-slim.json. To keep it, take it out of remove in negativa.yaml, or trace a run "
        "that opens it; then slim again."
    )
    fault.check(start().stderr)
    assert start().returncode == 127
    assert start().stderr == f"{deployment.program}: symbol lookup error: {message}\n"
    assert deployment.load(site / LATER).stderr.endswith(f"OSError: {message}\n")
    # The spare is no library, though it has nearly all of one.
    assert "no loadable segments" in deployment.load(spare).stderr
    told = explain_error("CUDA error: named symbol not found", slimmed_in([site]), [site])
    assert "1 library was moved whole: no process can load it before negativa slim undo." in told
    assert f"  {site / LATER}" in told

    # Without its spare it can't come back.
    spare.rename(spare.with_suffix(".away"))
    assert invoke("slim", "check", "--require", site).exit_code == 1
    assert invoke("slim", "undo", "--yes", site).exit_code == 1
    spare.with_suffix(".away").rename(spare)
    assert invoke("slim", "undo", "--yes", site).exit_code == 0
    assert start().returncode == 0


@pytest.mark.slow
def test_a_library_that_is_needed_now_comes_back(deployment: Deployment) -> None:
    """A run opened it, or the list has it no more."""
    remove = ("--remove", "lib*.so")
    assert moved(deployment.slim(*remove)) == {TWO, LATER}
    rows = deployment.slim(*remove, opened=(ONE, HOST, LATER))
    assert moved(rows) == {TWO}
    # It has its code, and a spare for what is never loaded of it.
    assert rows[LATER].status is SlimStatus.SLIMMED and rows[LATER].after > 400_000
    assert deployment.load(deployment.site / LATER).returncode == 0
    assert moved(deployment.slim(*remove)) == {TWO, LATER}
    rows = deployment.slim("--remove", "libtwo.so")
    assert moved(rows) == {TWO} and rows[LATER].status is SlimStatus.UNDONE
    assert not moved(deployment.slim())
    assert deployment.load(deployment.site / TWO).returncode == 0


@pytest.mark.slow
def test_beside_a_lock(deployment: Deployment, site: Made) -> None:
    """What the lock knows stays, by content or name, and what came back."""
    remove = ("libtwo.so", "dist:used.code")

    def goes(lock: Lock, *opened: str, folder: str | None = None) -> set[str]:
        made = with_pages(deployment.trace(*(opened or (HOST,)), folder=folder), lock)
        return moved(deployment.slim_by(made, *remove, dry_run=True))

    lock = msgspec.structs.replace(site.lock, libraries=site.lock.libraries[:1])
    assert goes(lock) == {TWO, LATER}
    assert goes(site.lock) == {LATER}
    soname = LeftOut(path="elsewhere/libnew.so", soname="liblater.so", reason="not verified")
    assert goes(msgspec.structs.replace(lock, left_out=(soname,))) == {TWO}
    assert goes(lock, HOST, LATER) == {TWO}
    assert goes(lock, LATER, folder="/elsewhere/another.so") == {TWO}
    [one] = deployment.trace(LATER).libraries
    other = msgspec.structs.replace(one, sha256="0" * 64, size=1)
    trace = msgspec.structs.replace(deployment.trace(HOST), libraries=(other,))
    assert moved(deployment.slim_by(with_pages(trace, lock), *remove, dry_run=True)) == {TWO}
    assert moved(deployment.slim_by(seal(lock), *remove, dry_run=True)) == set()
    original = bytes.fromhex(deployment.before[LATER])
    missed = Misses("liblater.so", original, deployment.sizes[LATER], {0: Miss(1, 0, False)})
    known = with_pages(deployment.trace(HOST), lock)
    widened, _ = widen_lock(known, [missed], [])
    assert moved(deployment.slim_by(widened, *remove, dry_run=True)) == {TWO}

    assert moved(deployment.slim_by(known, *remove)) == {TWO, LATER}
    # No rule concerns it any more.
    row = deployment.slim_by(known, "libtwo.so")[LATER]
    assert row.status is SlimStatus.UNDONE and "now a run opened it" in (row.detail or "")
    assert digests(deployment.site)[LATER] == deployment.before[LATER]


def test_a_list_without_a_run_moves_nothing(deployment: Deployment) -> None:
    (deployment.folder / "negativa.yaml").write_text("remove: dist:gpu-code\n")
    words = ("slim", "--arch=sm_90", "--dry-run", "--spare", deployment.folder / "spares")
    done = invoke(*words, deployment.site)
    assert done.exit_code == 0 and "moved whole" not in done.stdout
    assert "negativa.yaml:1:9: remove moves no library: it goes with --spare" in done.stderr
    done = invoke(*deployment.words("--dry-run", "--remove", "dist:gpu-cod"))
    assert done.exit_code == 0
    assert "remove: dist:gpu-cod names no library here that can go whole" in done.stderr
    refused = invoke(*words, "--remove", "libtwo.so", deployment.site)
    assert refused.exit_code == 2 and "--remove goes with --spare and a lock" in refused.stderr


@pytest.mark.nightly
@pytest.mark.slow
def test_killed(deployment: Deployment) -> None:
    """Each library is whole or in its spare, and the next run or undo finishes the work."""
    site = deployment.site
    command = [str(NEGATIVA), *deployment.words("--remove", "lib*.so", "--jobs", 2)]
    undisturbed = run(command, deployment.folder)
    assert undisturbed.status == 0, undisturbed
    after = digests(site)
    for at in points(undisturbed.changes, seed=1):
        assert {row.status for row in deployment.undo().values()} <= {SlimStatus.UNDONE}
        assert digests(site) == deployment.before
        run(command, deployment.folder, at=at)
        found = digests(site)
        assert all(found[name] in (deployment.before[name], after[name]) for name in (TWO, LATER))
        again = run(command, deployment.folder)
        assert again.status == 0, (at, again)
        assert {k: v for k, v in digests(site).items() if k != MANIFEST_NAME} == {
            k: v for k, v in after.items() if k != MANIFEST_NAME
        }
