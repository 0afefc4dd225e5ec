"""What slim says of originals, what undo gives back, and what goes to disk in which order."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec import structs

from pytest_negativa.cli.main import main
from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.file_state import FileState
from pytest_negativa.models.slimming import SlimStatus
from pytest_negativa.slimming import atomic_replacement as replacing
from pytest_negativa.slimming import slim as engine
from pytest_negativa.slimming.atomic_replacement import TakenError, copy_file, keep_original, take
from pytest_negativa.slimming.journal import hold
from pytest_negativa.slimming.manifest import load_manifest, save_manifest
from pytest_negativa.slimming.request import SlimOptions, SlimRequest
from pytest_negativa.slimming.slim import slim_trees, undo_trees
from pytest_negativa.slimming.spares import SpareTarget
from pytest_negativa.storage.atomic import copy_metadata
from tests.support.compacting import needs_compiler
from tests.support.faults import PlantedFault
from tests.support.libraries import NEGATIVA
from tests.support.made_site import TWO, Made
from tests.support.sites import digests

pytestmark = needs_compiler

FAST = SlimOptions()
COMMAND = "pip install --force-reinstall --no-deps gpu-code==1.0"
RUN = "0123456789abcdef"


def slim(site: Made, options: SlimOptions = FAST) -> None:
    report = slim_trees(SlimRequest(paths=(site.folder,), lock=site.lock, options=options))
    assert not report.failed


def negativa(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(main, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


@pytest.mark.planted_fault(
    "The user slims without a way back, and wants the originals back later.",
    says="give --spare DIR or --keep-originals DIR, so that what is removed can come back",
)
def test_a_way_back_is_required(site: Made, fault: PlantedFault) -> None:
    # As if it had come from an index.
    (site.info / "direct_url.json").unlink()
    arguments = ("slim", "--lock", site.lock_file, site.folder)
    before = digests(site.folder)
    fault.check(negativa(*arguments, code=2))
    assert digests(site.folder) == before
    negativa(*arguments, "--no-way-back")
    assert f"was not kept; install it again: {COMMAND}" in negativa(
        "slim", "undo", site.folder, code=1
    )
    site.one.write_bytes(b"damaged")
    assert COMMAND in negativa("slim", "check", site.folder, code=1)


def test_a_spare_is_no_way_back_for_what_is_only_stripped(site: Made, tmp_path: Path) -> None:
    spare = ("--spare", tmp_path / "spares", "--strip-others")
    output = negativa("slim", "--arch=sm_90", *spare, site.folder, code=2)
    assert "give --keep-originals DIR, so that" in output


def test_libraries_of_no_distribution(site: Made) -> None:
    (site.info / "RECORD").unlink()
    negativa("slim", "--no-way-back", "--lock", site.lock_file, site.folder)
    output = negativa("slim", "undo", site.folder, code=1)
    assert "was not kept; install it again" in output and "install it again:" not in output


def test_undo_gives_each_file_its_own_attributes(site: Made, tmp_path: Path) -> None:
    """One kept original may be that of two files, whose times and modes differ."""
    site.two.write_bytes(site.one.read_bytes())
    site.one.chmod(0o755)
    site.two.chmod(0o640)
    os.utime(site.one, ns=(1_000_000_001, 1_000_000_002))
    os.utime(site.two, ns=(2_000_000_001, 2_000_000_003))
    os.setxattr(site.two, "user.note", b"of the second")
    slim(site, replace(FAST, keep_originals=tmp_path / "originals"))
    assert len(list((tmp_path / "originals").glob("[0-9a-f]*"))) == 1
    undo_trees((site.folder,))
    facts = [(p.stat().st_mtime_ns, p.stat().st_mode & 0o777) for p in (site.one, site.two)]
    assert facts == [(1_000_000_002, 0o755), (2_000_000_003, 0o640)]
    assert os.getxattr(site.two, "user.note") == b"of the second"
    assert "user.note" not in os.listxattr(site.one)


def test_a_name_like_an_escape_in_json(site: Made, tmp_path: Path) -> None:
    site.one.with_name("a\\u0000.so").write_bytes(site.one.read_bytes())
    before = digests(site.folder)
    slim(site, replace(FAST, keep_originals=tmp_path / "originals"))
    undo_trees((site.folder,))
    assert digests(site.folder) == before


def test_a_kept_original_that_changes_before_it_is_read(
    site: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "originals"
    slim(site, replace(FAST, keep_originals=kept))
    entries = load_manifest(site.folder).slimmed
    foresee = engine.Slimmer.foresee_holes

    def and_change(slimmer: engine.Slimmer) -> list[int]:
        holes = foresee(slimmer)
        for path in [one for one in kept.iterdir() if len(one.name) == 64]:
            data = path.read_bytes()
            other = path.with_name("other")
            other.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
            other.replace(path)
        return holes

    monkeypatch.setattr(engine.Slimmer, "foresee_holes", and_change)
    request = SlimRequest(
        paths=(site.folder,),
        lock=site.lock,
        options=replace(FAST, spare=SpareTarget(tmp_path / "spares")),
    )
    report = slim_trees(request)
    assert {row.status for row in report.rows if row.detail} == {SlimStatus.FAILED}
    assert load_manifest(site.folder).slimmed == entries


def test_undo_restores_the_times_of_libraries(site: Made, tmp_path: Path) -> None:
    def times() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in site.folder.rglob("*.so*")}

    before = times()
    options = replace(FAST, keep_originals=tmp_path / "originals")
    slim(site, options)
    slim_trees(
        SlimRequest(paths=(site.folder,), lock=site.lock, strip_others=True, options=options)
    )
    undo_trees((site.folder,))
    assert times() == before


def test_undo_restores_the_time_of_a_file_that_was_touched(site: Made, tmp_path: Path) -> None:
    os.utime(site.one, ns=(1_000_000_001, 1_000_000_002))
    slim(site, replace(FAST, keep_originals=tmp_path / "originals"))
    site.one.write_bytes(site.one.read_bytes())
    undo_trees((site.folder,))
    assert site.one.stat().st_mtime_ns == 1_000_000_002


@pytest.mark.planted_fault(
    "A library carries an IMA signature, which doesn't fit its slimmed bytes.",
    says="its attribute security.ima is gone, because it vouches for the old bytes",
)
def test_signatures_of_the_bytes_are_not_copied(tmp_path: Path, fault: PlantedFault) -> None:
    original, changed, same = (tmp_path / name for name in ("original", "changed", "same"))
    original.write_bytes(b"bytes")
    changed.write_bytes(b"others")
    try:
        os.setxattr(original, "security.ima", b"\x03\x02signature")
    except OSError as e:
        pytest.skip(f"security.ima: {e.strerror}")
    os.setxattr(original, "user.note", b"kept")
    with original.open("rb") as old, changed.open("rb+") as new:
        fault.check("; ".join(copy_metadata(old.fileno(), new.fileno())))
    assert os.listxattr(changed) == ["user.note"]
    copy_file(original, same)
    assert os.getxattr(same, "security.ima") == b"\x03\x02signature"


def test_a_power_cut_leaves_the_old_or_the_new(site: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data before names, the manifest before the library, and the folder at the end."""
    events: list[tuple[str, object]] = []
    real = os.fsync

    def sync(descriptor: int) -> None:
        events.append(("sync", os.fstat(descriptor).st_ino))
        real(descriptor)

    def taking(new: Path, place: Path, *arguments: Any, **options: Any) -> None:
        events.append(("take", new.stat().st_ino))
        take(new, place, *arguments, **options)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(replacing, "take", taking)
    slim(site)
    for path in (site.one, site.two):
        at = events.index(("take", path.stat().st_ino))
        before, after = events[:at], events[at + 1 :]
        assert before[-3][0] == before[-2][0] == before[-1][0] == "sync"
        assert before[-1] == ("sync", path.stat().st_ino)
        # The manifest's name.
        assert before[-2] == ("sync", site.folder.stat().st_ino)
        assert after[0] == ("sync", path.parent.stat().st_ino)
    last = [inode for _, inode in events][-4:]
    assert last[:2] == [(site.info / "RECORD").stat().st_ino, site.info.stat().st_ino]


def begin_run(site: Made) -> None:
    """Note a run, as slim does before it changes anything."""
    manifest = structs.replace(load_manifest(site.folder), run=RUN)
    save_manifest(site.folder, manifest, RUN)


@pytest.mark.planted_fault(
    "slim was killed, and the user checks the folder.",
    says="interrupted: a run is at work here, or was killed: check again when it has ended",
)
def test_check_reports_a_run_that_was_killed(site: Made, fault: PlantedFault) -> None:
    slim(site)
    begin_run(site)
    output = negativa("slim", "check", site.folder)
    fault.check(output)
    slim(site)
    assert "killed" not in negativa("slim", "check", site.folder)


def test_check_is_not_misled_by_another_lock(site: Made) -> None:
    """A script may lock the folder around its commands."""
    slim(site)
    with hold(site.folder):
        assert "sound" in negativa("slim", "check", site.folder)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_that_ask_to_end(site: Made, number: signal.Signals) -> None:
    before = digests(site.folder)
    # Slim waits for the folder: there is time to send the signal.
    with hold(site.folder):
        process = subprocess.Popen(
            [NEGATIVA, "slim", "--no-way-back", "--lock", site.lock_file, site.folder],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        lines = []
        while "waiting" not in (line := process.stderr.readline()):
            lines.append(line)
            assert line, "".join(lines)
        process.send_signal(number)
        _, errors = process.communicate()
    assert process.returncode == 128 + number
    assert errors.endswith(
        "negativa: interrupted: what is done stays done, and the same command goes on from there\n"
    )
    assert digests(site.folder) == before
    assert TWO in before


def test_a_file_is_read_again_only_if_it_changed(tmp_path: Path) -> None:
    path, aside = tmp_path / "a.so", tmp_path / "kept"
    path.write_bytes(b"first")
    known = FileState.of(path.stat())
    name = hashlib.sha256(b"first").hexdigest()
    with path.open("r+b") as file:
        file.write(b"other")
    os.utime(path, ns=(0, known.mtime_ns + 1))
    with pytest.raises(TakenError):
        keep_original(path, aside / name, "0" * 16, known)
    assert not (aside / name).exists()
    # Of a file in its known state the digest is believed.
    keep_original(path, aside / name, "0" * 16, FileState.of(path.stat()))
    assert (aside / name).read_bytes() == b"other"


def test_a_kept_original_that_cannot_be_read_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be what is slimmed anew, and the only one."""
    name = hashlib.sha256(b"first").hexdigest()
    kept = tmp_path / "kept" / name
    kept.parent.mkdir()
    kept.write_bytes(b"first")

    def fail(self: ByteSource) -> str:
        raise FormatError(self.path, None, "cannot be read: Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(ByteSource, "sha256", fail)
        with pytest.raises(FormatError):
            keep_original(kept, kept, "0" * 16, None)
    assert kept.read_bytes() == b"first"
    keep_original(kept, kept, "0" * 16, None)
    assert kept.read_bytes() == b"first"


def test_a_killed_run_has_kept_the_way_back(
    site: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digests(site.folder)
    request = SlimRequest(
        paths=(site.folder,), lock=site.lock, options=SlimOptions(keep_originals=tmp_path / "kept")
    )
    if (child := os.fork()) == 0:
        # Killed when the manifest has the library, and its original is kept.
        with contextlib.suppress(BaseException):
            monkeypatch.setattr(
                engine, "replace_all", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
            )
            slim_trees(request)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    [name] = load_manifest(site.folder).slimmed
    slim_trees(replace(request, options=SlimOptions()))
    rows = {row.path: row.status for row in undo_trees((site.folder,))}
    assert rows[name] is SlimStatus.UNDONE and digests(site.folder)[name] == before[name]
