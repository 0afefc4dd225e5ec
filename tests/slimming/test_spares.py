"""Slimming with a spare: what was removed comes back, and so does the original."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import stat
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec import structs

from pytest_negativa.analysis.lock import widen_lock
from pytest_negativa.arch import ComputeCapability
from pytest_negativa.cli.main import main
from pytest_negativa.errors import OptionError, ReconstructError, StaleLibraryError
from pytest_negativa.gpucode.elf_tables import EM_AARCH64
from pytest_negativa.gpucode.source import ByteSource, digest_of
from pytest_negativa.models.lock import Lock, LockedLibrary
from pytest_negativa.models.slimming import SlimStatus
from pytest_negativa.pages.misses import Misses
from pytest_negativa.pages.note import MAX_COPIED, trailer_offset
from pytest_negativa.pages.page_logs import read_misses
from pytest_negativa.rewriting.compact.cut import CutOptions, cut_library
from pytest_negativa.rewriting.compact.rebuild import rebuild_original
from pytest_negativa.slimming import slim as engine
from pytest_negativa.slimming.check import check_tree
from pytest_negativa.slimming.explain import explain_error, slimmed_in
from pytest_negativa.slimming.manifest import load_manifest, save_manifest
from pytest_negativa.slimming.request import SlimOptions, SlimReport, SlimRequest
from pytest_negativa.slimming.slim import slim_trees, undo_trees
from pytest_negativa.slimming.spares import (
    SpareTarget,
    find_spare,
    least_hole,
    note_of,
    plan_cut,
    problem_of,
)
from pytest_negativa.slimming.tree import MANIFEST_NAME, ORIGINALS_MARK, scan
from tests.support.compacting import needs_compiler
from tests.support.compiling import compile_shared
from tests.support.cutting import PAGES, compile_library, logged, needs_stub, trace_of
from tests.support.faults import PlantedFault
from tests.support.libraries import NEGATIVA, PLAIN
from tests.support.made_site import HOST, ONE, TWO, Made
from tests.support.mounts import bind, in_namespace, leave, mount, read_only, small_disk
from tests.support.paged import compile_constants, needs_page_watch
from tests.support.sessions import unmeasured_environ
from tests.support.sites import digests, make_wheel, snapshot, with_pages, wrong_files
from tests.support.slim_rows import statuses

pytestmark = [needs_compiler, needs_stub]

DOCKERFILE = Path(__file__).parents[2] / "examples" / "docker" / "Dockerfile.spare"
SM_80 = ComputeCapability(8, 0)
"""The libraries have no code for it."""
CODE = 238_000
"""Bytes of GPU code that a library registers; it has more in data that can be written to."""
# Prints digests of the registered code, as a driver would read it, in two processes.
READER = """
import ctypes, hashlib, os, sys
library = ctypes.CDLL(sys.argv[1])
library.registered.restype = library.large_data.restype = ctypes.c_void_p
def digest():
    data = ctypes.string_at(library.registered(), int(sys.argv[2]))
    # Behind a word that the loader writes.
    data += ctypes.string_at(library.large_data() + 16, int(sys.argv[2]))
    return hashlib.sha256(data).hexdigest() + " " + str(library.catches(1))
if os.fork() == 0:
    os._exit(print(digest(), flush=True) or 0)
os.wait()
print(digest())
"""


def slim(
    site: Made,
    tmp_path: Path,
    *devices: ComputeCapability,
    require: bool = False,
    lock: Lock | None = None,
    **others: Any,
) -> SlimReport:
    """Slim by archs if there are any, else by the lock; no library is loaded for a check."""
    options = {"spare": SpareTarget(tmp_path / "spares"), **others}
    request = SlimRequest(
        paths=(site.folder,),
        lock=lock or (None if devices else site.lock),
        devices=devices,
        require=require,
        options=SlimOptions(**options),
    )
    return slim_trees(request)


def negativa(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([NEGATIVA, *map(str, words)], capture_output=True, text=True)


def checked(site: Made) -> dict[str, tuple[SlimStatus, str | None]]:
    return checked_in(site.folder)


def checked_in(folder: Path) -> dict[str, tuple[SlimStatus, str | None]]:
    rows = (row for tree in scan((folder,)) for row in check_tree(tree))
    return {row.path: (row.status, row.detail) for row in rows}


def read_code(path: Path, logs: Path | None = None) -> subprocess.CompletedProcess[str]:
    # Nothing else in the environment.
    environ = {} if logs is None else logged(logs)
    command = [sys.executable, "-I", "-S", "-c", READER, str(path), str(CODE)]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


def test_code_comes_back_and_so_does_the_original(site: Made, tmp_path: Path) -> None:
    before, code = digests(site.folder), read_code(site.one).stdout
    report = slim(site, tmp_path)
    assert statuses(report.rows) == {ONE: SlimStatus.SLIMMED, TWO: SlimStatus.SLIMMED}
    [row] = [row for row in report.rows if row.path == ONE]
    assert row.after == site.one.stat().st_size < row.before - 300_000
    logs = tmp_path / "logs"
    logs.mkdir()
    assert read_code(site.one).stdout == read_code(site.one, logs).stdout == code
    assert len(list(logs.iterdir())) == 1
    assert wrong_files(site.folder) == []
    assert checked(site) == dict.fromkeys((ONE, TWO), (SlimStatus.SOUND, "its spare fits"))
    entry = load_manifest(site.folder).slimmed[ONE]
    assert entry.spare == str(find_spare(site.one)) and entry.gpu_code_removed > 300_000
    assert statuses(slim(site, tmp_path).rows) == dict.fromkeys((ONE, TWO), SlimStatus.ALREADY)
    assert set(statuses(undo_trees((site.folder,))).values()) == {SlimStatus.UNDONE}
    assert digests(site.folder) == before
    assert not (site.folder / MANIFEST_NAME).exists()


def is_refused(done: subprocess.CompletedProcess[str]) -> bool:
    return done.returncode == 1 and "undefined symbol: [negativa] its spare " in done.stderr


def test_without_its_spare_a_library_is_refused(site: Made, tmp_path: Path) -> None:
    folder = tmp_path / "spares"
    command = ["slim", "--lock", site.lock_file, "--spare", folder]
    done = CliRunner().invoke(main, [str(word) for word in (*command, site.folder)])
    assert done.exit_code == 0, done.output
    assert read_code(site.one).returncode == 0
    folder.rename(tmp_path / "elsewhere")
    script = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
    words = [sys.executable, "-I", "-c", script, str(site.one)]
    refused = subprocess.run(words, capture_output=True, text=True, check=False)
    assert is_refused(refused)
    # What it was slimmed by tells which lock to widen.
    assert "lies in none of its folders. Slimmed by the lock of run " in refused.stderr
    assert f"{site.one}: undefined symbol: [negativa] its spare libone.so.1." in refused.stderr
    environ = {"NEGATIVA_SPARE_DIR": str(tmp_path / "elsewhere")}
    assert subprocess.run(words, env=environ, check=False).returncode == 0


@pytest.mark.slow
def test_an_image_needs_its_spares_for_removed_code_alone(installed: Made, tmp_path: Path) -> None:
    """What RUN runs in examples/docker/Dockerfile.spare, in folders of the test."""
    text = re.sub(r"(?m)^#.*\n", "", DOCKERFILE.read_text()).replace("\\\n", " ")
    [_, install_and_slim] = re.findall(r"(?m)^RUN +(.+)$", text)
    wheel = make_wheel(tmp_path, "gpu-code", "1.0", {ONE: installed.one, TWO: installed.two})
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / "requirements.txt").write_text(f"--no-index\n{wheel}\n")
    # The tool's environment is the one of the test.
    python, tool = Path(sys.executable), tmp_path / "tool" / "bin" / "negativa"
    tool.parent.mkdir(parents=True)
    tool.symlink_to(python.with_name("negativa"))
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    environ = {**unmeasured_environ(), "PYTHON": version, "ARCHS": f"sm_{SM_80.major}{SM_80.minor}"}
    environ.pop("PYTHONPATH", None)
    environ["PATH"] = f"{python.parent}:{environ['PATH']}"
    script = re.sub(r'(?<=[ "])/(?=(app|tool|tmp|spares)\b)', f"{tmp_path}/", install_and_slim)
    subprocess.run(["sh", "-euc", script], env=environ, check=True)
    site = tmp_path / "app" / "lib" / f"python{version}" / "site-packages"
    assert (site / ONE).stat().st_size < installed.one.stat().st_size
    expected = read_code(installed.one).stdout
    assert read_code(site / ONE).stdout == expected
    (tmp_path / "spares").rename(tmp_path / "volume")
    without = read_code(site / ONE)
    assert is_refused(without) and "its spare libone.so.1." in without.stderr


@pytest.mark.slow
def test_another_slim_begins_with_the_original(site: Made, tmp_path: Path) -> None:
    before = digests(site.folder)
    slim(site, tmp_path)
    by_lock = digests(site.folder)
    assert statuses(slim(site, tmp_path, SM_80, dry_run=True).rows)[ONE] is SlimStatus.WOULD_SLIM
    assert digests(site.folder) == by_lock
    assert not slim(site, tmp_path, SM_80).failed
    by_arch = digests(site.folder)
    assert by_arch[ONE] != by_lock[ONE]
    assert not slim(site, tmp_path).failed
    assert {k: v for k, v in digests(site.folder).items() if k != MANIFEST_NAME} == {
        k: v for k, v in by_lock.items() if k != MANIFEST_NAME
    }
    # Without a spare, and with the originals made again and kept.
    assert not slim(site, tmp_path, spare=None, keep_originals=tmp_path / "originals").failed
    assert note_of(site.one) is None
    assert {
        digest_of(path) for path in (tmp_path / "originals").iterdir() if path.stat().st_size
    } == {before[ONE], before[TWO]}
    undo_trees((site.folder,))
    assert digests(site.folder) == before
    assert not [name for name in os.listdir(site.one.parent) if name.startswith(".")]


def test_another_slim_makes_each_original_once(
    site: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slim(site, tmp_path)
    made = []

    def rebuild(library: Path, *more: Any) -> None:
        made.append(library)
        rebuild_original(library, *more)

    monkeypatch.setattr(engine, "rebuild_original", rebuild)
    assert not slim(site, tmp_path, SM_80, dry_run=True).failed
    assert made == []
    assert not slim(site, tmp_path, SM_80).failed
    assert sorted(made) == [site.one, site.two]
    undo_trees((site.folder,))
    assert sorted(made) == [site.one, site.one, site.two, site.two]


@pytest.mark.planted_fault(
    "a library with a spare is slimmed again without --spare: its original would be lost",
    says="pass --spare DIR to have one again, or --keep-originals DIR",
)
def test_slimmed_again_without_the_option_a_library_stays(
    site: Made, tmp_path: Path, fault: PlantedFault
) -> None:
    before = digests(site.folder)
    slim(site, tmp_path, spare=SpareTarget(tmp_path / "spares"))
    after = digests(site.folder)
    words = ("--no-way-back", "--arch=sm_80", "--force-arch", str(site.folder))
    done = CliRunner().invoke(main, ["slim", *words])
    assert done.exit_code == 1
    fault.check(done.stderr)
    assert "pip install" not in done.stderr and digests(site.folder) == after
    assert set(statuses(undo_trees((site.folder,))).values()) == {SlimStatus.UNDONE}
    assert digests(site.folder) == before


@pytest.mark.skipif(shutil.which("llvm-strip") is None, reason="needs llvm-strip")
def test_llvm_strip(site: Made, tmp_path: Path) -> None:
    """What it leaves works, and is not what slim wrote."""
    slim(site, tmp_path)
    code = read_code(site.one).stdout
    subprocess.run(["llvm-strip", site.one], check=True)
    told = CliRunner().invoke(main, ["slim", "check", str(site.folder)])
    assert told.exit_code == 1 and f"{ONE}: changed" in told.output
    assert read_code(site.one).stdout == code != ""


def test_names_in_other_folders(site: Made, tmp_path: Path) -> None:
    other = site.folder / "other/linked.so"
    os.link(site.one, other)
    link = site.folder / "links/link.so"
    link.parent.mkdir()
    link.symlink_to("../other/linked.so")
    slim(site, tmp_path)
    assert other.samefile(site.one)
    assert read_code(other).stdout == read_code(site.one).stdout != ""
    # The loader takes the link's folder for the library's.
    assert read_code(link).stdout == read_code(site.one).stdout
    before = {path for path in site.folder.rglob("*") if path.name != MANIFEST_NAME}
    undo_trees((site.folder,))
    assert {*site.folder.rglob("*")} == before


def test_a_damaged_note_is_the_reason_without_a_manifest(site: Made, tmp_path: Path) -> None:
    slim(site, tmp_path)
    data = bytearray(site.one.read_bytes())
    note = note_of(site.one)
    assert note is not None
    data[data.index(note.pack()[:16])] ^= 1
    site.one.write_bytes(data)
    (site.folder / MANIFEST_NAME).unlink()
    [row] = (row for row in undo_trees((site.folder,)) if row.path == ONE)
    assert row.status is SlimStatus.FAILED and ": note b'" in str(row.detail)


@pytest.mark.planted_fault("a page of a spare is damaged", says="one of the two is damaged")
def test_a_damaged_spare(site: Made, tmp_path: Path, fault: PlantedFault) -> None:
    slim(site, tmp_path)
    slimmed, spare = digests(site.folder), find_spare(site.one)
    with ByteSource(site.one) as library:
        place = library.size
    note = note_of(site.one)
    assert note is not None and place < note.original_size
    with spare.open("r+b") as file:
        file.seek(note.holes[0].offset + 100)
        file.write(b"damaged")
    status, detail = checked(site)[ONE]
    assert status is SlimStatus.DAMAGED
    fault.check(detail or "")
    [row] = [row for row in undo_trees((site.folder,)) if row.path == ONE]
    assert row.status is SlimStatus.FAILED
    assert digest_of(site.one) == slimmed[ONE]
    # Nor is it slimmed anew.
    for dry_run in (True, False):
        [row] = [
            row for row in slim(site, tmp_path, SM_80, dry_run=dry_run).rows if row.path == ONE
        ]
        assert row.status is SlimStatus.FAILED
        fault.check(row.detail or "")
        assert digest_of(site.one) == slimmed[ONE]


def test_a_spare_that_is_gone(site: Made, tmp_path: Path) -> None:
    slim(site, tmp_path)
    spare = find_spare(site.one)
    error, folders = "CUDA error: named symbol not found", (site.folder,)
    text = explain_error(error, slimmed_in(folders), folders)
    assert text.startswith("2 libraries have spares here: ") and "\n" not in text
    spare.rename(tmp_path / spare.name)
    text = explain_error(error, slimmed_in(folders), folders)
    sound, lost, which = text.splitlines()
    assert sound.startswith("1 library has a spare here: ")
    assert lost.startswith("1 library can't get removed code back") and "No process" in lost
    assert spare.name in which
    manifest = (site.folder / MANIFEST_NAME).rename(tmp_path / MANIFEST_NAME)
    assert checked(site)[ONE][0] is SlimStatus.SPARE_AWAY
    manifest.rename(site.folder / MANIFEST_NAME)
    status, detail = checked(site)[ONE]
    assert status is SlimStatus.SPARE_AWAY and "set NEGATIVA_SPARE_DIR" in (detail or "")
    # What can't be read is not away.
    spare.mkdir()
    status, detail = checked(site)[ONE]
    assert status is SlimStatus.DAMAGED and str(spare) in (detail or "")
    spare.rmdir()
    spare.symlink_to(spare)
    status, detail = checked(site)[ONE]
    assert status is SlimStatus.DAMAGED and str(spare) in (detail or "")
    spare.unlink()
    # An image may leave its spares behind.
    for option, exit_code in ((), 0), (("--require",), 1):
        told = CliRunner().invoke(main, ["slim", "check", *option, str(site.folder)])
        assert told.exit_code == exit_code and not told.stderr
        assert f"{ONE}: no spare here: its spare {spare.name} can't be used" in told.stdout
    for require in (False, True):
        report = slim(site, tmp_path, require=require)
        assert report.stopped is require
        [row] = [row for row in report.rows if row.path == ONE]
        assert row.status is SlimStatus.SPARE_AWAY
        assert f"its spare {spare.name} can't be used" in (row.detail or "")
        assert "set NEGATIVA_SPARE_DIR" in (row.detail or "")
    before = digest_of(site.one)
    for rows in (undo_trees((site.folder,), dry_run=True), slim(site, tmp_path, SM_80).rows):
        assert statuses(rows)[ONE] is SlimStatus.FAILED
    done = read_code(site.one)
    assert is_refused(done) and "lies in none of its folders" in done.stderr
    assert digest_of(site.one) == before
    # It may come back beside its library.
    (tmp_path / spare.name).rename(site.one.with_name(spare.name))
    assert read_code(site.one).returncode == 0
    assert statuses(undo_trees((site.folder,)))[ONE] is SlimStatus.UNDONE


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_check_tells_of_a_spare_of_another_user(
    site: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slim(site, tmp_path)
    os.chown(find_spare(site.one), 65533, 65533)
    status, detail = checked(site)[ONE]
    assert status is SlimStatus.DAMAGED and "belongs to user 65533: neither to root" in (
        detail or ""
    )
    assert is_refused(read_code(site.one)) and "is not trusted" in read_code(site.one).stderr
    monkeypatch.setenv("NEGATIVA_SPARE_DIR", f"{tmp_path}/spares/")
    assert checked(site)[ONE][0] is SlimStatus.DAMAGED
    # Another one that is trusted counts.
    shutil.copy(find_spare(site.one), site.one.parent)
    assert checked(site)[ONE][0] is SlimStatus.SOUND
    assert read_code(site.one).returncode == 0


@pytest.mark.planted_fault(
    "a byte of a spare changes after slim", says="it does not give the original back"
)
def test_check_reads_every_byte_of_a_spare(site: Made, tmp_path: Path, fault: PlantedFault) -> None:
    slim(site, tmp_path)
    spare, note = find_spare(site.one), note_of(site.one)
    assert note is not None and checked(site)[ONE][0] is SlimStatus.SOUND
    sound = spare.read_bytes()
    ends = [(hole.offset, hole.offset + hole.end - hole.start) for hole in note.holes]
    for start, end in ends:
        for place in {start, (start + end) // 2, end - 1}:
            spare.write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
            problem = problem_of(site.one)
            assert problem is not None and problem[0] is SlimStatus.DAMAGED
            fault.check(problem[1])
    assert checked(site)[ONE] == problem
    assert CliRunner().invoke(main, ["slim", "check", str(site.folder)]).exit_code == 1
    # The head of its trailer, but for the version.
    trailer = trailer_offset(note.original_size)
    for place in {*range(trailer, trailer + 88)} - {*range(trailer + 8, trailer + 12)}:
        spare.write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
        assert problem_of(site.one) is not None
    spare.write_bytes(sound)
    assert problem_of(site.one) is None


@in_namespace
def test_check_tells_of_a_file_system_that_runs_no_code(site: Made, tmp_path: Path) -> None:
    slim(site, tmp_path)
    with bind(tmp_path / "spares"):
        mount("-o", "remount,bind,noexec", tmp_path / "spares")
        # What is small is copied.
        assert checked(site)[ONE][0] is SlimStatus.SOUND and read_code(site.one).returncode == 0
    large = compile_shared("pages/constants.c", tmp_path / "liblarge.so", '-DBLOCKS="80"')
    options = CutOptions(folders=(str(tmp_path / "spares"),))
    cut = cut_library(large, site.folder / large.name, tmp_path / "spares", [], options)
    assert sum(end - start for start, end in cut.holes) > MAX_COPIED
    with bind(tmp_path / "spares"):
        assert problem_of(cut.library) is None
        mount("-o", "remount,bind,noexec", tmp_path / "spares")
        problem = problem_of(cut.library)
        assert problem is not None and problem[0] is SlimStatus.DAMAGED
        assert "lies on a file system mounted noexec" in problem[1]
        with pytest.raises(OSError, match="mounted noexec"):
            ctypes.CDLL(str(cut.library))


def test_inspect_tells_what_is_left(site: Made, tmp_path: Path) -> None:
    slim(site, tmp_path)
    [entry] = [e for path, e in load_manifest(site.folder).slimmed.items() if path == ONE]
    done = CliRunner().invoke(main, ["inspect", "--json", str(site.one)])
    assert done.exit_code == 0, done.output
    [found] = json.loads(done.output)["libraries"]
    # Padding goes, too.
    assert 0 <= found["removed"]["gone_bytes"] - entry.gpu_code_removed < 4096
    assert found["removed"]["spare"] == find_spare(site.one).name
    left = sum(section["elements"] for section in found["summary"]["sections"])
    assert left > 0
    # Rests of what is gone are no problem.
    assert "not understood" not in str(found["summary"]["problems"])
    done = CliRunner().invoke(main, ["inspect", str(site.one)])
    assert f"lie in its spare {find_spare(site.one).name}, and come back" in done.output
    # The spare may lie beside the library.
    shutil.copy(find_spare(site.one), site.one.parent)
    done = CliRunner().invoke(main, ["inspect", str(site.folder)])
    assert done.exit_code == 0 and "are no longer in the files; with a spare: 2" in done.output
    done = CliRunner().invoke(main, ["inspect", "--packages", str(site.folder)])
    assert done.exit_code == 0, done.output
    assert "2 files were slimmed by negativa slim" in done.output
    image = tmp_path / "image.tar"
    subprocess.run(["tar", "-cf", image, "-C", site.folder, "."], check=True)
    done = CliRunner().invoke(main, ["inspect", "--packages", str(image)])
    assert done.exit_code == 0, done.output
    assert "2 files were slimmed by negativa slim" in done.output
    # A trace finds GPU code that came back in the spare.
    done = CliRunner().invoke(main, ["inspect", str(find_spare(site.one))])
    assert done.exit_code == 1
    assert "is a spare of negativa slim --spare, with parts of a library" in done.output


@pytest.mark.parametrize("by", ["archs", "lock", "both"])
def test_stripping_others_beside_a_spare(site: Made, tmp_path: Path, by: str) -> None:
    """What has GPU code gets a spare; the others lose what is never loaded, as without one."""
    alone = tmp_path / "alone"
    shutil.copytree(site.folder, alone)
    for path, spare in ((alone, None), (site.folder, SpareTarget(tmp_path / "spares"))):
        request = SlimRequest(
            paths=(path,),
            lock=None if by == "archs" else site.lock,
            devices=() if by == "lock" else (SM_80,),
            strip_others=True,
            options=SlimOptions(spare=spare),
        )
        dry = slim_trees(replace(request, options=replace(request.options, dry_run=True)))
        report = slim_trees(request)
        assert {r.path: r.after for r in dry.rows} == {r.path: r.after for r in report.rows}
        assert statuses(report.rows)[HOST] is SlimStatus.SLIMMED
    assert note_of(site.one) is not None and note_of(site.host) is None
    assert digest_of(site.host) == digest_of(alone / HOST)
    again = statuses(slim_trees(request).rows)
    assert again[ONE] is again[HOST] is SlimStatus.ALREADY


def test_spares_lie_outside_of_the_folder(site: Made) -> None:
    policy = SpareTarget(site.folder / "spares")
    with pytest.raises(OptionError, match="spares can't be kept in the folder to slim"):
        slim(site, site.folder, spare=policy)


def test_spares_lie_not_around_the_folder(site: Made) -> None:
    with pytest.raises(OptionError, match="name a folder for spares alone"):
        slim(site, site.folder, spare=SpareTarget(site.folder.parent))
    assert not (site.folder.parent / ORIGINALS_MARK).exists()


@pytest.mark.parametrize("mode", [0o777, 0o770])
@pytest.mark.planted_fault("other users may write to the folder of spares", says="may write to")
def test_a_folder_that_others_may_write_to(
    site: Made, tmp_path: Path, fault: PlantedFault, mode: int
) -> None:
    folder, before = tmp_path / "spares", digests(site.folder)
    folder.mkdir()
    if mode & stat.S_IWOTH == 0:
        if os.geteuid() != 0:
            pytest.skip("needs another group")
        os.chown(folder, -1, 65533)
    folder.chmod(mode)
    with pytest.raises(ReconstructError) as refused:
        slim(site, tmp_path)
    fault.check(str(refused.value))
    assert digests(site.folder) == before
    # Others could put spares into the place of those that are to come.
    folder.chmod(mode | stat.S_ISVTX)
    with pytest.raises(ReconstructError, match=r"may write to .*; name a folder in it"):
        slim(site, tmp_path)
    folder.chmod(mode & ~0o022)
    assert set(statuses(slim(site, tmp_path).rows).values()) == {SlimStatus.SLIMMED}


def test_the_message_of_a_missing_spare_advises_what_helps(site: Made, tmp_path: Path) -> None:
    slim(site, tmp_path)
    find_spare(site.one).unlink()
    told = read_code(site.one).stderr
    advice = f"Put it into {tmp_path}/spares, or install the library again. negativa misses tells"
    assert advice in told and load_manifest(site.folder).slimmed[ONE].source in told


# A library that reads its own file.


def test_what_a_killed_slim_left_is_removed(site: Made, tmp_path: Path) -> None:
    folder = tmp_path / "spares"
    left = folder / ".unchecked/libone.so.0.spare"
    theirs = folder / "theirs/.unchecked"
    for path in (left, theirs):
        path.parent.mkdir(parents=True)
        path.touch()
    slim(site, tmp_path, SM_80)
    assert not left.parent.exists() and theirs.exists()


def test_other_users_may_read_spares(site: Made, tmp_path: Path) -> None:
    folder = tmp_path / "of a group/new/spares"
    folder.parents[1].mkdir()
    folder.parents[1].chmod(0o2755)
    before = os.umask(0o077)
    try:
        slim(site, tmp_path, spare=SpareTarget(folder))
    finally:
        os.umask(before)
    # Also by way of the folders that were made around it; the group goes on to what is in them.
    for made in (folder, folder.parent):
        assert stat.S_IMODE(made.stat().st_mode) == 0o2755
    assert stat.S_IMODE(find_spare(site.one).stat().st_mode) == 0o644


def test_undo_waits_for_a_library_that_is_away(site: Made, tmp_path: Path) -> None:
    before = digests(site.folder)
    slim(site, tmp_path)
    site.one.rename(tmp_path / "away.so")
    assert statuses(undo_trees((site.folder,)))[ONE] is SlimStatus.LEFT
    (tmp_path / "away.so").rename(site.one)
    assert statuses(undo_trees((site.folder,)))[ONE] is SlimStatus.UNDONE
    assert digests(site.folder) == before


def test_undo_without_a_manifest_takes_the_spares(site: Made, tmp_path: Path) -> None:
    os.link(site.one, site.folder / "other/linked.so")
    before, lines = digests(site.folder), (site.info / "RECORD").read_bytes()
    times = site.one.stat().st_mtime_ns
    slim(site, tmp_path)
    (site.folder / MANIFEST_NAME).unlink()
    spare = find_spare(site.two)
    spare.rename(tmp_path / "away")
    assert slim(site, tmp_path).rows[0].status is not SlimStatus.FAILED
    (site.folder / MANIFEST_NAME).unlink()
    rows = {row.path: row for row in undo_trees((site.folder,))}
    assert (rows[ONE].status, rows[TWO].status) == (SlimStatus.UNDONE, SlimStatus.FAILED)
    assert "install it again: its spare libtwo.so." in (rows[TWO].detail or "")
    assert wrong_files(site.folder) == []
    (tmp_path / "away").rename(spare)
    assert statuses(undo_trees((site.folder,), dry_run=True)) == {TWO: SlimStatus.WOULD_UNDO}
    assert statuses(undo_trees((site.folder,))) == {TWO: SlimStatus.UNDONE}
    assert digests(site.folder) == before and site.one.stat().st_mtime_ns == times
    assert (site.info / "RECORD").read_bytes() == lines
    assert site.one.samefile(site.folder / "other/linked.so")


def test_what_cannot_be_cut_stays_whole(site: Made, tmp_path: Path) -> None:
    with site.one.open("ab") as file:
        file.write(b"PK appended" * 100)
    policy = SpareTarget(tmp_path / "spares")
    request = SlimRequest((site.one,), None, (SM_80,), options=SlimOptions(spare=policy))
    [row] = slim_trees(request).rows
    assert row.status is SlimStatus.LEFT and row.before == row.after
    assert "no section or segment" in (row.detail or "")


def test_the_folder_stays_empty_if_nothing_goes_into_a_spare(site: Made, tmp_path: Path) -> None:
    for path in (site.one, site.two):
        with path.open("r+b") as file:
            file.seek(18)
            file.write(struct.pack("<H", EM_AARCH64))
    new, mine = tmp_path / "a/b/spares", tmp_path / "mine"
    mine.mkdir()
    for folder in (new, mine):
        report = slim(site, tmp_path, SM_80, spare=SpareTarget(folder))
        rows = {row.path: row for row in report.rows}
        assert {rows[ONE].status, rows[TWO].status} == {SlimStatus.LEFT}
        assert "x86-64" in (rows[ONE].detail or "")
        assert list(folder.iterdir()) == []


@pytest.mark.planted_fault(
    "the folder of the spares before is read-only, and slim is to write new ones there",
    says="cannot be written: Read-only file system",
)
@in_namespace
def test_a_folder_of_spares_that_is_read_only(
    site: Made, tmp_path: Path, fault: PlantedFault
) -> None:
    spares, before = tmp_path / "spares", digests(site.folder)
    slim(site, tmp_path, spare=SpareTarget(spares))
    with read_only(spares):
        after = snapshot(site.folder)
        with pytest.raises(ReconstructError) as caught:
            slim(site, tmp_path, SM_80, spare=SpareTarget(spares))
        fault.check(str(caught.value))
        assert snapshot(site.folder) == after
        elsewhere = slim(site, tmp_path, SM_80, spare=SpareTarget(tmp_path / "elsewhere"))
        assert statuses(elsewhere.rows)[ONE] is SlimStatus.SLIMMED
    undo_trees((site.folder,))
    assert digests(site.folder) == before


@pytest.mark.planted_fault(
    "the disks of a folder, of its spares and of its originals are full",
    says="cannot be written: No space left on device",
)
@in_namespace
def test_a_full_disk_is_one_line(site: Made, tmp_path: Path, fault: PlantedFault) -> None:
    """Of the folder of spares, of the libraries, and of the originals."""
    for number in range(6):
        shutil.copy(site.one, site.folder / f"lib{number}.so")
    before = digests(site.folder)
    words = ["slim", "--arch=sm_80", "--force-arch", "--jobs=2"]

    def slim_fully(*more: str) -> str:
        done = CliRunner().invoke(main, [*words, *more])
        assert done.exit_code == 1
        lines = [line for line in done.stderr.splitlines() if ": failed: " in line]
        assert len(lines) == 1 and " and 7 more libraries: failed: " in lines[0], lines
        fault.check(lines[0])
        return lines[0]

    with small_disk(tmp_path / "spares", 64 << 10) as disk:
        disk.chmod(0o755)
        assert f"{disk}: " in slim_fully(f"--spare={disk}", str(site.folder))
    assert digests(site.folder) == before
    with small_disk(tmp_path / "originals", 64 << 10) as disk:
        disk.chmod(0o755)
        assert f"{disk}: " in slim_fully(f"--keep-originals={disk}", str(site.folder))
    assert {k: d for k, d in digests(site.folder).items() if k != MANIFEST_NAME} == before
    with small_disk(tmp_path / "disk", 16 << 20) as disk:
        disk.chmod(0o755)
        shutil.copytree(site.folder, disk / "site")
        with leave(disk, 8):
            slim_fully("--no-way-back", str(disk / "site"))


@pytest.mark.planted_fault(
    "the disk of the folder of spares is full", says="cannot be written: No space left on device"
)
@in_namespace
def test_no_room_for_a_spare(site: Made, tmp_path: Path, fault: PlantedFault) -> None:
    """The row names the full disk, not that of the library."""
    before = digests(site.folder)
    with small_disk(tmp_path / "spares", 520 << 10) as disk:
        disk.chmod(0o755)
        rows = {row.path: row for row in slim(site, tmp_path, SM_80).rows}
        done = [rows[name].status for name in (ONE, TWO)]
        assert sorted(done) == [SlimStatus.FAILED, SlimStatus.SLIMMED]
        [failed] = [row for row in rows.values() if row.status is SlimStatus.FAILED]
        assert (failed.detail or "").startswith(f"{tmp_path}/spares: ")
        fault.check(failed.detail or "")
        assert not list((tmp_path / "spares").glob(".unchecked*"))
        assert {status for status, _ in checked(site).values()} == {SlimStatus.SOUND}
        undo_trees((site.folder,))
    assert digests(site.folder) == before


@pytest.mark.slow
@pytest.mark.parametrize("by", ["lock", "archs"])
def test_untouched_cpu_code_goes_too(site: Made, tmp_path: Path, by: str) -> None:
    library = compile_library(tmp_path)
    shutil.copy(library, site.folder / "host/libpages.so")
    lock = with_pages(trace_of(library), site.lock if by == "lock" else None)
    report = slim(site, tmp_path, *([SM_80] if by == "archs" else []), lock=lock)
    [row] = [row for row in report.rows if row.path.endswith("libpages.so")]
    assert row.status is SlimStatus.SLIMMED and row.after < row.before - 700_000
    script = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).sum(0, int(sys.argv[2])))"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script, str(path), str(PAGES)], capture_output=True, check=True
        ).stdout
        for path in (library, site.folder / "host/libpages.so")
    }
    assert len(outputs) == 1
    assert not [row for row in undo_trees((site.folder,)) if row.status is not SlimStatus.UNDONE]
    assert digest_of(site.folder / "host/libpages.so") == digest_of(library)


@pytest.mark.slow
def test_cpu_code_that_came_back_stays(site: Made, tmp_path: Path) -> None:
    library = site.folder / "host/libpages.so"
    shutil.copy(compile_library(tmp_path), library)
    lock = with_pages(trace_of(library), site.lock)
    logs = tmp_path / "logs"
    script = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).sum(3, 30))"

    def misses() -> list[Misses]:
        environ = logged(logs)
        subprocess.run([sys.executable, "-c", script, str(library)], env=environ, check=True)
        return [one for one in read_misses([logs]) if one.pages]

    slim(site, tmp_path, lock=lock)
    cut = library.stat().st_size
    came_back = misses()
    assert [one.name for one in came_back] == [library.name]
    widened, added = widen_lock(lock, came_back, [])
    [(key, count)] = added.items()
    assert key == ("host/libpages.so", "page") and count == len(came_back[0].pages)
    report = slim(site, tmp_path, lock=widened)
    assert not report.failed
    assert library.stat().st_size > cut
    shutil.rmtree(logs)
    assert not misses()


def test_pages_of_another_file_than_the_lock_has_are_refused(site: Made) -> None:
    """It was replaced after slim had found it by its digest."""
    row = LockedLibrary(path=HOST, sha256="0" * 64, size=site.host.stat().st_size, pages="1")
    with ByteSource(site.host) as source, pytest.raises(StaleLibraryError, match="another file"):
        plan_cut(source, None, None, row)


@needs_page_watch
def test_constants_that_no_process_read_go_too(tmp_path: Path) -> None:
    """By a real trace, and where no library has GPU code; another process reads them again."""
    site, run, before = tmp_path / "site", tmp_path / "run", tmp_path / "before.so"
    site.mkdir()
    library = compile_constants(site)
    shutil.copy(library, before)
    run_it = "import ctypes, sys; library = ctypes.CDLL(sys.argv[1]); library.read_block(11)"
    command = [sys.executable, "-c", run_it, str(library)]
    traced = negativa("--dir", run, "trace", "--cpu", "--", *command)
    assert traced.returncode == 0, traced.stderr
    lock = tmp_path / "negativa.lock"
    assert negativa("--dir", run, "lock", "-o", lock).returncode == 0
    words = ["--lock", lock, "--arch=sm_80", "--spare", tmp_path / "spares", site]
    assert "libconstants.so" in negativa("slim", *words, "--dry-run").stdout
    done = negativa("slim", *words)
    assert done.returncode == 0 and "holes" not in done.stderr, done.stderr
    assert library.stat().st_size < before.stat().st_size - 2_700_000
    # The kernel reads them, too.
    script = """if True:
        import ctypes, os, sys
        library = ctypes.CDLL(sys.argv[1])
        out, into = os.pipe()
        print([library.write_of_block(block, into) for block in range(12)], os.read(out, 12))
    """
    outputs = {
        subprocess.run([sys.executable, "-c", script, path], capture_output=True, check=True).stdout
        for path in (library, before)
    }
    assert len(outputs) == 1
    assert checked_in(site) == {"libconstants.so": (SlimStatus.SOUND, "its spare fits")}
    undo_trees((site,))
    assert digest_of(library) == digest_of(before)


@pytest.mark.parametrize(
    ("most", "least"), [(9, 16), (5, 16), (4, 20), (3, 36), (2, 68), (1, 204), (0, 604), (-3, 604)]
)
def test_the_shortest_holes_stay(most: int, least: int) -> None:
    sizes = [size << 10 for size in (600, 200, 64, 32, 16)]
    assert least_hole(sizes, most) == least << 10


def test_all_libraries_share_the_holes(site: Made, tmp_path: Path) -> None:
    def slim_with(most: int) -> SlimReport:
        return slim(site, tmp_path, spare=SpareTarget(tmp_path / "spares", most_holes=most))

    def holes() -> int:
        notes = [note_of(path) for path in (site.one, site.two)]
        return sum(len(note.holes) for note in notes if note is not None)

    report = slim_with(100)
    assert report.holes == holes() > 3 and report.min_hole == 16 << 10
    fewer = slim_with(3)
    assert fewer.holes == holes() <= 3 and fewer.min_hole > 16 << 10
    assert slim_with(3).holes == holes()
    assert statuses(slim_with(100).rows) == dict.fromkeys((ONE, TWO), SlimStatus.SLIMMED)
    assert holes() == report.holes


@pytest.mark.slow
def test_a_relative_folder_of_spares(
    site: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found when the folder moves from which it was named."""
    monkeypatch.chdir(site.folder)
    words = ["slim", "--arch=sm_80", "--force-arch", "--spare=../spares", "."]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    moved = site.folder.rename(tmp_path / "moved")
    assert find_spare(moved / ONE).parent == tmp_path / "spares"


@pytest.mark.slow
def test_the_command_tells_where_the_code_lies(site: Made, tmp_path: Path) -> None:
    spares = tmp_path / "spares"
    arguments = ["slim", "--arch=sm_80", "--spare", str(spares)]
    other = tmp_path / "no GPU code"
    other.mkdir()
    shutil.copy(PLAIN, other / "plain.so")
    done = CliRunner().invoke(main, [*arguments, str(site.folder), str(other)])
    assert done.exit_code == 0, done.output
    undo = f"negativa slim undo {site.folder} '{other}'"
    assert f"negativa: {spares} has what was removed; {undo} puts it back" in done.stderr
    undone = CliRunner().invoke(main, ["slim", "undo", str(site.folder), f"{site.folder}/"])
    assert undone.exit_code == 0, undone.output
    originals = tmp_path / "originals"
    kept = ["slim", "--arch=sm_80", f"--keep-originals={originals}"]
    told = CliRunner().invoke(main, [*kept, str(site.folder), str(site.folder)])
    assert (
        f"negativa: {originals} has the originals; negativa slim undo {site.folder} puts them back"
    ) in told.stderr
    CliRunner().invoke(main, [*arguments, str(site.folder)])
    # A folder in which nothing was slimmed gets no manifest.
    assert [path.name for path in other.iterdir()] == ["plain.so"]
    again = CliRunner().invoke(main, [*arguments, str(site.folder)])
    assert again.exit_code == 0 and "has what was removed" not in again.stderr


def test_a_spare_in_use_stays_if_a_library_that_no_manifest_lists_cannot_be_replaced(
    site: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digests(site.folder)
    slim(site, tmp_path)
    (site.folder / MANIFEST_NAME).unlink()
    with monkeypatch.context() as patch:

        def fail(*_: object, **__: object) -> None:
            raise ReconstructError("no space is left")

        patch.setattr(engine, "replace_all", fail)
        assert slim(site, tmp_path).failed
    undo_trees((site.folder,))
    assert digests(site.folder) == before


def test_an_original_that_the_manifest_does_not_name_is_not_put_back(
    site: Made, tmp_path: Path
) -> None:
    slim(site, tmp_path)
    slimmed = digests(site.folder)
    manifest = load_manifest(site.folder)
    entry = structs.replace(manifest.slimmed[TWO], original_sha256="0" * 64)
    manifest.slimmed[TWO] = entry
    save_manifest(site.folder, manifest, "0" * 16)
    rows = {row.path: row for row in undo_trees((site.folder,))}
    assert rows[TWO].status is SlimStatus.FAILED
    assert digests(site.folder)[TWO] == slimmed[TWO]
