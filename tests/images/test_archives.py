"""Libraries in archives are read as those in a folder; damaged and hostile archives are refused."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import os
import random
import re
import shutil
import struct
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zstandard
from click.testing import CliRunner

from pytest_negativa.cli.main import main
from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.gpucode.mapping import MapRequest
from pytest_negativa.gpucode.source import open_source
from pytest_negativa.images import archives
from pytest_negativa.images.report import report_image
from pytest_negativa.images.tree import FileTree, read_tree
from pytest_negativa.models.archive_member import Member
from pytest_negativa.models.image import ImagePackage, Manager
from pytest_negativa.models.library import LibraryMap, Scope
from tests.support.commands import inspect
from tests.support.libraries import BIN, MULTIARCH, PLAIN
from tests.support.mounts import free_pages, in_namespace, small_disk

FRAMES = BIN / "libframes.so"
FILES = {"ours/lib/libm.so": MULTIARCH, "ours/libframes.so": FRAMES, "ours/libplain.so": PLAIN}
REQUEST = MapRequest(Scope(), with_map=True)


def write_tar(path: Path, mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, file in FILES.items():
            archive.add(file, f"./{name}")
        archive.addfile(tarfile.TarInfo("ours/empty"))
    return path


def write_zip(path: Path, method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, file in FILES.items():
            archive.write(file, name)
        archive.writestr("ours/empty", b"")
    return path


def write_zstd(path: Path) -> Path:
    data = write_tar(path.with_suffix(".tmp")).read_bytes()
    path.write_bytes(zstandard.ZstdCompressor().compress(data))
    return path


def write_pzstd(path: Path) -> Path:
    """As pzstd does: a skippable frame with the size before each frame."""
    data = write_tar(path.with_suffix(".tmp")).read_bytes()
    with path.open("wb") as file:
        for start in range(0, len(data), 50_000):
            frame = zstandard.ZstdCompressor().compress(data[start : start + 50_000])
            file.write(struct.pack("<III", 0x184D2A50, 4, len(frame)) + frame)
    return path


def write_conda(path: Path) -> Path:
    inner = write_zstd(path.with_suffix(".tar.zst"))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("metadata.json", '{"conda_pkg_format_version": 2}')
        archive.write(inner, "pkg-ours-1.0-0.tar.zst")
    return path


def write_deb(path: Path, compress: Callable[[bytes], bytes], suffix: str) -> Path:
    control = io.BytesIO()
    with tarfile.open(fileobj=control, mode="w"):
        pass
    data = write_tar(path.with_suffix(".tmp")).read_bytes()
    with path.open("wb") as file:
        file.write(b"!<arch>\n")
        for name, content in (
            ("debian-binary", b"2.0\n"),
            (f"control.tar{suffix}", compress(control.getvalue())),
            (f"data.tar{suffix}", compress(data)),
        ):
            file.write(f"{name:16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode())
            file.write(content + b"\n" * (len(content) % 2))
    return path


WRITERS: dict[str, Callable[[Path], Path]] = {
    "stored.zip": lambda path: write_zip(path, zipfile.ZIP_STORED),
    "ours-1.0-py3-none-any.whl": write_zip,
    "ours.tar": write_tar,
    "ours.tar.gz": lambda path: write_tar(path, "w:gz"),
    "ours.tar.bz2": lambda path: write_tar(path, "w:bz2"),
    "ours.tar.xz": lambda path: write_tar(path, "w:xz"),
    "ours.tar.zst": write_zstd,
    "ours.tar.pzst": write_pzstd,
    "ours.deb": lambda path: write_deb(path, lzma.compress, ".xz"),
    "plain.deb": lambda path: write_deb(path, bytes, ""),
    "ours.conda": write_conda,
}


@pytest.fixture(params=WRITERS)
def archive(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return WRITERS[request.param](tmp_path / request.param)


def problems_of(contents: FileTree) -> list[str]:
    errors = [m.error for m in contents.libraries.values() if m.error is not None]
    return [str(error) for error in (*contents.problems, *errors)]


def map_of(contents: FileTree, name: str) -> LibraryMap:
    found = contents.libraries[name].library_map
    assert found is not None
    library = msgspec.structs.replace(found.library, path="", mtime_ns=0)
    return msgspec.structs.replace(found, library=library)


def map_of_file(path: Path) -> LibraryMap:
    found = read_library(path, Scope())
    library = msgspec.structs.replace(found.library, path="", mtime_ns=0)
    return msgspec.structs.replace(found, library=library)


@pytest.mark.parametrize("name", ["ours-1.0-0.conda", "ours-1.0-0.tar.bz2"])
def test_a_conda_package_tells_name_and_version(tmp_path: Path, name: str) -> None:
    (tmp_path / "package/info").mkdir(parents=True)
    index = '{"name": "ours", "version": "1.0"}'
    (tmp_path / "package/info/index.json").write_text(index)
    shutil.copyfile(MULTIARCH, tmp_path / "package/libm.so")
    path = tmp_path / name
    if name.endswith(".bz2"):
        with tarfile.open(path, "w:bz2") as archive:
            archive.add(tmp_path / "package", ".")
    else:
        with zipfile.ZipFile(path, "w") as conda:
            for part, member in (("info", "info"), ("pkg", "libm.so")):
                data = io.BytesIO()
                with tarfile.open(fileobj=data, mode="w") as inner:
                    inner.add(tmp_path / "package" / member, member)
                packed = zstandard.ZstdCompressor().compress(data.getvalue())
                conda.writestr(f"{part}-ours-1.0-0.tar.zst", packed)
    assert read_tree(path, REQUEST).distribution == ("ours", "1.0")
    [row] = report_image(path).packages
    assert row.package == ImagePackage(name="ours", version="1.0", manager=Manager.CONDA)
    # In another archive the file may be anything.
    other = path.rename(tmp_path / "other.zip")
    assert read_tree(other, REQUEST).distribution is None


class TestLibraries:
    def test_they_are_those_of_the_files(self, archive: Path) -> None:
        contents = read_tree(archive, REQUEST)
        assert problems_of(contents) == []
        assert {name: map_of(contents, name) for name in contents.libraries} == {
            name: map_of_file(path) for name, path in FILES.items()
        }

    @pytest.mark.parametrize(
        "options", ["--format=gnu", "--format=pax --gzip", "--format=pax --sparse-version=0.1"]
    )
    def test_a_file_with_holes(self, options: str, tmp_path: Path) -> None:
        library, path = tmp_path / "root/libm.so", tmp_path / "ours.tar"
        library.parent.mkdir()
        shutil.copyfile(MULTIARCH, library)
        os.truncate(library, 1 << 20)
        with library.open("ab") as file:
            file.write(b"end")
        words: list[str | Path] = ["tar", "--sparse", *options.split(), "-cf", path]
        words += ["-C", library.parent, "."]
        subprocess.run(words, check=True)
        with tarfile.open(path) as archive:
            assert archive.getmember("./libm.so").issparse()
        contents = read_tree(path, REQUEST)
        assert problems_of(contents) == []
        assert map_of(contents, "libm.so") == map_of_file(library)

    def test_what_people_see_is_what_a_folder_shows(self, archive: Path, tmp_path: Path) -> None:
        folder = tmp_path / "folder"
        for name, path in FILES.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / name)
        shown = inspect(archive)
        assert (shown.exit_code, shown.stderr) == (0, "")
        wanted = inspect("--no-cache", folder).stdout
        wanted = wanted.replace(str(folder), str(archive))
        assert sorted(shown.stdout.split("\n\n")) == sorted(wanted.split("\n\n"))

    @pytest.mark.parametrize("writer", [write_tar, write_zip])
    def test_a_later_file_of_a_name_counts(
        self, writer: Callable[..., Path], tmp_path: Path
    ) -> None:
        path = writer(tmp_path / "twice")
        if writer is write_tar:
            with tarfile.open(path, "a") as tar:
                tar.add(FRAMES, "ours/lib/libm.so")
        else:
            with zipfile.ZipFile(path, "a") as wheel, pytest.warns(UserWarning, match="Duplicate"):
                wheel.write(FRAMES, "ours/lib/libm.so")
        contents = read_tree(path, REQUEST)
        assert map_of(contents, "ours/lib/libm.so") == map_of_file(FRAMES)

    def test_packages_that_a_wheel_brings_along(self, tmp_path: Path) -> None:
        path = write_zip(tmp_path / "ours-1.0-py3-none-any.whl")
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("ours_too-1.0.dist-info/RECORD", b"")
            archive.writestr("ours/_vendor/theirs-2.0.dist-info/RECORD", b"")
        assert read_tree(path, REQUEST).distribution == ("ours-too", "1.0")

    @pytest.mark.parametrize("platform", ["win_amd64", "win32.win_amd64"])
    def test_a_wheel_for_windows(self, tmp_path: Path, platform: str) -> None:
        """What it has besides libraries is read."""
        wheel = tmp_path / f"ours-1.0-cp312-cp312-{platform}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("ours/lib/cuda.dll", b"MZ" + bytes(100))
            archive.write(BIN / "kernels.ptx", "ours/kernels.ptx")
        result = inspect(wheel)
        assert result.exit_code == 1 and "kernels.ptx" in result.stdout
        assert result.stderr == (
            f"negativa: error: {wheel}: a wheel for Windows, whose libraries (PE files: .dll, "
            ".pyd) are not read\n"
        )

    def test_a_wheel_for_linux_and_windows(self, tmp_path: Path) -> None:
        wheel = tmp_path / "ours-1.0-py3-none-win_amd64.manylinux_2_28_x86_64.whl"
        result = inspect(write_zip(wheel))
        assert result.exit_code == 0 and result.stderr == ""

    def test_the_gates_name_the_wheel(self, tmp_path: Path) -> None:
        wheel = write_zip(tmp_path / "renamed.whl")
        result = inspect("--arch", "sm_90", "--max-dead", "1%", wheel)
        assert result.exit_code == 1
        assert f"{wheel}: " in result.stderr


class TestHostile:
    """Each is an error that names the archive; the other libraries are read."""

    def test_holes_larger_than_the_limit(self, tmp_path: Path) -> None:
        library, path = tmp_path / "root/libm.so", tmp_path / "x.tar"
        library.parent.mkdir()
        shutil.copyfile(MULTIARCH, library)
        os.truncate(library, 8 << 40)
        shutil.copyfile(FRAMES, library.with_name("libframes.so"))
        subprocess.run(
            ["tar", "--sparse", "-cf", path, "-C", library.parent, "libframes.so", "libm.so"],
            check=True,
        )
        contents = read_tree(path, REQUEST)
        [problem] = problems_of(contents)
        assert "or 'libm.so' is too large; crafted or damaged" in problem
        assert set(contents.libraries) == {"libframes.so"}

    def test_a_name_that_leads_out(self, tmp_path: Path) -> None:
        path = write_tar(tmp_path / "x.tar")
        with tarfile.open(path, "a") as archive:
            archive.add(PLAIN, "ours/../../../etc/libplain.so")
        contents = read_tree(path, REQUEST)
        assert contents.libraries.keys() == FILES.keys()
        [problem] = problems_of(contents)
        assert "'ours/../../../etc/libplain.so' leads out of the archive" in problem

    def test_a_name_without_end(self, tmp_path: Path) -> None:
        path = tmp_path / "x.tar"
        with tarfile.open(path, "w") as archive:
            archive.add(PLAIN, "a" * 100_000)
            archive.add(PLAIN, "p.so")
        contents = read_tree(path, REQUEST)
        assert list(contents.libraries) == ["p.so"]
        [problem] = problems_of(contents)
        assert "or is longer than 4,096 characters" in problem and len(problem) < 500

    def test_files_that_overlap(self, tmp_path: Path) -> None:
        path = write_zip(tmp_path / "x.zip", zipfile.ZIP_STORED)
        data = bytearray(path.read_bytes())
        at = data.index(b"PK\1\2") + 20
        data[at : at + 8] = len(data).to_bytes(4, "little") * 2
        path.write_bytes(data)
        [problem] = problems_of(read_tree(path, REQUEST))
        assert problem == f"{path}: files in it overlap; crafted or damaged"

    def test_a_method_that_is_not_read(self, tmp_path: Path) -> None:
        path = write_zip(tmp_path / "x.zip")
        with zipfile.ZipFile(path, "a", zipfile.ZIP_LZMA) as archive:
            archive.write(PLAIN, "lzma.so")
        contents = read_tree(path, REQUEST)
        assert contents.libraries.keys() == FILES.keys()
        [problem] = problems_of(contents)
        assert problem.startswith(f"{path}/lzma.so: is packed by method 14 of ZIP archives")

    def test_an_encrypted_file(self, tmp_path: Path) -> None:
        path = write_zip(tmp_path / "x.zip")
        data = bytearray(path.read_bytes())
        # The flags of the last entry of the central directory.
        data[data.rindex(b"PK\1\2", 0, data.rindex(b"libplain.so")) + 8] |= 1
        path.write_bytes(data)
        [problem] = problems_of(read_tree(path, REQUEST))
        assert problem.startswith(f"{path}/ours/libplain.so: is encrypted")

    @pytest.mark.parametrize(("says", "wanted"), [
        (100, "cannot be unpacked: Bad CRC-32"),
        (10**6, "has not the size that the archive says"),
    ])  # fmt: skip
    def test_a_size_that_lies(self, tmp_path: Path, says: int, wanted: str) -> None:
        path = write_zip(tmp_path / "x.zip")
        size, lie = (n.to_bytes(4, "little") for n in (PLAIN.stat().st_size, says))
        path.write_bytes(path.read_bytes().replace(size, lie))
        problems = problems_of(read_tree(path, REQUEST))
        assert any(re.match(f"{path}/ours/libplain.so: {wanted}", p) for p in problems)

    def test_bytes_that_do_not_match_their_checksum(self, tmp_path: Path) -> None:
        path = tmp_path / "x.zip"
        data = bytearray(write_zip(path).read_bytes())
        at = data.rindex(b"PK\1\2", 0, data.rindex(b"libplain.so")) + 16
        data[at] ^= 1
        path.write_bytes(data)
        [problem] = problems_of(read_tree(path, REQUEST))
        assert problem.startswith(f"{path}/ours/libplain.so: cannot be unpacked: Bad CRC-32")

    def test_a_table_without_end(self, tmp_path: Path) -> None:
        # The header of a long name that claims to have a gigabyte.
        info = tarfile.TarInfo("././@LongLink")
        info.type, info.size = tarfile.GNUTYPE_LONGNAME, 1 << 30
        path = tmp_path / "x.tar"
        path.write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(4096))
        [problem] = problems_of(read_tree(path, REQUEST))
        assert "a table of 1.1 GB in it is over the limit" in problem

    def test_long_names_without_end(self, tmp_path: Path) -> None:
        # tarfile calls itself for each.
        info = tarfile.TarInfo("././@LongLink")
        info.type, info.size = tarfile.GNUTYPE_LONGNAME, 512
        path = tmp_path / "x.tar"
        path.write_bytes((info.tobuf(tarfile.GNU_FORMAT) + b"a" * 512) * 2000)
        [problem] = problems_of(read_tree(path, REQUEST))
        assert problem.startswith(f"{path}: maximum recursion depth exceeded")

    @pytest.mark.parametrize(
        ("kind", "body", "problem"),
        [
            # Python 3.11.7 looks for a character set at each digit.
            (tarfile.XHDTYPE, b"1" * 200_000, "256 digits in a row"),
            (tarfile.XGLTYPE, b"".join(b"9 %04d=v\n" % n for n in range(2000)), "headers for all"),
        ],
    )
    def test_headers_that_take_hours(
        self, tmp_path: Path, kind: bytes, body: bytes, problem: str
    ) -> None:
        info = tarfile.TarInfo("x")
        info.type, info.size = kind, len(body)
        path = tmp_path / "x.tar"
        padded = body + bytes(-len(body) % 512)
        path.write_bytes(info.tobuf() + padded + tarfile.TarInfo("y").tobuf() + bytes(1024))
        [found] = problems_of(read_tree(path, REQUEST))
        assert problem in found

    def test_names_without_end(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(archives, "MAX_NAMES", 30)
        [problem] = problems_of(read_tree(write_tar(tmp_path / "x.tar"), REQUEST))
        assert "names of more than 30 B" in problem

    def test_a_stored_file_that_claims_the_bytes_of_others(self, tmp_path: Path) -> None:
        path = write_zip(tmp_path / "x.zip", zipfile.ZIP_STORED)
        data = bytearray(path.read_bytes())
        at = data.index(b"PK\1\2") + 24
        data[at : at + 4] = (40_000).to_bytes(4, "little")
        path.write_bytes(data)
        [problem] = problems_of(read_tree(path, REQUEST))
        assert "libm.so: at offset 0x0: has" in problem and "the archive says 40,000" in problem

    def test_more_than_the_limit(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(archives, "MAX_UNPACKED", 20 << 10)
        path = write_tar(tmp_path / "x.tar.gz", "w:gz")
        problem = problems_of(read_tree(path, REQUEST))[-1]
        assert problem.startswith(f"{path}: unpacks to more than the limit of 20.5 kB")

    def test_no_tar_archive_in_it(self, tmp_path: Path) -> None:
        path = tmp_path / "x.zst"
        path.write_bytes(zstandard.ZstdCompressor().compress(b"hello" * 1000))
        result = inspect(path)
        assert result.exit_code == 1
        said = f"negativa: error: {path}: holds no tar archive (invalid header); unpack it"
        assert result.stderr.startswith(said)

    @pytest.mark.slow
    def test_an_archive_that_ends_early(self, archive: Path) -> None:
        data = archive.read_bytes()
        for size in sample(len(data), 25):
            archive.write_bytes(data[:size])
            # More zeros follow the two blocks that end a tar archive.
            if not problems_of(read_tree(archive, REQUEST)):
                assert len(data) - size <= tarfile.RECORDSIZE

    def test_names_that_json_cannot_hold(self, tmp_path: Path) -> None:
        path = tmp_path / "x.tar.gz"
        data = io.BytesIO()
        how = {"format": tarfile.GNU_FORMAT, "encoding": "latin-1"}
        with tarfile.open(None, "w", data, **how) as archive:  # type: ignore[call-overload]
            archive.add(PLAIN, "libp.so")
            archive.add(MULTIARCH, "lib\xe9.so")
        path.write_bytes(gzip.compress(data.getvalue()[: PLAIN.stat().st_size + 8192]))
        result = CliRunner().invoke(main, ["inspect", "--packages", "--json", str(path)])
        assert result.exit_code == 1
        report = json.loads(result.stdout)
        assert "/lib\\udce9.so: " in report["unreadable"][0]
        assert report["unreadable"][0].endswith("unexpected end of data; is the archive damaged?")
        assert report["without_code"] == 1

    def test_xz_in_several_streams(self, tmp_path: Path) -> None:
        data = write_tar(tmp_path / "x.tar").read_bytes()
        path = tmp_path / "x.tar.xz"
        half = len(data) // 2
        path.write_bytes(lzma.compress(data[:half]) + lzma.compress(data[half:]))
        contents = read_tree(path, REQUEST)
        assert problems_of(contents) == []
        assert contents.libraries.keys() == FILES.keys()

    @pytest.mark.parametrize("name", ["ours.tar.xz", "ours.deb"])
    def test_xz_that_ends_early(self, name: str, tmp_path: Path) -> None:
        path = WRITERS[name](tmp_path / name)
        os.truncate(path, path.stat().st_size * 9 // 10)
        assert problems_of(read_tree(path, REQUEST))

    def test_a_tar_archive_without_its_end(self, tmp_path: Path) -> None:
        """Nothing else shows that xz stopped at zeros between two streams."""
        path = tmp_path / "x.tar.xz"
        head = tarfile.TarInfo("x").tobuf()
        path.write_bytes(lzma.compress(head) + bytes(8) + lzma.compress(bytes(1024)))
        [problem] = problems_of(read_tree(path, REQUEST))
        assert problem.endswith("no tar header here; is the archive damaged?")

    def test_a_debian_package_without_data(self, tmp_path: Path) -> None:
        path = write_deb(tmp_path / "x.deb", bytes, "")
        data = path.read_bytes()
        path.write_bytes(data[: data.index(b"data.tar")])
        assert problems_of(read_tree(path, REQUEST)) == [
            f"{path}: a Debian package without data.tar; is it damaged?"
        ]

    def test_a_damaged_list_hides_no_library(self, tmp_path: Path) -> None:
        path = write_zip(tmp_path / "x.zip")
        with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a-1.dist-info/RECORD", b"text" * 1000)
            archive.write(PLAIN, "last.so")
        data = bytearray(path.read_bytes())
        data[data.rindex(b"PK\1\2", 0, data.rindex(b"RECORD")) + 16] ^= 1
        path.write_bytes(data)
        contents = read_tree(path, REQUEST, by_package=True)
        assert contents.libraries.keys() == {*FILES, "last.so"}
        [problem] = problems_of(contents)
        assert "RECORD: cannot be unpacked: Bad CRC-32" in problem

    @pytest.mark.slow
    def test_damage_anywhere(self, archive: Path) -> None:
        data = archive.read_bytes()
        for at in sample(len(data), 15):
            archive.write_bytes(data[:at] + os.urandom(24) + data[at + 24 :])
            contents = read_tree(archive, REQUEST)
            assert all(str(archive) in problem for problem in problems_of(contents))


def deflated(folder: Path, data: bytes) -> Member:
    path = folder / "x.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data", data)
    [(_, file)] = archives.iter_archive(path, lambda problem: pytest.fail(str(problem)))
    assert isinstance(file, archives.File) and isinstance(file.place, Member)
    assert file.place.crc is not None
    return file.place


def test_reading_a_deflated_file_in_any_order(tmp_path: Path) -> None:
    data = b"".join(os.urandom(500) * 3 for _ in range(200))
    with open_source(deflated(tmp_path, data)) as opened:
        for begin in [*sample(len(data), 200), len(data) - 1]:
            end = min(begin + begin % 25_000, len(data))
            assert opened.read(begin, end - begin) == data[begin:end]
        assert opened.sha256() == hashlib.sha256(data).hexdigest()
        with pytest.raises(FormatError, match="the file ends at 0x493e0"):
            opened.read(len(data) - 1, 2)


@in_namespace
def test_a_deflated_file_needs_room_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(300_000)
    member = deflated(tmp_path, data)
    with small_disk(tmp_path / "disk", 1 << 20) as disk:
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        before = free_pages(disk)
        with open_source(member) as opened:
            assert opened.read(0, len(data)) == data
            assert free_pages(disk) < before
            assert not list(disk.iterdir())
        assert free_pages(disk) == before
        with pytest.raises(FormatError, match="No space left on device; set TMPDIR to another"):
            open_source(deflated(tmp_path, os.urandom(5 << 20)))
        assert free_pages(disk) == before
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(FormatError, match="temporary files: No such file or directory; set TMPDIR"):
        open_source(member)


def sample(size: int, count: int) -> Iterator[int]:
    chance = random.Random(size)
    return (chance.randrange(16, size) for _ in range(count))


def test_files_that_end_around_full_blocks(tmp_path: Path) -> None:
    # tarfile goes to the last byte before the next header, and a stream can't go back.
    path = tmp_path / "x.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for size in (0, 1, 511, 512, 513, 1024):
            info = tarfile.TarInfo(f"f{size}")
            info.size = size
            archive.addfile(info, io.BytesIO(b"x" * size))
        archive.add(PLAIN, "p.so")
    contents = read_tree(path, REQUEST)
    assert problems_of(contents) == []
    assert list(contents.libraries) == ["p.so"]
