"""A wheel becomes a smaller wheel of the same name, which pip installs."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pytest_negativa.arch import ComputeCapability
from pytest_negativa.cli.main import main
from pytest_negativa.errors import ReconstructError
from pytest_negativa.gpucode.slimmed import is_slimmed
from pytest_negativa.slimming.package import NOTICE, slim_wheel
from pytest_negativa.slimming.request import SlimRequest
from pytest_negativa.storage.lockfile import save_lock
from tests.support.builders import CubinSpec, build_cubin
from tests.support.compacting import build, gpu_code
from tests.support.libraries import MULTIARCH, PLAIN, make_large
from tests.support.sites import lock_of, make_wheel, pip_install

ONE, TWO = "gpu/lib/libone.so.1", "gpu/lib/libtwo.so"
INFO = "gpu_code-1.0.dist-info"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    one = build(folder / "one", "-Wl,-soname,libone.so.1", name="libone.so.1")
    two = build(folder / "two", name="libtwo.so", fatbin=gpu_code(3), ldata=gpu_code(4))
    script = folder / "tool.sh"
    script.write_text("#!/bin/sh\n")
    save_lock(lock_of(one, two), folder / "negativa.lock")
    files = {ONE: one, TWO: two, "gpu/tool.sh": script, "gpu/plain.so": PLAIN}
    plain = make_wheel(folder, "gpu-code", "1.0", files)
    wheel = folder / "dist" / plain.name
    wheel.parent.mkdir()
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            info.external_attr = (0o100755 if info.filename.endswith(".sh") else 0o100644) << 16
            new.writestr(info, old.read(info), zipfile.ZIP_DEFLATED)
        new.writestr(f"{INFO}/RECORD.jws", b"{}")
    return wheel


@pytest.fixture
def simple(tmp_path: Path) -> Path:
    """A wheel that takes no compiler."""
    (tmp_path / "dist").mkdir()
    return make_wheel(tmp_path / "dist", "gpu-code", "1.0", {ONE: MULTIARCH})


def slim(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["slim", *map(str, arguments)], catch_exceptions=False)


def assert_record_fits(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        rows = list(csv.reader(archive.read(f"{INFO}/RECORD").decode().splitlines()))
        assert [row[0] for row in rows if not row[1]] == [f"{INFO}/RECORD"]
        assert {row[0] for row in rows} == set(archive.namelist())
        for name, digest, size in rows:
            if digest:
                data = archive.read(name)
                found = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
                assert (digest, size) == (f"sha256={found.decode()}", str(len(data)))


def test_a_wheel_has_one_notice(tmp_path: Path) -> None:
    files = {ONE: make_large(MULTIARCH, tmp_path / "one.so"), f"{INFO}/{NOTICE}": MULTIARCH}
    wheel = make_wheel(tmp_path, "gpu-code", "1.0", files)
    target = tmp_path / "target"
    target.mkdir()
    assert slim("--arch=sm_80", "--force-arch", "--target", target, wheel).exit_code == 0
    assert_record_fits(target / wheel.name)
    with zipfile.ZipFile(target / wheel.name) as archive:
        assert len(archive.namelist()) == len({*archive.namelist()})
        assert ONE in archive.read(f"{INFO}/{NOTICE}").decode()


@pytest.mark.slow
@pytest.mark.parametrize("by", ["lock", "arch"])
def test_a_smaller_wheel_that_pip_installs(original: Path, tmp_path: Path, by: str) -> None:
    before = original.read_bytes()
    lock = original.parents[1] / "negativa.lock"
    how = ["--lock", lock, "--require"] if by == "lock" else ["--arch", "sm_90"]

    result = slim(original, "--target", tmp_path / "out", *how)

    assert result.exit_code == 0, result.output
    made = tmp_path / "out" / original.name
    assert list((tmp_path / "out").iterdir()) == [made]
    assert original.read_bytes() == before and made.stat().st_size < len(before)
    assert made.stat().st_mode == original.stat().st_mode
    assert f"{made}: " in result.stderr and "check the licences" in result.stderr
    assert_record_fits(made)
    with zipfile.ZipFile(original) as old, zipfile.ZipFile(made) as new:
        names = [name for name in old.namelist() if not name.endswith("RECORD.jws")]
        assert new.namelist() == [*names[:-1], f"{INFO}/{NOTICE}", names[-1]]
        for name in names:
            info, was = new.getinfo(name), old.getinfo(name)
            assert (info.external_attr, info.compress_type, info.date_time) == (
                (was.external_attr, was.compress_type, was.date_time)
            )
            changed = name in (ONE, TWO, f"{INFO}/RECORD")
            assert (new.read(name) == old.read(name)) is not changed
        notice = new.read(f"{INFO}/{NOTICE}").decode()
    assert ONE in notice and TWO in notice and "plain.so" not in notice
    pip_install(tmp_path / "site", made)
    assert is_slimmed(tmp_path / "site" / ONE)
    assert (tmp_path / "site/gpu/tool.sh").stat().st_mode & 0o111
    # The installed libraries tell what they are, without the manifest.
    explained = CliRunner().invoke(main, ["explain", "CUDA error: x", str(tmp_path / "site")])
    assert "2 slimmed libraries here" in explained.output


@pytest.mark.slow
def test_a_dry_run_writes_nothing(original: Path, tmp_path: Path) -> None:
    result = slim(original, "--target", tmp_path / "out", "--arch", "sm_90", "--dry-run")
    assert result.exit_code == 0 and "libone.so.1" in result.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "a wheel needs --target DIR"),
        (["--target", "taken"], "exists; name another folder, or move it away"),
        (["--target", "out", "--spare", "spares"], "--spare takes installed libraries"),
        (["--target", "out", "other.whl"], "slim takes one wheel at a time"),
    ],
)
def test_what_is_refused(
    simple: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / simple.name).write_bytes(b"mine")
    result = slim(simple, "--arch", "sm_90", *arguments)
    assert result.exit_code == 2 and message in result.stderr
    assert (tmp_path / "taken" / simple.name).read_bytes() == b"mine"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../evil.so", "'../evil.so' leads out of the archive"),
        ("/evil.so", "'/evil.so' leads out of the archive"),
        ("other-1.dist-info/RECORD", "has 2 folders *.dist-info with RECORD"),
    ],
)
def test_a_hostile_wheel(simple: Path, tmp_path: Path, name: str, message: str) -> None:
    wheel = tmp_path / simple.name
    wheel.write_bytes(simple.read_bytes())
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr(name, PLAIN.read_bytes())
    result = slim(wheel, "--arch", "sm_90", "--target", tmp_path / "out")
    assert result.exit_code == 1 and message in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_wheel_whose_record_is_a_folder(tmp_path: Path) -> None:
    wheel = tmp_path / "a-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("a-1.dist-info/RECORD/file", b"")
    result = slim(wheel, "--arch", "sm_90", "--target", tmp_path / "out")
    assert result.exit_code == 1 and "has 0 folders *.dist-info with RECORD" in result.stderr


def test_a_wheel_with_a_wrong_checksum(simple: Path, tmp_path: Path) -> None:
    wheel = tmp_path / simple.name
    data = bytearray(simple.read_bytes())
    data[data.index(b"PK\1\2") + 16] ^= 1
    wheel.write_bytes(data)
    result = slim(wheel, "--arch", "sm_90", "--target", tmp_path / "out")
    assert result.exit_code == 1
    assert f"{wheel}: Bad CRC-32 for file '{ONE}'" in result.stderr
    assert not list((tmp_path / "out").iterdir())


def test_an_encrypted_wheel(simple: Path, tmp_path: Path) -> None:
    wheel = tmp_path / simple.name
    data = bytearray(simple.read_bytes())
    data[data.index(b"PK\1\2") + 8] |= 1
    wheel.write_bytes(data)
    result = slim(wheel, "--arch", "sm_90", "--target", tmp_path / "out")
    assert result.exit_code == 1 and f"'{ONE}' is encrypted" in result.stderr
    assert not (tmp_path / "out").exists()


def test_damage_in_a_file_that_is_copied(simple: Path, tmp_path: Path) -> None:
    wheel = tmp_path / simple.name
    wheel.write_bytes(simple.read_bytes())
    with zipfile.ZipFile(wheel, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("gpu/notes.txt", b"text" * 1000)
        at = archive.getinfo("gpu/notes.txt").header_offset + 30 + len("gpu/notes.txt")
    data = bytearray(wheel.read_bytes())
    data[at] ^= 0xFF
    wheel.write_bytes(data)
    result = slim(wheel, "--arch", "sm_90", "--target", tmp_path / "out")
    assert result.exit_code == 1 and f"{wheel}: " in result.stderr
    assert "is the archive damaged?" in result.stderr
    assert not list((tmp_path / "out").iterdir())


def test_a_wheel_in_which_nothing_is_slimmed(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "gpu-code", "1.0", {ONE: PLAIN})
    result = slim(wheel, "--arch", "sm_90", "--target", tmp_path / "out")
    made = tmp_path / "out" / wheel.name
    assert result.exit_code == 0 and made.read_bytes() == wheel.read_bytes()


class Pipe(io.BytesIO):
    """A file without a way back, so that sizes come behind the bytes of each file."""

    def seekable(self) -> bool:
        return False

    def seek(self, *_where: int) -> int:
        raise io.UnsupportedOperation


@pytest.mark.parametrize("streamed", [False, True])
def test_files_that_did_not_change_keep_their_content(tmp_path: Path, streamed: bool) -> None:
    """Also those that are packed otherwise, or whose names need more than ASCII, or quotes."""
    cubin = tmp_path / "old.cubin"
    cubin.write_bytes(build_cubin(CubinSpec(arch=80, kernels={"k": b"\1" * 64})).data)
    simple = make_wheel(tmp_path, "gpu-code", "1.0", {"gpu/old.cubin": cubin})
    wheel = tmp_path / "dist" / simple.name
    wheel.parent.mkdir()
    written = Pipe() if streamed else io.BytesIO()
    with zipfile.ZipFile(simple) as old, zipfile.ZipFile(written, "w") as new:
        new.writestr(zipfile.ZipInfo("gpu/"), b"")
        for method in (zipfile.ZIP_STORED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
            new.writestr(f"gpu/lib/plain{method}.so", PLAIN.read_bytes(), method)
            new.writestr(f'gpu/ümlaut, "{method}".txt', b"text" * 1000, method)
        for info in old.infolist():
            new.writestr(info.filename, old.read(info), zipfile.ZIP_DEFLATED, 1)
    wheel.write_bytes(written.getvalue())
    result = slim(wheel, "--arch", "sm_90", "--target", tmp_path / "out")
    assert result.exit_code == 0, result.output
    made = tmp_path / "out" / wheel.name
    assert_record_fits(made)
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(made) as new:
        assert new.testzip() is None
        same = set(old.namelist()) - {"gpu/", "gpu/old.cubin", f"{INFO}/RECORD"}
        assert set(new.namelist()) == {*same, f"{INFO}/RECORD", f"{INFO}/{NOTICE}"}
        for name in same:
            assert old.read(name) == new.read(name)
            assert old.getinfo(name).compress_type == new.getinfo(name).compress_type


def test_a_file_that_takes_the_name_meanwhile(simple: Path, tmp_path: Path) -> None:
    taken = tmp_path / "out" / simple.name
    devices = (ComputeCapability(9, 0),)
    request = SlimRequest(paths=(simple,), devices=devices, target=taken.parent)

    def take_the_name(done: int, total: int) -> None:
        taken.write_text("mine")

    with pytest.raises(ReconstructError, match=f"{taken}: cannot be written: File exists"):
        slim_wheel(request, take_the_name)
    assert taken.read_text() == "mine" and list(taken.parent.iterdir()) == [taken]


def with_record_of(wheel: Path, target: Path, before: bytes) -> Path:
    """The wheel, with something before the rows of its RECORD, or without rows."""
    target.mkdir()
    with (
        zipfile.ZipFile(wheel) as old,
        zipfile.ZipFile(target / wheel.name, "w") as new,
    ):
        for info in old.infolist():
            data = old.read(info)
            if info.filename.endswith("/RECORD"):
                data = before + data if before else b""
            new.writestr(info, data)
    return target / wheel.name


DAMAGED = pytest.mark.parametrize("record", [b"", b"\xff,,\n", b'"unclosed\n'])


@DAMAGED
def test_a_damaged_record_is_written_anew(tmp_path: Path, record: bytes) -> None:
    cubin = tmp_path / "old.cubin"
    cubin.write_bytes(build_cubin(CubinSpec(arch=80, kernels={"k": b"\1" * 64})).data)
    made = make_wheel(tmp_path, "gpu-code", "1.0", {"gpu/old.cubin": cubin})
    wheel = with_record_of(made, tmp_path / "dist", record)
    result = slim(wheel, "--arch", "sm_90", "--target", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert_record_fits(tmp_path / "out" / wheel.name)
