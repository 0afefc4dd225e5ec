"""Sites with distributions that pip installed, and locks for what is in them."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec.structs import replace

from pytest_negativa.installed.owners import Owners
from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.lock import Lock, seal
from pytest_negativa.models.outcomes import Outcome
from pytest_negativa.models.pages import HostUsage
from pytest_negativa.models.spans import Span
from pytest_negativa.models.trace import Device
from pytest_negativa.models.verdict import (
    LibraryStatus,
    ProvedLibrary,
    TestVerdict,
    Verdict,
)
from pytest_negativa.planning.lock import make_lock
from pytest_negativa.planning.lock import with_pages as add_pages
from tests.support.compacting import plan_of, read
from tests.support.libraries import MULTIARCH

KEPT = {2, 6}
"""Numbers of the elements that stay, in either section; see ``test_compact.py``."""

GPU = Device(
    name="a GPU",
    compute_capability="9.0",
    uuid="GPU-1",
    cuda_version=13000,
    driver_version="580.1",
)


def planned_of(path: Path, is_kept: Callable[[int], bool] = KEPT.__contains__) -> AnalyzedLibrary:
    library_map = read(path)
    return AnalyzedLibrary(library_map, plan_of(library_map, is_kept))


def verdict_of(*planned: AnalyzedLibrary, status: LibraryStatus = LibraryStatus.PROVED) -> Verdict:
    """That of a run in which all went well, or nothing did."""
    proved = status is LibraryStatus.PROVED
    return Verdict(
        run_id="20260101T000000Z-abcdef",
        proved=proved,
        reasons=() if proved else ("a test differs",),
        command=("pytest",),
        exit_status=0,
        fill=1,
        granularity="kernel" if any(p.plan.trimmed for p in planned) else "element",
        gpu_tests=2,
        created_ns=1_767_225_600 * 10**9,
        devices=(GPU,),
        versions={
            "pytest-negativa": "1",
            "python": "3.12.3",
            "platform": "Linux",
            "libc": "glibc",
            "cuda-driver": "580",
        },
        libraries=tuple(_proved(one, status) for one in planned),
        tests=(
            TestVerdict(nodeid="test_a", before=Outcome.PASSED, after=Outcome.PASSED),
            TestVerdict(nodeid="test_b", before=Outcome.SKIPPED, after=Outcome.SKIPPED),
        ),
        rounds=(),
    )


def _proved(one: AnalyzedLibrary, status: LibraryStatus) -> ProvedLibrary:
    plan, library = one.plan, one.plan.library
    return replace(
        ProvedLibrary.unproved(plan),
        copy_sha256="0" * 64,
        copy_size=library.size,
        status=status,
        detail=None if status is LibraryStatus.PROVED else "it was not loaded",
        unused_bytes=plan.unused_bytes,
        unused_elements=sum(not d.kept for d in plan.decisions),
        trimmed_code_bytes=sum(t.unused_size for t in plan.trimmed),
        left_bytes=plan.code_bytes - plan.unused_bytes,
        processes=1,
        spans=tuple(Span(d.start, d.end) for d in plan.decisions if not d.kept and d.size),
        trimmed={t.start: t.unused for t in plan.trimmed},
    )


def lock_of(*paths: Path, is_kept: Callable[[int], bool] = KEPT.__contains__) -> Lock:
    planned = [planned_of(path, is_kept) for path in paths]
    return make_lock("run", planned, verdict_of(*planned), Owners().of)


def make_wheel(
    folder: Path, name: str, version: str, files: Mapping[str, Path], requires: str = ""
) -> Path:
    """A wheel, as the specification has it; ``files`` by their path in it."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    contents = {path: source.read_bytes() for path, source in files.items()}
    contents[f"{info}/METADATA"] = (
        metadata + (f"Requires-Dist: {requires}\n" if requires else "")
    ).encode()
    contents[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    lines = [
        f'"{path}",{digest_field(data)},{len(data)}'
        if "," in path
        else f"{path},{digest_field(data)},{len(data)}"
        for path, data in contents.items()
    ]
    contents[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,", ""]).encode()
    wheel = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, data in contents.items():
            archive.writestr(path, data)
    return wheel


def install(
    site: Path,
    name: str,
    requires: tuple[str, ...] = (),
    files: tuple[str, ...] = (),
    extras: tuple[str, ...] = (),
) -> None:
    """A distribution as pip would leave it: its files, metadata and the record of both."""
    folder = f"{name.replace('-', '_')}-1.0.dist-info"
    for file in files:
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_bytes(MULTIARCH.read_bytes())
    (site / folder).mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0"]
    lines += [f"Provides-Extra: {extra}" for extra in extras]
    lines += [f"Requires-Dist: {requirement}" for requirement in requires]
    (site / folder / "METADATA").write_text("\n".join([*lines, "", ""]))
    recorded = [*files, f"{folder}/METADATA", f"{folder}/RECORD"]
    (site / folder / "RECORD").write_text("".join(f"{file},,\n" for file in recorded))


def digest_field(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    return f"sha256={digest.decode()}"


def pip_install(target: Path, *wheels: Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    command += ["--no-index", "--no-deps", "--no-compile", f"--target={target}"]
    subprocess.run([*command, *map(str, wheels)], check=True, capture_output=True)


def wrong_files(site: Path) -> list[str]:
    """Files that differ from what RECORD says of them, read by importlib.metadata."""
    wrong = []
    for distribution in importlib.metadata.distributions(path=[str(site)]):
        files = distribution.files
        assert files
        for file in files:
            if file.hash is None:
                continue
            assert file.hash.mode == "sha256"
            data = Path(str(file.locate())).read_bytes()
            if f"sha256={file.hash.value}" != digest_field(data) or file.size != len(data):
                wrong.append(str(file))
    return wrong


def snapshot(folder: Path) -> dict[str, tuple[int, ...]]:
    """What changes with any writing, of every file and folder."""
    found: dict[str, tuple[int, ...]] = {}
    for root, folders, files in os.walk(folder):
        for name in (".", *folders, *files):
            path = os.path.normpath(os.path.join(root, name))
            status = os.lstat(path)
            found[path] = (
                status.st_ino,
                status.st_mtime_ns,
                status.st_ctime_ns,
                status.st_size,
                status.st_mode,
            )
    return found


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file, by its path below the folder."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def with_pages(usage: HostUsage, lock: Lock | None = None) -> Lock:
    """A lock, or one without GPU code, with what a run touched of CPU code."""
    alone = make_lock("run", [], None, Owners().of, touched=usage, unproved=True)
    if lock is None:
        return alone
    proof, found = lock.proof, alone.proof
    if not lock.has_pages:
        proof = replace(
            proof,
            processors=found.processors,
            pages_not_proved=found.pages_not_proved,
            notes=found.notes,
            failed=found.failed,
        )
    rows = add_pages(lock.libraries, usage, Owners().of, is_new=not lock.has_pages)
    return seal(replace(lock, proof=proof, libraries=rows))
