"""Libraries of the lock's distributions that the proved run never loaded lose all GPU code."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from pytest_negativa.arch import ComputeCapability, ElementKind
from pytest_negativa.cli.main import main
from pytest_negativa.errors import OptionError
from pytest_negativa.installed.owners import Owners
from pytest_negativa.models.lock import LeftOut, Lock, seal
from pytest_negativa.models.slimming import SlimStatus
from pytest_negativa.models.trace import CHILDREN_UNTRACED, UsageWarning
from pytest_negativa.planning.lock import make_lock
from pytest_negativa.reporting.slimming import render_rows
from pytest_negativa.slimming.check import check_tree
from pytest_negativa.slimming.explain import explain_error, slimmed_in
from pytest_negativa.slimming.manifest import load_manifest
from pytest_negativa.slimming.request import SlimOptions, SlimReport, SlimRequest
from pytest_negativa.slimming.slim import slim_trees, undo_trees
from pytest_negativa.slimming.tree import scan
from pytest_negativa.storage.lockfile import load_lock, save_lock
from pytest_negativa.storage.records import write_record
from tests.support.compacting import needs_compiler, read
from tests.support.libraries import PLAIN
from tests.support.made_site import HOST, ONE, TWO, Made
from tests.support.sites import digests, planned_of, snapshot, verdict_of, wrong_files
from tests.support.slim_rows import statuses
from tests.support.usages import library_usage, usage_of

pytestmark = needs_compiler

FAST = SlimOptions()
H200 = ComputeCapability(9, 0)
NO_IMAGE = "CUDA error: no kernel image is available for execution on the device"


@pytest.fixture
def lock(site: Made) -> Lock:
    """Of a run that loaded the first library alone."""
    return seal(msgspec.structs.replace(site.lock, libraries=site.lock.libraries[:1]))


@pytest.fixture
def run(site: Made, lock: Lock) -> Callable[..., SlimReport]:
    def run(**request: object) -> SlimReport:
        values = {
            "paths": (site.folder,), "lock": lock, "never_loaded": True, "options": FAST,
            **request,
        }  # fmt: skip
        return slim_trees(SlimRequest(**values))  # type: ignore[arg-type]

    return run


def code_left(path: Path) -> int:
    return sum(e.kind is not ElementKind.UNKNOWN for e in read(path).iter_code())


def test_all_code_goes_and_nothing_else(
    site: Made, run: Callable[..., SlimReport], lock: Lock, tmp_path: Path
) -> None:
    before = digests(site.folder)
    report = run(options=SlimOptions())
    assert statuses(report.rows) == {ONE: SlimStatus.SLIMMED, TWO: SlimStatus.SLIMMED}
    assert code_left(site.two) == 0
    assert code_left(site.one) > 0
    changed = {name for name, digest in digests(site.folder).items() if before.get(name) != digest}
    assert {ONE, TWO} < changed and HOST not in changed
    assert wrong_files(site.folder) == []
    entry = load_manifest(site.folder).slimmed[TWO]
    assert entry.never_loaded
    original = read(site.lock_file.parent / "site-packages" / TWO)
    assert entry.gpu_code_removed == sum(e.payload.size for e in original.iter_code())
    # The library of the lock is what it is without.
    alone = tmp_path / "alone" / site.one.name
    alone.parent.mkdir()
    shutil.copy(site.lock_file.parent / "site-packages" / ONE, alone)
    slim_trees(SlimRequest(paths=(alone,), lock=lock, options=FAST))
    assert alone.read_bytes() == site.one.read_bytes()


def test_second_run_does_nothing(site: Made, run: Callable[..., SlimReport]) -> None:
    run(strip_others=True)
    before = digests(site.folder)
    report = run(strip_others=True)
    assert statuses(report.rows)[TWO] is statuses(report.rows)[HOST] is SlimStatus.ALREADY
    assert digests(site.folder) == before


def test_wins_over_archs(site: Made, run: Callable[..., SlimReport]) -> None:
    run(devices=(H200,), strip_others=True)
    assert code_left(site.two) == 0
    assert HOST in load_manifest(site.folder).slimmed


def test_dry_run_foresees_it(site: Made, run: Callable[..., SlimReport]) -> None:
    before = snapshot(site.folder)
    foreseen = {r.path: r.after for r in run(options=replace(FAST, dry_run=True)).rows}
    assert snapshot(site.folder) == before
    assert foreseen == {r.path: r.after for r in run().rows}


def test_rows_tell_of_it(site: Made, run: Callable[..., SlimReport]) -> None:
    foreseen = run(options=replace(FAST, dry_run=True), strip_others=True)
    for report in (foreseen, run(strip_others=True), run(strip_others=True)):
        detail = {row.path: row.detail for row in report.rows if row.status is not SlimStatus.LEFT}
        assert detail == {
            ONE: None,
            TWO: "not loaded by any test",
            HOST: "not loaded by any test",
        }
    text = render_rows(report.rows, "")
    assert text.count("slimmed before, not loaded by any test") == 2


def test_undo_and_check(site: Made, run: Callable[..., SlimReport], tmp_path: Path) -> None:
    before = digests(site.folder)
    run(options=replace(FAST, keep_originals=tmp_path / "originals"))
    assert {row.status for row in check_tree(scan((site.folder,))[0])} == {SlimStatus.SOUND}
    undo_trees((site.folder,))
    assert digests(site.folder) == before


def test_required_libraries_come_first(site: Made, run: Callable[..., SlimReport]) -> None:
    site.one.unlink()
    before = snapshot(site.folder)
    assert run(require=True).stopped
    assert snapshot(site.folder) == before


def left_out(lock: Lock, **changes: object) -> Lock:
    row = LeftOut(path=TWO, distribution="gpu-code", version="1.0", reason="not proved")
    row = msgspec.structs.replace(row, **changes)
    return msgspec.structs.replace(lock, left_out=(row,))


@pytest.mark.parametrize(
    "changes",
    [{}, {"path": f"/elsewhere/{Path(TWO).name}", "distribution": None, "version": None}],
)
def test_what_is_left_out_was_loaded(
    site: Made, run: Callable[..., SlimReport], lock: Lock, changes: dict[str, object]
) -> None:
    """Also from elsewhere, as from the system's CUDA: here it may be this one that is loaded."""
    before = site.two.read_bytes()
    run(lock=left_out(lock, **changes))
    assert site.two.read_bytes() == before


@pytest.mark.parametrize("soname", ["libtwo.so", None])
def test_sonames_are_names_too(
    site: Made, run: Callable[..., SlimReport], lock: Lock, soname: str | None
) -> None:
    """Of what was left out elsewhere; the loader may take this one for it."""
    before = site.two.read_bytes()
    run(lock=left_out(lock, path="/elsewhere/libtwo.so.3.1", soname=soname))
    assert (site.two.read_bytes() == before) is (soname is not None)


def test_sonames_of_what_is_installed(
    site: Made, run: Callable[..., SlimReport], lock: Lock
) -> None:
    """A copy of the library that the run did load, by another name."""
    other = site.folder / "gpu" / "lib" / "libone.so.1.2.3"
    other.write_bytes(site.one.read_bytes() + b"\0")
    record = site.info / "RECORD"
    record.write_text(record.read_text() + "gpu/lib/libone.so.1.2.3,,\n")
    before = other.read_bytes()
    report = run()
    assert other.read_bytes() == before
    assert statuses(report.rows)[TWO] is SlimStatus.SLIMMED


@pytest.mark.parametrize(
    ("wanted", "goes"),
    [
        ({"exclude": ("libtwo*",)}, False),
        ({"exclude": ("dist:GPU_code",)}, False),
        ({"include": ("dist:host-code",)}, False),
        ({"include": ("gpu/lib/*",), "exclude": ("libother*",)}, True),
    ],
)
def test_what_the_project_wants_to_keep(
    site: Made,
    run: Callable[..., SlimReport],
    lock: Lock,
    wanted: dict[str, tuple[str, ...]],
    goes: bool,
) -> None:
    before = site.two.read_bytes()
    report = run(lock=msgspec.structs.replace(lock, **wanted))
    assert (site.two.read_bytes() != before) is goes
    # A library without GPU code has nothing to lose, so it has no row.
    [row] = [row for row in report.rows if row.path != ONE]
    assert row.path == TWO and ("of the project keeps it" in (row.detail or "")) is not goes


def test_after_archs_there_is_nothing_to_lose(
    site: Made, run: Callable[..., SlimReport], lock: Lock
) -> None:
    slim_trees(SlimRequest(paths=(site.two,), devices=(H200,), options=FAST))
    manifest = site.two.parent / "negativa-slim.json"
    assert load_manifest(site.two.parent).slimmed[site.two.name].gpu_code_removed
    report = run(paths=(site.two,))
    assert statuses(report.rows)[site.two.name] is SlimStatus.LEFT
    assert manifest.exists()


def test_of_another_version_nothing_is_known(
    site: Made, run: Callable[..., SlimReport], lock: Lock
) -> None:
    metadata = site.info / "METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 1.0", "Version: 1.1"))
    before = site.two.read_bytes()
    run()
    assert site.two.read_bytes() == before


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_another_version_may_load_more_of_what_it_requires(
    site: Made, run: Callable[..., SlimReport], version: str
) -> None:
    metadata = site.info / "METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 1.0", f"Version: {version}"))
    required = site.folder / "host" / "libthree.so"
    shutil.copy(site.two, required)
    record = site.folder / "host_code-2.0.dist-info" / "RECORD"
    record.write_text(record.read_text() + "host/libthree.so,,\n")
    before = required.read_bytes()
    run()
    assert (required.read_bytes() == before) is (version == "1.1")


def test_other_distributions_are_left_alone(site: Made, run: Callable[..., SlimReport]) -> None:
    other = site.folder / "other" / "libtwo_of_others.so"
    shutil.copy(site.two, other)
    record = site.folder / "unrelated-3.0.dist-info" / "RECORD"
    record.write_text(record.read_text() + "other/libtwo_of_others.so,,\n")
    before = other.read_bytes()
    run()
    assert other.read_bytes() == before


def test_a_lock_of_a_run_that_loads_it_later(
    site: Made, run: Callable[..., SlimReport], tmp_path: Path
) -> None:
    originals = replace(FAST, keep_originals=tmp_path / "originals")
    for options in (FAST, originals):
        run(options=options)
        for strip_others in (False, True):
            report = run(
                lock=site.lock,
                never_loaded=False,
                strip_others=strip_others,
                options=replace(FAST, dry_run=True),
            )
            expected = SlimStatus.FAILED if options is FAST else SlimStatus.WOULD_SLIM
            assert statuses(report.rows)[TWO] is expected
        shutil.rmtree(site.folder)
        shutil.copytree(site.lock_file.parent / "site-packages", site.folder)


@pytest.mark.parametrize("strip_others", [False, True])
def test_a_lock_that_leaves_it_out_later(
    site: Made, run: Callable[..., SlimReport], lock: Lock, strip_others: bool
) -> None:
    """Then the run loaded it, and all of it must be there."""
    run()
    later = left_out(lock)
    report = run(lock=later, never_loaded=False, strip_others=strip_others)
    [row] = [row for row in report.rows if row.path == TWO]
    assert row.status is SlimStatus.FAILED
    assert "was slimmed, and its original was not kept" in (row.detail or "")


def test_a_lock_that_leaves_it_out_later_has_the_original_back(
    site: Made, run: Callable[..., SlimReport], lock: Lock, tmp_path: Path
) -> None:
    before = site.two.read_bytes()
    run(options=replace(FAST, keep_originals=tmp_path / "originals"))
    report = run(lock=left_out(lock), never_loaded=False)
    [row] = [row for row in report.rows if row.path == TWO]
    assert row.status is SlimStatus.UNDONE and "the lock leaves it out" in (row.detail or "")
    assert site.two.read_bytes() == before and wrong_files(site.folder) == []


def test_errors_are_explained(site: Made, run: Callable[..., SlimReport]) -> None:
    run()
    text = explain_error(NO_IMAGE, slimmed_in([site.folder]))
    [line] = [line for line in text.splitlines() if TWO in line]
    assert "the proved run never loaded" in line
    assert text.index(TWO) < text.index(ONE)
    assert "which never loaded some libraries" in text


@pytest.mark.parametrize(
    ("proof", "problem"),
    [
        ({"proved": False}, "goes with a proved lock"),
        ({"incomplete": ("a trace is lost",)}, "a trace is lost"),
    ],
)
def test_locks_that_do_not_know(
    site: Made,
    run: Callable[..., SlimReport],
    lock: Lock,
    proof: dict[str, object],
    problem: str,
) -> None:
    changed = msgspec.structs.replace(lock.proof, **proof)
    before = snapshot(site.folder)
    with pytest.raises(OptionError, match=problem):
        run(lock=msgspec.structs.replace(lock, proof=changed))
    with pytest.raises(OptionError, match="has no GPU code"):
        run(lock=msgspec.structs.replace(lock, libraries=()))
    assert snapshot(site.folder) == before


class TestCommand:
    def test_slim(self, site: Made, lock: Lock, tmp_path: Path) -> None:
        save_lock(lock, tmp_path / "negativa.lock")
        words = [
            "slim",
            "--no-way-back",
            "--lock",
            str(tmp_path / "negativa.lock"),
            "--never-loaded",
        ]
        done = CliRunner().invoke(main, [*words, str(site.folder)])
        assert done.exit_code == 0, done.output
        assert code_left(site.two) == 0

    def test_without_a_lock(self, site: Made) -> None:
        words = [
            "slim",
            "--no-way-back",
            "--arch",
            "sm_90",
            "--never-loaded",
            str(site.folder),
        ]
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 2
        assert "goes with a lock" in done.stderr


class TestLock:
    """What a lock must tell for that: all that was loaded, or that it doesn't know."""

    def write_run(
        self,
        site: Made,
        folder: Path,
        *,
        incomplete: bool = False,
        warnings: Sequence[UsageWarning] = (),
    ) -> Path:
        one, two, plain = (planned_of(path) for path in (site.one, site.two, PLAIN))
        write_record(folder / "map" / "0.json", one.library_map)
        write_record(folder / "plan" / "0.json", one.plan)
        write_record(folder / "verdict.json", verdict_of(one))
        lack = UsageWarning(code="gap", text="the detector was off", process=0)
        usage = usage_of(
            *(library_usage(made.library_map, {}) for made in (one, two, plain)),
            incomplete=[lack] if incomplete else (),
        )
        usage = msgspec.structs.replace(usage, warnings=tuple(warnings))
        write_record(folder / "usage.json", usage)
        return folder

    def lock(self, run: Path) -> Lock:
        done = CliRunner().invoke(
            main, ["lock", "--run", str(run), "-o", str(run / "negativa.lock")]
        )
        assert done.exit_code == 0, done.output
        return load_lock(run / "negativa.lock")

    def test_what_was_not_looked_at_is_named(self, site: Made, tmp_path: Path) -> None:
        made = self.lock(self.write_run(site, tmp_path / "run"))
        [row] = made.left_out
        assert (row.path, row.distribution, row.version) == (TWO, "gpu-code", "1.0")
        assert "libraries.exclude" in row.reason
        assert made.proof.incomplete == ()

    def test_what_cannot_be_read_or_is_gone_is_named(self, site: Made, tmp_path: Path) -> None:
        run = self.write_run(site, tmp_path / "run")
        original = site.two.read_bytes()
        site.two.write_bytes(original[:1000])
        [row] = self.lock(run).left_out
        assert "cannot be read" in row.reason
        site.two.unlink()
        [row] = self.lock(run).left_out
        assert "gone since the run" in row.reason

    def test_what_is_slim_already_is_named(self, site: Made, tmp_path: Path) -> None:
        run = self.write_run(site, tmp_path / "run")
        slim_trees(SlimRequest(paths=(site.two,), lock=site.lock, options=FAST))
        [row] = self.lock(run).left_out
        assert "slimmed already" in row.reason

    def test_that_it_does_not_know(self, site: Made, tmp_path: Path) -> None:
        run = self.write_run(site, tmp_path / "run", incomplete=True)
        assert self.lock(run).proof.incomplete == ("the detector was off",)
        (run / "usage.json").unlink()
        [reason] = self.lock(run).proof.incomplete
        assert "no usage.json" in reason

    def test_what_children_loaded_is_not_known(self, site: Made, tmp_path: Path) -> None:
        text = "child processes are not traced (trace.children)"
        warnings = (
            UsageWarning(code=CHILDREN_UNTRACED, text=text, process=0),
            UsageWarning(code="image-unknown", text="something else", process=0),
        )
        run = self.write_run(site, tmp_path / "run", warnings=warnings)
        assert self.lock(run).proof.incomplete == (text,)

    def test_what_the_project_wants_to_keep(
        self, site: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = tmp_path / "negativa.yaml"
        config.write_text(
            "libraries:\n  include: [dist:a]\n  exclude: [b]\nkeep:\n  libraries: [c]\n"
        )
        monkeypatch.chdir(tmp_path)
        made = self.lock(self.write_run(site, tmp_path / "run"))
        assert (made.include, made.exclude) == (("dist:a",), ("b", "c"))

    def test_names_the_sonames(self, site: Made, tmp_path: Path) -> None:
        """Of what has no plan, and of what has one that is not in the lock."""
        one = planned_of(site.one, lambda number: True)
        path = "/elsewhere/libtwo.so.3.1"
        unplanned = [LeftOut(path=path, reason="why", soname="libtwo.so")]
        two = planned_of(site.two)
        made = make_lock("run", [one, two], verdict_of(two), Owners().of, unplanned=unplanned)
        assert {row.soname for row in made.left_out} == {"libone.so.1", "libtwo.so"}
        run = self.write_run(site, tmp_path / "run")
        shutil.copy(site.one, site.two)
        [row] = self.lock(run).left_out
        assert (row.path, row.soname) == (TWO, "libone.so.1")

    def test_made_in_memory(self, site: Made) -> None:
        one = planned_of(site.one)
        unplanned = [LeftOut(path=str(site.two), reason="why")]
        made = make_lock(
            "run",
            [one],
            verdict_of(one),
            Owners().of,
            unplanned=unplanned,
            incomplete=("unknown",),
        )
        assert [row.path for row in made.left_out] == [TWO]
        assert made.proof.incomplete == ("unknown",)
