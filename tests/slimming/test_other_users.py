"""Root in folders of other users: their owner exchanges names while slim works."""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_negativa.errors import NegativaError, ReconstructError
from pytest_negativa.gpucode.source import digest_of
from pytest_negativa.models.slimming import SlimManifest, SlimmedFile, SlimStatus
from pytest_negativa.slimming import spares
from pytest_negativa.slimming.atomic_replacement import copy_file, keep_original
from pytest_negativa.slimming.package import slim_wheel
from pytest_negativa.slimming.request import SlimOptions, SlimReport, SlimRequest
from pytest_negativa.slimming.slim import slim_trees, undo_trees
from pytest_negativa.slimming.spares import SpareTarget, hold_alone, hold_folder
from pytest_negativa.slimming.tree import MANIFEST_NAME
from pytest_negativa.storage import shared_folders
from pytest_negativa.storage.records import write_record
from pytest_negativa.storage.shared_folders import ALONE, refuse_shared, set_mode
from tests.support.faults import PlantedFault
from tests.support.made_site import ONE, Made
from tests.support.sites import digests, make_wheel
from tests.support.slim_rows import statuses

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="root alone can harm other users")

OTHER = 65533


@pytest.fixture
def theirs(installed: Made) -> Iterator[Made]:
    """A site that belongs to another user, who can reach it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "home" / "site-packages"
        shutil.copytree(installed.folder, folder, symlinks=True)
        os.chmod(name, 0o755)
        for path in (folder.parent, folder, *folder.rglob("*")):
            os.chown(path, OTHER, OTHER)
        yield Made(folder, installed.lock, installed.lock_file)


@pytest.fixture
def secret(theirs: Made) -> Path:
    """A file that nobody but root may read."""
    path = theirs.folder.parents[1] / "secret"
    path.write_bytes(b"secret")
    path.chmod(0o600)
    return path


@pytest.mark.planted_fault(
    "A manifest of another user in root's folder makes undo write a program that runs as root",
    says="belongs to user 65533: who can write there can make root change any file",
)
@pytest.mark.parametrize("linked", [False, True])
def test_a_manifest_of_another_user(tmp_path: Path, fault: PlantedFault, linked: bool) -> None:
    folder = tmp_path / "site-packages"
    (folder / "gpu").mkdir(parents=True)
    path = folder / MANIFEST_NAME
    place = folder / "theirs.json" if linked else path
    sha256 = digest_of(Path("/bin/true")) or ""
    removed = SlimmedFile(
        names=("gpu/k",), original_sha256=sha256, original_size=1, sha256=sha256, size=0,
        mtime_ns=0, recipe="", source="x", gpu_code_removed=0,
        original=str(Path("/bin/true").resolve()),
    )  # fmt: skip
    manifest = SlimManifest(slimmed={"gpu/k": removed})
    write_record(place, manifest)
    os.chown(place, OTHER, OTHER)
    if linked:
        path.symlink_to(place)
    with pytest.raises(ReconstructError) as refused:
        undo_trees((folder,))
    fault.check(str(refused.value))
    assert not (folder / "gpu" / "k").exists()


def race(folder: Path, secret: Path, end: int) -> None:
    """Put a link to a file into the place of each hidden file that comes, until ``end`` closes."""
    while not select.select([end], [], [], 0)[0]:
        for at, _, names in os.walk(folder):
            for path in (Path(at, n) for n in names if n.startswith(".lib") and ".negativa-" in n):
                with contextlib.suppress(OSError):
                    if not path.is_symlink():
                        link = path.with_name(f"{path.name}.link")
                        link.symlink_to(secret)
                        link.rename(path)


@contextlib.contextmanager
def racing(folder: Path, secret: Path) -> Iterator[None]:
    """The owner of a folder at work. A forked process: others may not run root's Python."""
    end, closing = os.pipe()
    if (owner := os.fork()) == 0:
        try:
            os.close(closing)
            os.setgroups([])
            os.setgid(OTHER)
            os.setuid(OTHER)
            race(folder, secret, end)
        finally:
            os._exit(0)
    try:
        yield
    finally:
        os.close(closing)
        os.close(end)
        os.waitpid(owner, 0)


def slim(site: Made, **options: object) -> SlimReport:
    made = SlimOptions(**options)  # type: ignore[arg-type]
    return slim_trees(SlimRequest(paths=(site.folder,), lock=site.lock, options=made))


def is_untouched(secret: Path) -> bool:
    status = secret.stat()
    return (status.st_uid, status.st_gid, status.st_mode & 0o7777) == (0, 0, 0o600)


@pytest.mark.planted_fault(
    "the owner of a folder puts links into the places of files that root changes there",
    says="who can write there can make root change any file",
)
def test_root_refuses_folders_of_others(theirs: Made, fault: PlantedFault) -> None:
    before = digests(theirs.folder)
    for work in (lambda: slim(theirs), lambda: undo_trees((theirs.folder,))):
        with pytest.raises(ReconstructError) as refused:
            work()
        fault.check(str(refused.value))
        assert f"{theirs.folder.parent} belongs to user {OTHER}" in str(refused.value)
    # It belongs to root, in a folder that doesn't.
    for path in (theirs.folder, *theirs.folder.rglob("*")):
        os.chown(path, 0, 0)
    with pytest.raises(ReconstructError, match=f"home belongs to user {OTHER}"):
        slim(theirs)
    os.chown(theirs.folder.parent, 0, 0)
    theirs.folder.chmod(0o775)
    with pytest.raises(ReconstructError, match=r"may write to .*site-packages \(mode 775; chmod"):
        slim(theirs)
    assert digests(theirs.folder) == before


@pytest.mark.parametrize("spare", [False, True])
def test_a_racing_owner_gets_no_file(
    theirs: Made, secret: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spare: bool
) -> None:
    monkeypatch.setenv(ALONE, "1")
    policy = SpareTarget(tmp_path / "spares") if spare else None
    with racing(theirs.folder, secret):
        # What becomes of the owner's files is the owner's doing.
        with contextlib.suppress(NegativaError):
            slim(theirs, spare=policy, keep_originals=tmp_path / "originals")
        assert is_untouched(secret)
    undo_trees((theirs.folder,))
    slim(theirs, spare=policy, keep_originals=tmp_path / "originals")
    with racing(theirs.folder, secret), contextlib.suppress(NegativaError):
        undo_trees((theirs.folder,))
    assert is_untouched(secret)
    assert secret.read_bytes() == b"secret"


def test_the_owner_stays(theirs: Made, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(ALONE, "1")
    one = theirs.folder / ONE
    one.chmod(0o640)
    before = digests(theirs.folder)
    for options in ({}, {"spare": SpareTarget(tmp_path / "spares")}):
        report = slim(theirs, **options, keep_originals=tmp_path / "originals")
        assert statuses(report.rows)[ONE] is SlimStatus.SLIMMED
        status = one.stat()
        assert (status.st_uid, status.st_gid, status.st_mode & 0o7777) == (OTHER, OTHER, 0o640)
        undo_trees((theirs.folder,))
        status = one.stat()
        assert (status.st_uid, status.st_gid, status.st_mode & 0o7777) == (OTHER, OTHER, 0o640)
        assert digests(theirs.folder) == before


def test_one_folder_of_another_user(site: Made) -> None:
    """The other libraries are slimmed; what has nothing to remove is no matter."""
    for folder in (site.one.parent, site.host.parent):
        os.chown(folder, OTHER, OTHER)
    report = slim(site)
    assert {row.status for row in report.rows} == {SlimStatus.FAILED}
    assert f"{site.one.parent} belongs to user {OTHER}" in (report.rows[0].detail or "")
    os.chown(site.one.parent, 0, 0)
    assert set(statuses(slim(site).rows).values()) == {SlimStatus.SLIMMED}
    os.chown(site.one.parent, OTHER, OTHER)
    small = digests(site.folder)
    assert set(statuses(undo_trees((site.folder,))).values()) == {SlimStatus.FAILED}
    after = digests(site.folder)
    assert {k: v for k, v in small.items() if k != MANIFEST_NAME} == {
        k: v for k, v in after.items() if k != MANIFEST_NAME
    }


@pytest.mark.planted_fault(
    "the owner of a folder in root's tree exchanges it for a link to a folder of root",
    says="who can write there can make root change any file",
)
@pytest.mark.parametrize("spare", [False, True])
def test_nothing_is_written_into_one_folder_of_another_user(
    site: Made, tmp_path: Path, spare: bool, fault: PlantedFault
) -> None:
    """Not for a moment: a temporary file would land where such a link leads."""
    options = {"keep_originals": None if spare else tmp_path / "originals"}
    policy, folder = SpareTarget(tmp_path / "spares") if spare else None, site.one.parent
    left = folder / f".{site.one.name}.0.tmp"
    for work in (
        lambda: slim(site, spare=policy, **options).rows,
        lambda: undo_trees((site.folder,)),
    ):
        left.touch()
        os.chown(folder, OTHER, OTHER)
        before = folder.stat().st_mtime_ns
        rows = work()
        assert {row.status for row in rows} == {SlimStatus.FAILED}
        fault.check(str(rows[0].detail))
        assert folder.stat().st_mtime_ns == before and left.exists()
        os.chown(folder, 0, 0)
        slim(site, spare=policy, **options)


def test_folders_beside_the_libraries(site: Made, installed: Made, theirs: Made) -> None:
    """Originals, spares and a wheel in a folder of another user."""
    home, before = theirs.folder.parent, digests(site.folder)
    with pytest.raises(ReconstructError, match=f"{home} belongs to user {OTHER}"):
        slim(site, keep_originals=home / "originals")
    with pytest.raises(ReconstructError, match=f"{home} belongs to user {OTHER}"):
        slim(site, spare=SpareTarget(home / "spares"))
    wheel = make_wheel(site.folder.parent, "gpu-code", "1.0", {ONE: installed.one})
    for target in (home, home / "wheels"):
        request = SlimRequest(paths=(wheel,), lock=site.lock, target=target)
        with pytest.raises(ReconstructError, match=f"{home} belongs to user {OTHER}"):
            slim_wheel(request)
    assert digests(site.folder) == before
    assert sorted(path.name for path in home.iterdir()) == ["site-packages"]


@pytest.fixture
def overtaken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that another user makes as soon as root has looked at where it is to be."""
    tmp_path.chmod(0o1777)
    folder, look = tmp_path / "overtaken", shared_folders.why_shared

    def look_and_wait(place: Path, owners: set[int], within: tuple[Path, ...] = ()) -> str | None:
        reason = look(place, owners, within)
        if folder in (place, *place.parents) and not folder.exists():
            folder.mkdir()
            os.chown(folder, OTHER, OTHER)
        return reason

    for module in (shared_folders, spares):
        monkeypatch.setattr(module, "why_shared", look_and_wait)
    return folder


@pytest.mark.parametrize("below", [".", "more/of it"])
def test_another_user_makes_the_folder_first(
    site: Made, installed: Made, overtaken: Path, below: str
) -> None:
    folder, before = overtaken / below, digests(site.folder)
    wheel = make_wheel(site.folder.parent, "gpu-code", "1.0", {ONE: installed.one})

    def hold_spares() -> None:
        with hold_folder(folder):
            pass

    for work in (
        hold_spares,
        lambda: slim_wheel(SlimRequest(paths=(wheel,), lock=site.lock, target=folder)),
        lambda: keep_original(
            site.one, folder / hashlib.sha256(site.one.read_bytes()).hexdigest(), "0", None
        ),
    ):
        with pytest.raises(ReconstructError, match=f"{overtaken} belongs to user {OTHER}"):
            work()
        # Empty folders at most: those below were made when it was there.
        assert not [path for path in overtaken.rglob("*") if not path.is_dir()]
        shutil.rmtree(overtaken)
    assert digests(site.folder) == before


def test_nobody_holds_a_folder_that_another_user_makes_first(overtaken: Path) -> None:
    with pytest.raises(ReconstructError, match="belongs to user"), hold_alone(overtaken):
        pass


def test_spares_in_a_folder_of_others(tmp_path: Path) -> None:
    """Also if the libraries lie in it, too."""
    with tempfile.TemporaryDirectory() as name:
        os.chown(name, OTHER, OTHER)
        with (
            pytest.raises(ReconstructError, match=f"{name} belongs to user {OTHER}"),
            hold_folder(Path(name, "spares"), Path(name, "site")),
        ):
            pass
        assert os.listdir(name) == []


def test_modes_are_not_those_behind_links(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_bytes(b"secret")
    file.chmod(0o600)
    link.symlink_to(file)
    with pytest.raises(OSError, match="symbolic links"):
        set_mode(link, 0o644)
    assert is_untouched(file)
    set_mode(file, 0o044, add=True)
    assert file.stat().st_mode & 0o777 == 0o644


def test_links_on_the_way(tmp_path: Path) -> None:
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    refuse_shared(link, folder / "not there")
    os.chown(link, OTHER, OTHER, follow_symlinks=False)
    with pytest.raises(ReconstructError, match=f"link belongs to user {OTHER}"):
        refuse_shared(link)
    tmp_path.chmod(0o1777)
    refuse_shared(folder)
    # As /tmp is. To take the right from others would break the system.
    with pytest.raises(ReconstructError, match=r"\(mode 1777; name a folder in it that its owner"):
        refuse_shared(tmp_path)
    # As Debian has /var/local.
    os.chown(tmp_path, -1, 50)
    tmp_path.chmod(0o2775)
    with pytest.raises(ReconstructError, match=rf"group (staff|50) .* \(mode 2775\).*{ALONE}=1"):
        refuse_shared(folder)
    tmp_path.chmod(0o777)
    with pytest.raises(ReconstructError, match="other users may write to"):
        refuse_shared(folder)


def test_links_on_the_way_to_others(tmp_path: Path) -> None:
    """A link of root leads to one that another user can exchange, and that one to root's."""
    folder, sticky, link = tmp_path / "folder", tmp_path / "sticky", tmp_path / "link"
    folder.mkdir()
    sticky.mkdir()
    sticky.chmod(0o1777)
    (sticky / "next").symlink_to("../folder")
    for target in ("sticky/next", "folder/../sticky/next", sticky / "next"):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        refuse_shared(link, link / "not there")
    os.chown(sticky / "next", OTHER, OTHER, follow_symlinks=False)
    for place in (link, link / "not there"):
        with pytest.raises(ReconstructError, match=f"sticky/next belongs to user {OTHER}"):
            refuse_shared(place)
    (tmp_path / "loop").symlink_to("loop")
    refuse_shared(tmp_path / "loop", tmp_path / "loop" / "not there")


def test_where_the_root_folder_belongs_to_a_stranger(tmp_path: Path) -> None:
    """As in a user namespace: the system's root has the number there that all strangers have."""
    os.chown(tmp_path, 65534, 65534)
    (tmp_path / "folder").mkdir()
    if (child := os.fork()) == 0:
        status = 1
        try:
            os.chroot(tmp_path)
            with pytest.raises(ReconstructError, match="/ belongs to user 65534"):
                refuse_shared(Path("/folder"))
            with (
                pytest.raises(ReconstructError, match=f"/ belongs to user 65534.*set {ALONE}=1"),
                hold_folder(Path("/folder")),
            ):
                pass
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def test_a_copy_has_the_attributes_of_the_file_that_was_read(tmp_path: Path) -> None:
    original, like = tmp_path / "original", tmp_path / "like"
    original.write_bytes(b"bytes")
    os.setxattr(original, "user.note", b"of the kept one")
    like.write_bytes(b"others")
    os.chown(like, OTHER, OTHER)
    like.chmod(0o604)
    copy_file(original, tmp_path / "copy", like=like, mtime_ns=7)
    status = (tmp_path / "copy").stat()
    assert (status.st_uid, status.st_mode & 0o777, status.st_mtime_ns) == (OTHER, 0o604, 7)
    # What nobody gave to the library, nobody gets by the kept original.
    assert "user.note" not in os.listxattr(tmp_path / "copy")
    copy_file(original, tmp_path / "other")
    assert "user.note" in os.listxattr(tmp_path / "other")


def test_spares_where_others_can_exchange_the_folder() -> None:
    """Also without root. Who can exchange the libraries, too, needs no spare for that."""
    with tempfile.TemporaryDirectory() as name:
        shared = Path(name, "shared")
        for folder in (shared, shared / "spares", shared / "site"):
            folder.mkdir()
            os.chown(folder, OTHER, OTHER)
        shared.chmod(0o777)
        os.chmod(name, 0o755)
        os.seteuid(OTHER)
        try:
            with hold_folder(shared / "spares", shared / "site"):
                pass
            with (
                pytest.raises(ReconstructError, match=r"shared \(mode 777.*name another folder"),
                hold_folder(shared / "spares", Path(name, "site")),
            ):
                pass
        finally:
            os.seteuid(0)
        assert [path.name for path in (shared / "spares").iterdir()] == []
