"""A conda package becomes a smaller one of the same name, which installers take."""

from __future__ import annotations

import asyncio
import bz2
import ctypes
import hashlib
import io
import json
import subprocess
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import zstandard
from click.testing import CliRunner, Result

from pytest_negativa.cli.main import main
from pytest_negativa.gpucode.slimmed import is_slimmed
from pytest_negativa.gpucode.source import digest_of
from pytest_negativa.storage.lockfile import save_lock
from tests.support.builders import CubinSpec, build_cubin
from tests.support.compacting import build, needs_compiler
from tests.support.libraries import MULTIARCH, PLAIN, make_large
from tests.support.sites import lock_of, make_wheel, pip_install

PLACEHOLDER = "/placehold" + "_placehold" * 20
SITE = "lib/python3.12/site-packages"
LIBRARY, LINK, TWIN = "lib/libone.so.1", "lib/libone.so", "lib/twin/libone.so.1"
CUBIN, NOTICE = "share/ours/old.cubin", "info/NEGATIVA-NOTICE.txt"
SUFFIXES = pytest.mark.parametrize("suffix", [".conda", ".tar.bz2"])


def tar_of(files: Mapping[str, Path | bytes | tarfile.TarInfo]) -> bytes:
    """A tar archive; ``TarInfo`` is a link or the like."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, file in files.items():
            if isinstance(file, tarfile.TarInfo):
                tar.addfile(file)
                continue
            content = file if isinstance(file, bytes) else file.read_bytes()
            info = tarfile.TarInfo(name)
            # A time and a size with headers of their own.
            info.size, info.mode, info.mtime = len(content), 0o750, 1_700_000_000.5
            info.pax_headers = {"size": str(len(content))}
            tar.addfile(info, io.BytesIO(content))
    return data.getvalue()


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def pack(path: Path, files: Mapping[str, Any]) -> Path:
    """A conda package of these files, some of which are its ``info``."""
    name = path.name.removesuffix(".conda").removesuffix(".tar.bz2")
    if path.suffix == ".bz2":
        path.write_bytes(bz2.compress(tar_of(files)))
        return path
    info = {name: file for name, file in files.items() if name.startswith("info/")}
    rest = {name: file for name, file in files.items() if name not in info}
    compress = zstandard.ZstdCompressor().compress
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("metadata.json", '{"conda_pkg_format_version": 2}')
        archive.writestr(f"pkg-{name}.tar.zst", compress(tar_of(rest)))
        archive.writestr(f"info-{name}.tar.zst", compress(tar_of(info)))
    return path


def entry(name: str, content: bytes, kind: str = "hardlink") -> dict[str, Any]:
    """A file in ``info/paths.json`` as conda-build writes it."""
    found: dict[str, Any] = {
        "_path": name,
        "path_type": kind,
        "sha256": hashlib.sha256(content).hexdigest(),
        "size_in_bytes": len(content) if kind == "hardlink" else 11,
    }
    if PLACEHOLDER.encode() in content and kind == "hardlink":
        found |= {"file_mode": "binary", "prefix_placeholder": PLACEHOLDER}
    return found


def make_conda(path: Path, files: Mapping[str, Path | bytes], **links: str) -> Path:
    """A conda package; ``links`` by name in ``lib``."""
    contents = {
        name: file if isinstance(file, bytes) else file.read_bytes() for name, file in files.items()
    }
    paths = [entry(name, content) for name, content in contents.items()]
    targets = {f"lib/{name}.so": f"lib/{target}" for name, target in links.items()}
    paths += [entry(name, contents[to], "softlink") for name, to in targets.items()]
    index = {
        "arch": "x86_64", "build": "0", "build_number": 0, "depends": [], "name": "ours",
        "platform": "linux", "subdir": "linux-64", "version": "1.0",
    }  # fmt: skip
    info = {
        "info/index.json": json.dumps(index).encode(),
        "info/files": "".join(f"{one['_path']}\n" for one in paths).encode(),
        "info/paths.json": json.dumps({"paths": paths, "paths_version": 1}).encode(),
    }
    made = {name: link(name, Path(to).name) for name, to in targets.items()}
    return pack(path, {**info, **contents, **made})


def unpack(package: Path, folder: Path) -> Path:
    """As conda does it."""
    api = pytest.importorskip("conda_package_handling.api")
    api.extract(str(package), str(folder))
    return folder


def slim(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["slim", *map(str, arguments)], catch_exceptions=False)


def slimmed(package: Path, *more: str) -> Path:
    target = package.parent / "smaller"
    result = slim(package, "--arch=sm_80", "--force-arch", "--target", target, *more)
    assert result.exit_code == 0, result.output
    assert [path.name for path in target.iterdir()] == [package.name]
    assert f"{target / package.name}: " in result.stderr and "check the licences" in result.stderr
    return target / package.name


def listed(folder: Path) -> dict[str, dict[str, Any]]:
    document = json.loads((folder / "info/paths.json").read_text())
    assert document["paths_version"] == 1
    return {one["_path"]: one for one in document["paths"]}


def assert_lists_fit(folder: Path) -> None:
    entries = listed(folder)
    assert (folder / "info/files").read_text().split() == list(entries)
    for name, one in entries.items():
        path = folder / name
        assert one["sha256"] == digest_of(path), name
        assert one["size_in_bytes"] == (11 if path.is_symlink() else path.stat().st_size), name


@pytest.fixture
def package(tmp_path: Path) -> Callable[..., Path]:
    def make(suffix: str = ".conda") -> Path:
        library = make_large(MULTIARCH, tmp_path / "one.so")
        (tmp_path / "wheel").mkdir()
        wheel = make_wheel(tmp_path / "wheel", "gpu-code", "1.0", {"gpu/two.so": library})
        site = tmp_path / "site"
        pip_install(site, wheel)
        below = {
            f"{SITE}/{path.relative_to(site)}": path for path in site.rglob("*") if path.is_file()
        }
        cubin = build_cubin(CubinSpec(arch=75, kernels={"k": b"\1" * 64})).data
        files: dict[str, Path | bytes] = {
            LIBRARY: library,
            "lib/plain.so": PLAIN,
            CUBIN: cubin,
            **below,
        }
        return make_conda(tmp_path / f"ours-1.0-0{suffix}", files, libone="libone.so.1")

    return make


@SUFFIXES
def test_a_smaller_package(package: Callable[..., Path], tmp_path: Path, suffix: str) -> None:
    original = package(suffix)
    content = original.read_bytes()
    made = slimmed(original)
    assert original.read_bytes() == content and made.stat().st_size < len(content)
    assert made.stat().st_mode == original.stat().st_mode
    before, after = unpack(original, tmp_path / "before"), unpack(made, tmp_path / "after")
    assert_lists_fit(after)
    names = [
        {str(p.relative_to(f)) for p in f.rglob("*") if not p.is_dir()} for f in (before, after)
    ]
    assert names[0] - names[1] == {CUBIN} and names[1] - names[0] == {NOTICE}
    assert listed(before).keys() - listed(after).keys() == {CUBIN}
    record = f"{SITE}/gpu_code-1.0.dist-info/RECORD"
    two = f"{SITE}/gpu/two.so"
    changed = {name for name, one in listed(after).items() if listed(before)[name] != one}
    assert changed == {LIBRARY, LINK, two, record}
    assert is_slimmed(after / LIBRARY) and is_slimmed(after / two)
    assert (after / LINK).readlink() == Path("libone.so.1")
    for name in names[0] & names[1]:
        was, now = (before / name).lstat(), (after / name).lstat()
        assert was.st_mode == now.st_mode
        if (before / name).is_file() and not (before / name).is_symlink():
            assert was.st_mtime_ns == now.st_mtime_ns == 1_700_000_000_500_000_000
            same = (before / name).read_bytes() == (after / name).read_bytes()
            assert same is not (name in changed or name in ("info/files", "info/paths.json"))
    notice = (after / NOTICE).read_text()
    assert LIBRARY in notice and two in notice and "plain.so" not in notice


def install(package: Path, folder: Path) -> Path:
    """The environment of one package, made by rattler; it checks sizes and digests."""
    rattler = pytest.importorskip("rattler")
    index = unpack(package, folder / "unpacked") / "info/index.json"
    record = rattler.RepoDataRecord(
        rattler.PackageRecord.from_index_json(index),
        package.name,
        package.as_uri(),
        package.parent.as_uri(),
    )
    prefix = folder / "prefix"
    installing = rattler.install(
        [record],
        prefix,
        cache_dir=folder / "cache",
        platform=rattler.Subdir("linux-64"),
        show_progress=False,
    )
    asyncio.run(installing)
    return prefix


HOLDER = f"""
    .section .rodata.prefix, "a", @progbits
    .asciz "{PLACEHOLDER}/share"
    .section .debug_fake, "", @progbits
    .asciz "{PLACEHOLDER}/src"
"""


@needs_compiler
@pytest.mark.slow
@SUFFIXES
def test_an_installer_finds_the_prefix(tmp_path: Path, suffix: str) -> None:
    """Placeholders in strings that stay are replaced; those in debug information go with it."""
    run_path = f"-Wl,-rpath,{PLACEHOLDER}/lib"
    library = build(tmp_path / "built", run_path, name="libone.so.1", extra=HOLDER)
    assert library.read_bytes().count(PLACEHOLDER.encode()) == 3
    original = make_conda(
        tmp_path / f"ours-1.0-0{suffix}", {LIBRARY: library}, libone="libone.so.1"
    )
    made = slimmed(original)
    before, after = install(original, tmp_path / "a"), install(made, tmp_path / "b")
    result = after / LIBRARY
    assert is_slimmed(result) and result.stat().st_size < library.stat().st_size
    assert PLACEHOLDER.encode() not in result.read_bytes()
    for prefix, places in ((before, 3), (after, 2)):
        data = (prefix / LIBRARY).read_bytes()
        assert data.count(f"{prefix}/".encode()) == places
        assert f"{prefix}/share\0".encode() in data
    [meta] = (after / "conda-meta").glob("ours-*.json")
    entries = json.loads(meta.read_text())["paths_data"]["paths"]
    [one] = [one for one in entries if one["_path"] == LIBRARY]
    assert (
        one["sha256"]
        == hashlib.sha256((tmp_path / "b/unpacked" / LIBRARY).read_bytes()).hexdigest()
    )
    assert one["sha256_in_prefix"] == hashlib.sha256(result.read_bytes()).hexdigest()
    loaded = subprocess.run(["readelf", "-d", result], capture_output=True, text=True, check=True)
    assert f"[{after}/lib]" in loaded.stdout
    assert ctypes.CDLL(str(result)).count() == 41


@SUFFIXES
def test_hard_links_stay_links(tmp_path: Path, suffix: str) -> None:
    library = make_large(MULTIARCH, tmp_path / "one.so").read_bytes()
    paths = [entry(name, library) for name in (LIBRARY, TWIN)]
    cubin = build_cubin(CubinSpec(arch=75, kernels={"k": b"\1" * 64})).data
    paths += [entry(name, cubin) for name in (CUBIN, "share/ours/twin.cubin")]
    files = {
        "info/paths.json": json.dumps({"paths": paths, "paths_version": 1}).encode(),
        "info/files": "".join(f"{one['_path']}\n" for one in paths).encode(),
        LIBRARY: library,
        TWIN: link(TWIN, LIBRARY, tarfile.LNKTYPE),
        CUBIN: cubin,
        "share/ours/twin.cubin": link("share/ours/twin.cubin", CUBIN, tarfile.LNKTYPE),
    }
    made = slimmed(pack(tmp_path / f"ours-1.0-0{suffix}", files))
    after = unpack(made, tmp_path / "after")
    assert_lists_fit(after)
    assert (after / LIBRARY).stat().st_ino == (after / TWIN).stat().st_ino
    assert listed(after).keys() == {LIBRARY, TWIN}


def test_a_package_has_one_notice(tmp_path: Path) -> None:
    library = make_large(MULTIARCH, tmp_path / "one.so")
    made = slimmed(make_conda(tmp_path / "ours-1.0-0.tar.bz2", {LIBRARY: library, NOTICE: b"old"}))
    with tarfile.open(made) as archive:
        assert archive.getnames().count(NOTICE) == 1
    assert LIBRARY in (unpack(made, tmp_path / "after") / NOTICE).read_text()


@SUFFIXES
def test_a_package_in_which_nothing_is_slimmed(tmp_path: Path, suffix: str) -> None:
    package = make_conda(tmp_path / f"ours-1.0-0{suffix}", {"lib/plain.so": PLAIN})
    assert slimmed(package).read_bytes() == package.read_bytes()


def sparse() -> tarfile.TarInfo:
    """A file that GNU tar stored without its holes; all of it is one."""
    info = tarfile.TarInfo("lib/data.bin")
    info.type = tarfile.GNUTYPE_SPARSE
    return info


PATHS = {"info/paths.json": b'{"paths": []}'}
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "above": ({"../evil.so": b"evil"}, "'../evil.so' leads out of the archive"),
    "no list": ({"info/index.json": b"{}"}, "no conda package, or damaged: info/paths.json"),
    "no entries": ({"info/paths.json": b'{"paths": 1}'}, "no conda package, or damaged"),
    "not JSON": ({"info/paths.json": b"{"}, "no conda package, or damaged"),
    "another's file": ({"lib/x": link("lib/x", "../../secret", tarfile.LNKTYPE)}, "be filled"),
    "a file and a folder": ({"lib": b""}, "be filled: Is a directory"),
    "sparse": ({"lib/data.bin": sparse()}, "lib/data.bin: is stored as a sparse file"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_package(tmp_path: Path, case: str) -> None:
    files, message = HOSTILE[case]
    (tmp_path / "secret").write_text("secret")
    library = make_large(MULTIARCH, tmp_path / "one.so")
    common = {LIBRARY: library, **(PATHS if "no" not in case else {})}
    package = pack(tmp_path / "ours-1.0-0.conda", {**common, **files})
    result = slim(package, "--arch=sm_80", "--force-arch", "--target", tmp_path / "out")
    assert result.exit_code == 1 and message in result.stderr, result.output
    assert list((tmp_path / "out").iterdir()) == []
    assert (tmp_path / "secret").stat().st_nlink == 1


def test_nothing_is_written_by_way_of_a_link(tmp_path: Path) -> None:
    """Nor slimmed there: links are packed alone."""
    outside = make_large(MULTIARCH, tmp_path / "one.so")
    content = outside.read_bytes()
    files = {
        "lib": link("lib", str(tmp_path)),
        "lib/one.so": content,
        "share/two.so": link("share/two.so", str(outside)),
        **PATHS,
    }
    package = pack(tmp_path / "ours-1.0-0.conda", files)
    slim(package, "--arch=sm_80", "--force-arch", "--target", tmp_path / "out")
    assert outside.read_bytes() == content


@SUFFIXES
def test_damage(package: Callable[..., Path], tmp_path: Path, suffix: str) -> None:
    damaged = package(suffix)
    data = bytearray(damaged.read_bytes())
    if suffix == ".conda":
        data[len(data) // 3] ^= 0xFF
    else:
        del data[len(data) // 3 :]
    damaged.write_bytes(data)
    result = slim(damaged, "--arch=sm_80", "--force-arch", "--target", tmp_path / "out")
    assert result.exit_code == 1 and "damaged?" in result.stderr, result.output
    assert list((tmp_path / "out").iterdir()) == []


def test_what_is_refused(package: Callable[..., Path], tmp_path: Path) -> None:
    made = package()
    result = slim(made, "--arch=sm_80", "--force-arch")
    assert result.exit_code == 2 and "a package needs --target DIR" in result.stderr
    result = slim(tmp_path, "--arch=sm_80", "--force-arch", "--no-way-back", "--yes")
    assert result.exit_code == 0, result.output


def test_a_lock_keeps_what_it_lists(package: Callable[..., Path], tmp_path: Path) -> None:
    library = make_large(MULTIARCH, tmp_path / "again.so")
    save_lock(lock_of(library, is_kept=lambda number: False), tmp_path / "negativa.lock")
    made = package()
    target = tmp_path / "out"
    result = slim(made, "--lock", tmp_path / "negativa.lock", "--require", "--target", target)
    assert result.exit_code == 0, result.output
    after = unpack(target / made.name, tmp_path / "after")
    assert is_slimmed(after / LIBRARY) and (after / CUBIN).is_file()
    assert_lists_fit(after)
