"""A folder of copies: made, used again, mended, emptied; alone and by several at once."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from pytest_negativa.errors import ReconstructError, StoreError
from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.plan import TrimmedCubin
from pytest_negativa.models.reconstruction import Reconstruction
from pytest_negativa.models.spans import Span
from pytest_negativa.rewriting import reconstruct as module
from pytest_negativa.rewriting.compact.records import CompactOptions
from pytest_negativa.rewriting.layout import state_of
from pytest_negativa.rewriting.plan_edits import overwrite
from pytest_negativa.rewriting.reconstruct import (
    IN_USE_NAME,
    MANIFEST_NAME,
    WRITING_NAME,
    check_copies,
    copy_path,
    hold_copies,
    reconstruct,
)
from tests.support import compacting
from tests.support.faults import PlantedFault
from tests.support.libraries import BIN, SHARED_OBJECTS
from tests.support.reconstructing import apply, planned_of

Planned = list[AnalyzedLibrary]

NAMES = ("libmultiarch.so", "libmode_none.so", "libframes.so")
OURS = {MANIFEST_NAME, WRITING_NAME, IN_USE_NAME}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "copies"


@pytest.fixture
def originals(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "originals"
    folder.mkdir()
    return [Path(shutil.copy(BIN / name, folder)) for name in NAMES]


@pytest.fixture
def planned(originals: list[Path]) -> Planned:
    return [planned_of(path) for path in originals]


def below(root: Path) -> set[str]:
    """Files of the folder, but for ours, as paths of originals."""
    return {
        f"/{path.relative_to(root)}"
        for path in root.rglob("*")
        if not path.is_dir() and path.name not in OURS
    }


def check(planned: Planned, made: Reconstruction, fill: int = 1) -> None:
    """Every copy is there, and what it should be."""
    paths = {p.plan.library.path for p in planned if p.plan.unused_bytes}
    assert {c.library.path for c in made.libraries} == paths
    assert not made.refused
    by_path = {p.plan.library.path: p for p in planned}
    for copy in made.libraries:
        one = by_path[copy.library.path]
        assert copy.library == one.plan.library
        assert copy.copy == f"{made.root}{copy.library.path}"
        expected = apply(
            Path(copy.library.path).read_bytes(), overwrite(one.library_map, one.plan, fill)
        )
        assert Path(copy.copy).read_bytes() == expected
        assert copy.copy_sha256 == hashlib.sha256(expected).hexdigest()
        assert copy.unused_bytes == one.plan.unused_bytes == sum(s.size for s in copy.unused)
        assert copy.elements == sum(not d.kept and d.size > 0 for d in one.plan.decisions)
    assert below(Path(made.root)) == paths


@pytest.mark.parametrize("jobs", [1, 3])
def test_every_fixture(root: Path, jobs: int) -> None:
    planned = [planned_of(path) for path in SHARED_OBJECTS]
    progress: list[tuple[int, int]] = []
    made = reconstruct(planned, root, jobs=jobs, on_done=lambda *done: progress.append(done))
    check(planned, made)
    assert len(made.libraries) > 20
    assert not any(c.reused for c in made.libraries)
    assert [c.library.path for c in made.libraries] == sorted(
        c.library.path for c in made.libraries
    )
    total = sum(c.library.size for c in made.libraries)
    assert progress == sorted(progress) and progress[-1] == (total, total)
    assert msgspec.json.decode(msgspec.json.encode(made), type=Reconstruction) == made


@pytest.mark.parametrize("fill", [0, 255])
def test_fill(planned: Planned, root: Path, fill: int) -> None:
    reconstruct(planned, root)
    made = reconstruct(planned, root, fill=fill)
    assert made.fill == fill and not any(c.reused for c in made.libraries)
    check(planned, made, fill)


def test_relative_root_and_link_to_it(
    planned: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    made = reconstruct(planned, Path("link"))
    assert made.root == str(tmp_path / "real")
    check(planned, made)


class TestReuse:
    @pytest.fixture
    def first(self, planned: Planned, root: Path) -> Reconstruction:
        return reconstruct(planned, root)

    @staticmethod
    def states(made: Reconstruction) -> dict[str, object]:
        return {c.copy: state_of(c.copy) for c in made.libraries}

    def again(self, planned: Planned, first: Reconstruction, rewritten: set[str]) -> Reconstruction:
        """A second time; only the copies of these base names are written anew."""
        second = reconstruct(planned, Path(first.root))
        check(planned, second)
        assert {Path(c.copy).name for c in second.libraries if not c.reused} == rewritten
        return second

    def test_unchanged(self, planned: Planned, first: Reconstruction) -> None:
        before = self.states(first)
        second = self.again(planned, first, set())
        assert self.states(second) == before
        assert [replace(c, reused=True) for c in first.libraries] == list(second.libraries)

    def test_only_states_are_read(
        self, planned: Planned, first: Reconstruction, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Unchanged files are not opened: an opening would be refused here."""
        monkeypatch.setattr(module, "ByteSource", None)
        monkeypatch.setattr(module, "digest_of", None)
        monkeypatch.setattr(module, "check_digest", None)
        self.again(planned, first, set())

    def test_copy_of_same_size_and_time(self, planned: Planned, first: Reconstruction) -> None:
        copy = Path(first.libraries[0].copy)
        before = copy.stat()
        time.sleep(0.02)
        with copy.open("r+b") as file:
            file.seek(before.st_size // 2)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
        os.utime(copy, ns=(before.st_atime_ns, before.st_mtime_ns))
        self.again(planned, first, {copy.name})

    def test_copy_that_was_only_touched(
        self, planned: Planned, first: Reconstruction, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Hashed, found to be right, and from then on trusted again."""
        for copy in first.libraries:
            os.utime(copy.copy)
        self.again(planned, first, set())
        self.test_only_states_are_read(planned, first, monkeypatch)

    @pytest.mark.parametrize("how", ["gone", "cut", "a link", "a folder"])
    def test_damaged_copy(self, planned: Planned, first: Reconstruction, how: str) -> None:
        copy = Path(first.libraries[0].copy)
        if how == "cut":
            os.truncate(copy, 100)
        else:
            copy.unlink()
        if how == "a link":
            copy.symlink_to(first.libraries[0].library.path)
        if how == "a folder":
            copy.mkdir()
            made = reconstruct(planned, Path(first.root))
            assert [(p, "Is a directory" in r) for p, r in made.refused.items()] == [
                (first.libraries[0].library.path, True)
            ]
            copy.rmdir()
        self.again(planned, first, {copy.name})

    def test_other_plan(self, planned: Planned, first: Reconstruction) -> None:
        changed = planned_of(Path(planned[0].plan.library.path), used_regions=(1, 2))
        assert changed.plan.unused_bytes != planned[0].plan.unused_bytes
        self.again([changed, *planned[1:]], first, {NAMES[0]})

    def test_other_writer(self, planned: Planned, first: Reconstruction) -> None:
        manifest = Path(first.root, MANIFEST_NAME)
        known = json.loads(manifest.read_text())
        for copy in known["copies"].values():
            copy["recipe"] = "0" * 64
        manifest.write_text(json.dumps(known))
        self.again(planned, first, {Path(c.copy).name for c in first.libraries})

    def test_changed_original(self, planned: Planned, first: Reconstruction) -> None:
        """Its copy is one of what it was: refused, and gone."""
        original = Path(planned[0].plan.library.path)
        before = original.stat()
        time.sleep(0.02)
        with original.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"!")
        os.utime(original, ns=(before.st_atime_ns, before.st_mtime_ns))
        made = reconstruct(planned, Path(first.root))
        [(path, reason)] = made.refused.items()
        assert path == str(original) and "changed since it was traced: sha256" in reason
        assert len(made.libraries) == len(first.libraries) - 1
        assert below(Path(made.root)) == {c.library.path for c in made.libraries}

    def test_rewritten_original(self, planned: Planned, first: Reconstruction) -> None:
        """Installed again, with the same bytes."""
        original = Path(planned[0].plan.library.path)
        data = original.read_bytes()
        original.unlink()
        original.write_bytes(data)
        self.again(planned, first, set())

    def test_unreadable_manifest(self, planned: Planned, first: Reconstruction) -> None:
        manifest = Path(first.root, MANIFEST_NAME)
        sound = json.loads(manifest.read_text())
        for text, reason in (
            ("{", "not a manifest of this release"),
            (json.dumps({**sound, "format": 99}), "format 99, this release reads 1; remove /"),
            ('{"format_version": 7, "copies": {}}', "format none, this release reads 1; remove /"),
        ):
            manifest.write_text(text)
            with pytest.raises(StoreError, match=reason):
                reconstruct(planned, Path(first.root))


class TestRemoval:
    def test_no_longer_planned(self, planned: Planned, root: Path) -> None:
        reconstruct(planned, root)
        stray = copy_path(root, planned[0].plan.library.path).with_name("notes.txt")
        stray.write_text("mine")
        check_path = str(stray.relative_to(root))
        made = reconstruct(planned[1:], root)
        assert below(root) == {c.library.path for c in made.libraries} | {f"/{check_path}"}
        reconstruct([], root)
        assert below(root) == {f"/{check_path}"}
        stray.unlink()

    def test_nothing_unused_any_more(self, planned: Planned, root: Path) -> None:
        reconstruct(planned, root)
        plan = planned[0].plan
        kept = tuple(msgspec.structs.replace(d, kept=True) for d in plan.decisions)
        all_kept = AnalyzedLibrary(planned[0].library_map, replace(plan, decisions=kept))
        reconstruct([all_kept], root)
        # Folders that are empty now are gone as well.
        assert {p.name for p in root.iterdir()} == OURS


class TestRefused:
    def test_one_stops_no_other(self, planned: Planned, root: Path) -> None:
        os.truncate(planned[0].plan.library.path, 1000)
        wrong = AnalyzedLibrary(planned[2].library_map, planned[1].plan)
        made = reconstruct([planned[0], wrong, planned[2]], root)
        assert [c.library.path for c in made.libraries] == [planned[2].plan.library.path]
        reasons = {Path(p).name: r for p, r in made.refused.items()}
        assert "1,000 bytes, expected" in reasons[NAMES[0]]
        assert "not of the same file" in reasons[NAMES[1]]
        assert below(root) == {planned[2].plan.library.path}

    def test_link_that_leads_to_the_originals(self, planned: Planned, root: Path) -> None:
        folder = Path(planned[0].plan.library.path).parent
        place = copy_path(root, str(folder))
        place.parent.mkdir(parents=True)
        place.symlink_to(folder)
        before = {p: p.read_bytes() for p in folder.iterdir()}
        made = reconstruct(planned, root)
        assert len(made.refused) == len(planned)
        assert all(f"leads to {folder}" in r for r in made.refused.values())
        assert {p: p.read_bytes() for p in folder.iterdir()} == before

    def test_path_that_leads_out_of_the_folder(self, planned: Planned, root: Path) -> None:
        """From a plan that somebody wrote."""
        one = planned[0]
        library = replace(one.plan.library, path="/../../" + NAMES[0])
        evil = AnalyzedLibrary(
            replace(one.library_map, library=library), replace(one.plan, library=library)
        )
        made = reconstruct([evil], root)
        assert len(made.refused) == 1 and not made.libraries
        assert not (root.parent.parent / NAMES[0]).exists()

    def test_folder_that_cannot_be(self, planned: Planned, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        for root in (tmp_path / "file", tmp_path / "file" / "below"):
            with pytest.raises(ReconstructError, match="cannot be made or written"):
                reconstruct(planned, root)


def test_interrupted(planned: Planned, root: Path) -> None:
    """What was complete is known and used again; nothing else is left."""

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reconstruct(planned, root, jobs=1, on_done=interrupt)
    assert not any(t.name.startswith("ThreadPool") for t in threading.enumerate())
    assert not list(root.rglob("*.tmp"))
    made = reconstruct(planned, root)
    check(planned, made)
    assert any(c.reused for c in made.libraries)


PROCESS = """
import os, signal, sys
from pathlib import Path
from pytest_negativa.rewriting import reconstruct as module
from tests.support.reconstructing import planned_of

root, kill_at, *libraries = sys.argv[1:]
written = iter(range(1000))
write_copy = module.write_copy

def write_or_die(*arguments, **options):
    facts = write_copy(*arguments, **options)
    if next(written) == int(kill_at):
        os.kill(os.getpid(), signal.SIGKILL)
    return facts

module.write_copy = write_or_die
planned = [planned_of(Path(path)) for path in libraries]
made = module.reconstruct(planned, Path(root), jobs=1)
print(sum(not c.reused for c in made.libraries), len(made.libraries), len(made.refused))
"""


def start(root: Path, originals: list[Path], kill_at: int = -1) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS, root, str(kill_at), *originals],
        cwd=BIN.parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("kill_at", [0, 1])
def test_killed_between_copies(
    planned: Planned, originals: list[Path], root: Path, kill_at: int
) -> None:
    """A copy may be there that nobody noted: it is known, and goes when it isn't wanted."""
    process = start(root, originals, kill_at)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    # The note of the copy before may have been half written.
    left = {name for name in below(root) if not name.endswith(".tmp")}
    assert len(left) == kill_at + 1
    made = reconstruct(planned[2:], root)
    check(planned[2:], made)


def test_several_processes(planned: Planned, originals: list[Path], root: Path) -> None:
    """One writes; the others wait for it and find all done."""
    processes = [start(root, originals) for _ in range(4)]
    outputs = sorted(process.communicate()[0].strip() for process in processes)
    assert outputs == ["0 3 0"] * 3 + ["3 3 0"]
    made = reconstruct(planned, root)
    check(planned, made)
    assert all(c.reused for c in made.libraries)


@compacting.needs_compiler
def test_a_library_that_uses_unused_code_is_overwritten(root: Path, tmp_path: Path) -> None:
    """A dynamic symbol names an address in the first region: no smaller file is certified."""
    path = compacting.build(
        tmp_path / "build",
        extra="    .globl exported_blob\n    .set exported_blob, fatbin_start + 4096\n"
        "    .type exported_blob, @object\n    .size exported_blob, 100\n",
    )
    library_map = compacting.read(path)
    plan = compacting.plan_of(library_map, lambda i: False)
    one = AnalyzedLibrary(library_map, plan)
    [made] = reconstruct([one], root, compact=CompactOptions()).libraries
    assert made.compaction is None and "a symbol at" in (made.not_compacted or "")
    assert made.unused_bytes == plan.unused_bytes
    # Overwriting asks nobody.
    [overwritten] = reconstruct([one], root).libraries
    assert overwritten.unused_bytes == plan.unused_bytes
    assert overwritten.elements == len(plan.decisions)


@compacting.needs_compiler
def test_what_slim_leaves_alone_is_not_compacted_for_a_proof(root: Path, tmp_path: Path) -> None:
    """The copy is overwritten instead, and has the archive that is appended to the original."""
    path = compacting.build(tmp_path / "build")
    archive = b"PK\5\6" + bytes(18)
    path.write_bytes(path.read_bytes() + archive)
    library_map = compacting.read(path)
    plan = compacting.plan_of(library_map, lambda i: i == 0)
    options = CompactOptions()
    [made] = reconstruct([AnalyzedLibrary(library_map, plan)], root, compact=options).libraries
    assert made.compaction is None
    assert "they may be an appended archive" in (made.not_compacted or "")
    [again] = reconstruct([AnalyzedLibrary(library_map, plan)], root, compact=options).libraries
    assert again == replace(made, reused=True)
    [asked] = reconstruct([AnalyzedLibrary(library_map, plan)], root).libraries
    assert asked.not_compacted is None
    assert made.unused_bytes == plan.unused_bytes
    copy = Path(made.copy).read_bytes()
    assert len(copy) == path.stat().st_size
    assert copy.endswith(archive)


def test_copy_in_which_all_was_left_alone(root: Path) -> None:
    """Tests on it would show nothing, so it must be seen."""
    one = planned_of(BIN / "libcallgraph.so")
    kept = tuple(replace(d, kept=True) for d in one.plan.decisions)
    cubin = TrimmedCubin(start=kept[0].start, kept=(), code_size=16, unused=(Span(1, 17),))
    plan = replace(one.plan, decisions=kept, trimmed=(cubin,))
    [copy] = reconstruct([AnalyzedLibrary(one.library_map, plan)], root).libraries
    assert copy.repacked[0].left_alone is not None
    assert copy.copy_sha256 == copy.library.sha256
    assert not copy.changes_code
    [copy] = reconstruct([one], root).libraries
    assert copy.copy_sha256 != copy.library.sha256
    assert copy.changes_code


HOLDER = """
import os, sys
from pathlib import Path
from pytest_negativa.rewriting.reconstruct import hold_copies

end, keep = os.pipe()
with hold_copies(Path(sys.argv[1])):
    child = os.fork()
    if child == 0:
        # Has the lock's file, and must not have the lock when its parent is done.
        os.close(keep)
        os.read(end, 1)
        os._exit(0)
    print(os.getpid(), flush=True)
    sys.stdin.readline()
print("done", flush=True)
sys.stdin.readline()
assert os.waitpid(child, os.WNOHANG) == (0, 0)
os.close(keep)
os.waitpid(child, 0)
"""


class TestHolding:
    def test_nobody_writes_while_tests_run(self, planned: Planned, root: Path) -> None:
        first = reconstruct(planned, root)
        with hold_copies(root), hold_copies(root):
            with pytest.raises(ReconstructError, match="in use by a verification"):
                reconstruct(planned[1:], root, patience=0.2)
            assert check_copies(first) == ()
        assert below(root) == {c.library.path for c in first.libraries}
        check(planned[1:], reconstruct(planned[1:], root))

    def test_other_process_and_its_children(self, planned: Planned, root: Path) -> None:
        reconstruct(planned, root)
        command = [sys.executable, "-c", HOLDER, str(root)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdout.readline()
            with pytest.raises(ReconstructError, match="in use by a verification"):
                reconstruct(planned, root, patience=0.2)
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "done\n"
            check(planned, reconstruct(planned, root))
            process.stdin.close()
            assert process.wait() == 0

    def test_waits_for_tests_that_end_soon(self, planned: Planned, root: Path) -> None:
        reconstruct(planned, root)
        held = hold_copies(root)
        held.__enter__()
        timer = threading.Timer(0.3, held.__exit__, (None, None, None))
        timer.start()
        check(planned, reconstruct(planned, root))
        timer.join()

    def test_waits_for_who_writes(self, planned: Planned, root: Path) -> None:
        order: list[str] = []

        def hold() -> None:
            with hold_copies(root):
                order.append("held")

        holder = threading.Thread(target=hold)

        def on_done(done: int, total: int) -> None:
            if not order:
                order.append("writing")
                holder.start()
                time.sleep(0.1)
            if done == total:
                order.append("written")

        reconstruct(planned, root, jobs=1, on_done=on_done)
        holder.join()
        assert order == ["writing", "written", "held"]

    def test_folder_that_is_not_there(self, root: Path) -> None:
        with pytest.raises(ReconstructError, match="cannot be opened"), hold_copies(root):
            pass


class TestChecking:
    @pytest.mark.parametrize("which", ["copy", "original"])
    @pytest.mark.parametrize("how", ["written", "replaced", "gone"])
    def test_what_happens_to_files(
        self, planned: Planned, root: Path, which: str, how: str
    ) -> None:
        made = reconstruct(planned, root)
        assert check_copies(made) == ()
        # What is used again is known as well.
        made = reconstruct(planned, root)
        assert check_copies(made) == ()
        library = made.libraries[1]
        path = Path(library.copy if which == "copy" else library.library.path)
        data, status = path.read_bytes(), path.stat()
        time.sleep(0.02)
        if how == "written":
            path.write_bytes(data)
        else:
            path.rename(path.with_name("old"))
        if how == "replaced":
            path.write_bytes(data)
        if how == "gone":
            assert check_copies(made) == (f"{path} was removed while the tests ran",)
            return
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert check_copies(made) == (f"{path} changed while the tests ran",)

    def test_all_copies_are_gone(self, planned: Planned, root: Path) -> None:
        made = reconstruct(planned, root)
        shutil.rmtree(root)
        gone = (f"{one.copy} was removed while the tests ran" for one in made.libraries)
        assert check_copies(made) == tuple(gone)

    @pytest.mark.parametrize("folder", ["/dev/shm", None], ids=["tmpfs", "disk"])
    @pytest.mark.planted_fault(
        "A process writes into a copy through a mapping, which changes no time on tmpfs.",
        says="changed while the tests ran",
    )
    def test_a_write_through_a_mapping(
        self, planned: Planned, root: Path, folder: str | None, fault: PlantedFault
    ) -> None:
        with tempfile.TemporaryDirectory(dir=folder or root.parent) as name:
            made = reconstruct(planned, Path(name))
            assert check_copies(made) == ()
            time.sleep(0.02)
            copy = Path(made.libraries[1].copy)
            with copy.open("r+b") as file, mmap.mmap(file.fileno(), 0) as view:
                view[0] ^= 1
            fault.check(" ".join(check_copies(made)))
            again = reconstruct(planned, Path(name))
            assert [one.reused for one in again.libraries] == [True, False, True]
