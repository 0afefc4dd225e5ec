"""Slimming that is killed, or runs out of disk: every library is the old or the new one."""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.errors import StoreError
from pytest_negativa.models.slimming import SlimStatus
from pytest_negativa.slimming import slim as engine
from pytest_negativa.slimming.manifest import load_manifest
from pytest_negativa.slimming.request import SlimOptions, SlimRequest
from pytest_negativa.slimming.slim import slim_trees
from pytest_negativa.slimming.tree import MANIFEST_NAME
from tests.support.compacting import needs_compiler
from tests.support.faults import PlantedFault
from tests.support.kills import MOST
from tests.support.libraries import NEGATIVA
from tests.support.made_site import ONE, TWO, Made
from tests.support.mounts import in_namespace, leave, small_disk
from tests.support.sessions import unmeasured_environ
from tests.support.sites import digests, wrong_files

pytestmark = needs_compiler

FAST = SlimOptions()


def start(site: Made, *more: str, limit: int | None = None) -> subprocess.Popen[str]:
    def restrict() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.Popen(
        [NEGATIVA, "slim", "--no-way-back", "--lock", site.lock_file, *more, site.folder],
        # Python would write half of a module's bytecode, and later processes would read it.
        env=unmeasured_environ() | {"PYTHONDONTWRITEBYTECODE": "1"} if limit is not None else None,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=restrict,
    )


def hidden(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob(".*"))


def finish(site: Made, expected: dict[str, str]) -> None:
    report = slim_trees(SlimRequest(paths=(site.folder,), lock=site.lock, options=FAST))
    assert not report.failed
    assert digests(site.folder) == expected
    assert hidden(site.folder) == []


@pytest.fixture(scope="module")
def slimmed(installed: Made, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Digests of all files after an undisturbed run."""
    folder = tmp_path_factory.mktemp("undisturbed") / "site"
    subprocess.run(["cp", "-a", installed.folder, folder], check=True)
    os.link(folder / TWO, folder / "gpu/linked.so")
    slim_trees(SlimRequest(paths=(folder,), lock=installed.lock, options=FAST))
    return digests(folder)


@pytest.mark.slow
def test_killed_at_any_moment(site: Made, installed: Made, slimmed: dict[str, str]) -> None:
    os.link(site.two, site.folder / "gpu/linked.so")
    before = digests(site.folder)

    def renew() -> None:
        subprocess.run(["rm", "-rf", site.folder], check=True)
        subprocess.run(["cp", "-a", installed.folder, site.folder], check=True)
        os.link(site.two, site.folder / "gpu/linked.so")

    durations = []
    # The first start may be much slower than the others.
    for _ in range(3):
        renew()
        started = time.monotonic()
        process = start(site)
        _, errors = process.communicate()
        assert process.returncode == 0, errors
        durations.append(time.monotonic() - started)
    duration = min(durations)
    rng = random.Random(4711)
    seen = set()
    for _ in range(MOST):
        renew()
        process = start(site)
        # The first third it only imports; under load the next start may be quicker.
        time.sleep(duration * rng.uniform(0.3, 1.02))
        process.kill()
        process.communicate()
        found = digests(site.folder)
        for name in (ONE, TWO, "gpu/linked.so"):
            assert found[name] in (before[name], slimmed[name])
            seen.add((name, found[name] == slimmed[name]))
        record = f"{site.info.name}/RECORD"
        assert found[record] in (before[record], slimmed[record])
        if MANIFEST_NAME in found:
            json.loads((site.folder / MANIFEST_NAME).read_bytes())
        # No new file that the manifest doesn't know.
        new = {found[name] for name in (ONE, TWO) if found[name] == slimmed[name]}
        if new:
            manifest = (site.folder / MANIFEST_NAME).read_text()
            assert all(digest in manifest for digest in new)
        finish(site, slimmed)
    # Kills that hit nothing would prove nothing.
    assert {(ONE, False)} <= seen or {(TWO, False)} <= seen


@pytest.mark.parametrize("step", ["keep_original", "save_manifest", "replace_all", "update_record"])
def test_killed_between_the_steps(
    site: Made, slimmed: dict[str, str], tmp_path: Path, step: str
) -> None:
    """SIGKILL right before each thing that is done, and right after, the first time it is."""
    os.link(site.two, site.folder / "gpu/linked.so")
    before = digests(site.folder)
    module = "slimming.slim" if step in ("keep_original", "replace_all") else "slimming.journal"
    module = "installed.sites" if step == "update_record" else module
    for when in ("before", "after"):
        code = f"""
import os, signal, sys
from pathlib import Path
import pytest_negativa.{module} as engine
from pytest_negativa.slimming.request import SlimRequest
from pytest_negativa.slimming.slim import slim_trees
from pytest_negativa.slimming.request import SlimOptions
from pytest_negativa.storage.lockfile import load_lock
real = engine.{step}
def step(*arguments, **options):
    if {when == "after"}:
        real(*arguments, **options)
    os.kill(os.getpid(), signal.SIGKILL)
engine.{step} = step
options = SlimOptions(keep_originals=Path({str(tmp_path / "aside")!r}))
slim_trees(SlimRequest((Path({str(site.folder)!r}),), load_lock(Path({str(site.lock_file)!r})),
     options=options))
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
        found = digests(site.folder)
        for name in (ONE, TWO, "gpu/linked.so"):
            assert found[name] in (before[name], slimmed[name])
    report = slim_trees(SlimRequest(paths=(site.folder,), lock=site.lock, options=FAST))
    assert not report.failed
    after = digests(site.folder)
    del after[MANIFEST_NAME]
    assert after == {name: d for name, d in slimmed.items() if name != MANIFEST_NAME}
    assert hidden(site.folder) == []
    assert wrong_files(site.folder) == []


@pytest.mark.parametrize("signalled", [False, True])
def test_a_library_that_is_not_slimmed_anew_stays_in_the_manifest(
    site: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signalled: bool
) -> None:
    """Its original can't be kept once more, or a signal comes while it is."""
    kept, again = tmp_path / "kept", tmp_path / "again"
    slim_trees(SlimRequest((site.folder,), site.lock, options=SlimOptions(keep_originals=kept)))
    before = digests(site.folder)
    for original in kept.glob("[0-9a-f]*"):
        (again / original.name / "in the way").mkdir(parents=True)
    by_arch = SlimRequest(
        (site.folder,),
        devices=(ComputeCapability(9, 0),),
        options=SlimOptions(keep_originals=again),
    )
    if signalled:

        def interrupt(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(engine, "keep_original", interrupt)
        with pytest.raises(KeyboardInterrupt):
            slim_trees(by_arch)
    else:
        rows = {row.path: row for row in slim_trees(by_arch).rows}
        assert rows[ONE].status is rows[TWO].status is SlimStatus.FAILED
    after = digests(site.folder)
    # A thread that a signal left behind may have a hidden file.
    assert (after[ONE], after[TWO]) == (before[ONE], before[TWO])
    assert load_manifest(site.folder).slimmed.keys() == {ONE, TWO}


def test_killed_between_two_names_of_a_file(site: Made, slimmed: dict[str, str]) -> None:
    linked = site.folder / "gpu/linked.so"
    original = site.two.read_bytes()
    os.link(site.two, linked)
    slim_trees(SlimRequest(paths=(site.folder,), lock=site.lock, options=FAST))
    linked.unlink()
    linked.write_bytes(original)
    shutil.copystat(site.two, linked)
    report = slim_trees(SlimRequest(paths=(site.folder,), lock=site.lock, options=FAST))
    assert {row.status for row in report.rows} == {SlimStatus.ALREADY, SlimStatus.SLIMMED}
    assert linked.samefile(site.two)
    assert digests(site.folder) == slimmed


def test_ctrl_c_waits_for_no_library(site: Made) -> None:
    """The first one is done, and the second never ends, when the user interrupts."""
    code = f"""
import os, signal, sys, threading
from pytest_negativa.slimming import slim as engine
from pytest_negativa.storage.atomic import NewFile
real, publish = engine.slim_library, engine.Slimmer._publish
begun = threading.Event()
def slim_library(recipe, source, staged, *more, **options):
    if source.path.endswith("/libtwo.so"):
        with NewFile(staged):
            begun.set()
            threading.Event().wait()
    return real(recipe, source, staged, *more, **options)
def publish_one(self, *more):
    publish(self, *more)
    begun.wait()
    os.kill(os.getpid(), signal.SIGINT)
engine.slim_library, engine.Slimmer._publish = slim_library, publish_one
sys.argv = ["negativa", "slim", "--no-way-back", "--jobs", "2",
            "--lock", {str(site.lock_file)!r}, {str(site.folder)!r}]
from pytest_negativa.cli.main import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 130, done.stderr
    assert done.stderr.endswith(
        "interrupted: what is done stays done, and the same command goes on from there\n"
    )
    assert hidden(site.folder) == []
    assert wrong_files(site.folder) == []
    report = slim_trees(SlimRequest(paths=(site.folder,), lock=site.lock, options=FAST))
    assert {row.path: row.status for row in report.rows} == {
        ONE: SlimStatus.ALREADY,
        TWO: SlimStatus.SLIMMED,
    }


@pytest.mark.parametrize("limit", [500, 60_000])
def test_file_that_may_not_get_so_large(site: Made, limit: int) -> None:
    """As on a full disk: no library can be written."""
    before = digests(site.folder)
    process = start(site, limit=limit)
    _, errors = process.communicate()
    assert process.returncode == 1
    assert "File too large" in errors
    assert "Traceback" not in errors
    after = digests(site.folder)
    assert {name: after[name] for name in before} == before
    assert hidden(site.folder) == []


@pytest.mark.planted_fault("The disk is full when slim starts.", says="No space left on device")
@in_namespace
def test_full_disk(site: Made, tmp_path: Path, fault: PlantedFault) -> None:
    with small_disk(tmp_path / "disk", 16 << 20) as disk:
        folder = disk / "site-packages"
        subprocess.run(["cp", "-a", site.folder, folder], check=True)
        before = digests(folder)
        with leave(disk, 0):
            with pytest.raises(StoreError) as caught:
                slim_trees(SlimRequest(paths=(folder,), lock=site.lock, options=FAST))
            fault.check(str(caught.value))
        assert digests(folder) == before
        assert hidden(folder) == []
        assert not slim_trees(SlimRequest(paths=(folder,), lock=site.lock, options=FAST)).failed
        assert wrong_files(folder) == []


def test_two_at_a_time(site: Made) -> None:
    processes = [start(site) for _ in range(2)]
    results = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    assert wrong_files(site.folder) == []
    assert hidden(site.folder) == []
    assert sum("slimmed before" not in out for out, _ in results) == 1


def test_digest_in_the_manifest_is_the_files(site: Made) -> None:
    slim_trees(SlimRequest(paths=(site.folder,), lock=site.lock, options=FAST))
    manifest = json.loads((site.folder / MANIFEST_NAME).read_bytes())
    for name, entry in manifest["slimmed"].items():
        data = (site.folder / name).read_bytes()
        assert entry["sha256"] == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("killed", [False, True])
def test_an_earlier_result_of_the_same_size_and_time(
    site: Made, tmp_path: Path, killed: bool
) -> None:
    """A killed run noted another result, and did not replace the earlier one."""
    options = SlimOptions(keep_originals=tmp_path / "originals")
    request = SlimRequest(paths=(site.folder,), lock=site.lock, options=options)
    slim_trees(request)
    expected = load_manifest(site.folder).slimmed[ONE].sha256
    manifest = json.loads((site.folder / MANIFEST_NAME).read_text())
    manifest["slimmed"][ONE] |= {"sha256": "1" * 64, "replaced": expected}
    manifest |= {"run": "0" * 16} if killed else {}
    (site.folder / MANIFEST_NAME).write_text(json.dumps(manifest))
    [row] = [row for row in slim_trees(request).rows if row.path == ONE]
    # Time and size alone tell a result, unless a run was killed.
    assert row.status is (SlimStatus.SLIMMED if killed else SlimStatus.ALREADY)
    assert (load_manifest(site.folder).slimmed[ONE].sha256 == expected) is killed
