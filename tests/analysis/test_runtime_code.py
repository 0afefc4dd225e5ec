"""Code that a run compiled, found in a cache, or had from a library or a package."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from pytest_negativa.analysis.analyze import analyze
from pytest_negativa.analysis.runtime_code import cache_folders
from pytest_negativa.installed.record import record_digest
from pytest_negativa.models.analysis import Analysis
from pytest_negativa.models.code_files import WatchedFiles
from pytest_negativa.models.trace import ImageForm, TracedLibrary, Usage
from pytest_negativa.tracing.merge import merge_traces
from tests.support.analyses import settings, use
from tests.support.libraries import BIN, MULTIARCH, ROOT
from tests.support.usages import PROCESS, image_use, usage_of

CUBIN = BIN / "kernels.sm_90.cubin"
SHA256 = hashlib.sha256(CUBIN.read_bytes()).hexdigest()
IN_MEMORY = {SHA256: (CUBIN.stat().st_size, ["k"])}


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("TRITON", "TORCHINDUCTOR", "CUPY"):
        monkeypatch.setenv(f"{name}_CACHE_DIR", str(tmp_path / "caches" / name))
    return tmp_path / "caches"


def told(usage: Usage, folder: Path, *watched: WatchedFiles) -> list[tuple[bool, str | None]]:
    return [(r.is_new, r.compiler) for r in found(usage, folder, *watched).runtime]


def found(usage: Usage, folder: Path, *watched: WatchedFiles) -> Analysis:
    """The analysis of a run that began a second after the epoch."""
    process = replace(PROCESS, header=replace(PROCESS.header, start_ns=10**9))
    return analyze(replace(usage, processes=(process,)), settings(folder), watched=watched)


@pytest.mark.parametrize(
    ("name", "prefix", "seconds", "expected"),
    [
        ("TRITON/HASH/k.cubin", b"", 0, (False, "Triton")),
        ("TRITON/HASH/k.cubin", b"", 2, (True, "Triton")),
        ("TORCHINDUCTOR/triton/0/HASH/k.cubin", b"", 0, (False, "PyTorch")),
        # CuPy: SHA-1 in hex, MD5 before; names of kernels may follow.
        ("CUPY/0f_2.cubin", b"f" * 32, 0, (False, "CuPy")),
        ("CUPY/0f.cubin", b"f" * 40 + b"\0names", 2, (True, "CuPy")),
        # Of another content, and of no cache.
        ("TRITON/HASH/k.cubin", b"\x7fELF", 0, (True, None)),
        ("other/k.cubin", b"", 0, (True, None)),
    ],
)
def test_the_age_of_its_file_says_whether_the_run_compiled_it(
    caches: Path, name: str, prefix: bytes, seconds: int, expected: tuple[bool, str | None]
) -> None:
    (caches / name).parent.mkdir(parents=True)
    (caches / name).write_bytes(prefix + CUBIN.read_bytes())
    os.utime(caches / name, (seconds, seconds))
    assert told(usage_of(memory=IN_MEMORY), caches.parent) == [expected]


@pytest.mark.parametrize(
    ("name", "form", "seconds", "expected"),
    [
        ("libours.so", ImageForm.FATBIN, 0, []),
        ("libours.so", ImageForm.FATBIN, 2, [(True, None)]),
        ("package.cubin", ImageForm.CUBIN, 0, []),
        ("caches/TRITON/HASH/k.cubin", ImageForm.CUBIN, 0, [(False, "Triton")]),
        ("package.ptx", ImageForm.PTX, 0, [(True, "CUDA driver")]),
    ],
)
def test_files_that_were_loaded_by_name(
    tmp_path: Path, name: str, form: ImageForm, seconds: int, expected: list[tuple[bool, str]]
) -> None:
    used = use(MULTIARCH)
    library = TracedLibrary(path=str(tmp_path / name), size=9, mtime_ns=seconds * 10**9)
    image = replace(image_use(["k"]), form=form, offset=0)
    usage = usage_of(replace(used, library=library, images=(image,)))
    assert told(usage, tmp_path) == expected


def test_ptx_in_a_library_is_compiled_for_a_device_without_machine_code(tmp_path: Path) -> None:
    shutil.copy2(MULTIARCH, tmp_path)
    used = use(tmp_path / MULTIARCH.name, (1,))
    old = replace(used, library=replace(used.library, mtime_ns=0))
    assert told(usage_of(old), tmp_path) == []
    [row] = found(usage_of(old, devices=["13.0"]), tmp_path).runtime
    assert (row.compiler, row.file) == ("CUDA driver", used.library.path)


def test_images_of_libraries_and_packages_are_not_compiled(tmp_path: Path) -> None:
    usage = usage_of(use(BIN / "libframes.so"), memory=IN_MEMORY)
    assert told(usage, tmp_path) == []
    usage = usage_of(use(MULTIARCH), memory=IN_MEMORY)
    assert told(usage, tmp_path) == [(True, None)]
    files = {"k/k.cubin": (record_digest(SHA256), CUBIN.stat().st_size)}
    package = WatchedFiles(
        distribution="k", version="1", site="/site", digest="", files=files, opened=()
    )
    assert told(usage, tmp_path, package) == []


def test_a_recorded_run_of_triton_and_ptx(caches: Path) -> None:
    """PyTorch's libraries are not here, so cubins that cuBLASLt unpacked are of unknown origin."""
    usage = merge_traces((ROOT / "tests/data/traces/h200-ops").glob("*.jsonl"))
    runtime = found(replace(usage, contexts=usage.contexts), caches.parent).runtime
    driver = [one for one in runtime if one.compiler == "CUDA driver"]
    assert [one.first for one in driver if one.file is None]
    assert all(one.is_new for one in runtime)


def test_default_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "torchinductor_me").mkdir()
    assert {name: str(path.relative_to(tmp_path)) for name, path in cache_folders({})} == {
        "PyTorch": "torchinductor_me",
        "Triton": ".triton/cache",
        "CuPy": ".cupy/kernel_cache",
    }
