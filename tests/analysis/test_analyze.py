"""Usage to plans with settings and hooks, on libraries compiled by nvcc."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace

from pytest_negativa.analysis.analyze import analyze
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.models.analysis import Analysis
from pytest_negativa.models.code_files import WatchedFiles
from pytest_negativa.models.library import Element, LibraryMap, Scope
from pytest_negativa.models.plan import Decision
from pytest_negativa.models.trace import UsageProcess, UsageWarning
from tests.support.analyses import settings, use, used
from tests.support.libraries import BIN, MULTIARCH, PLAIN, QUICKSTART_LIBRARY
from tests.support.traces import header


def decisions(analysis: Analysis, name: str = "libmultiarch.so") -> tuple[Decision, ...]:
    [found] = [
        a.plan.decisions for a in analysis.libraries if Path(a.plan.library.path).name == name
    ]
    return found


def reasons(analysis: Analysis, name: str = "libmultiarch.so") -> Counter[str]:
    return Counter(d.reason for d in decisions(analysis, name))


def multiarch(folder: Path, text: str = "") -> Analysis:
    """Of the three regions, which have six cubins and a PTX each, the second is used."""
    return analyze(used(MULTIARCH, regions=(1,)), settings(folder, text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {"loaded": 1, "no-used-kernel": 2, "wrong-arch": 18}),
        ("keep: {archs: [sm_80]}", {"arch-policy": 1, "wrong-arch": 17}),
        # 8.6 loads the cubin for 8.6, and 7.5 that for 7.5.
        ("keep: {archs: [sm_86, sm_75]}", {"arch-policy": 2, "wrong-arch": 16}),
        ("keep: {archs: [sm_90]}", {"loaded": 1, "wrong-arch": 18}),
        ("keep: {ptx: newest}", {"ptx-policy": 1, "wrong-arch": 17}),
        ("keep: {ptx: all}", {"ptx-policy": 1, "wrong-arch": 17}),
        ("keep: {libraries: [libmulti*]}", {"library-policy": 21}),
        ("keep: {libraries: ['*/bin/*']}", {"library-policy": 21}),
        ("keep: {libraries: [libother*]}", {"loaded": 1, "no-used-kernel": 2}),
        ("keep: {kernels: ['*']}", {"loaded": 1, "kernel-policy": 2, "wrong-arch": 18}),
        ("keep: {kernels: ['*'], archs: [sm_80]}", {"kernel-policy": 4, "arch-policy": 1}),
    ],
)
def test_keep(tmp_path: Path, text: str, expected: dict[str, int]) -> None:
    found = reasons(multiarch(tmp_path, text))
    assert {reason: found[reason] for reason in expected} == expected
    assert found.total() == 21


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ["libmultiarch.so", "libnames.so"]),
        ("libraries: {include: [libnames.so]}", ["libnames.so"]),
        ("libraries: {exclude: ['lib*arch.so']}", ["libnames.so"]),
        ("libraries: {include: ['lib*'], exclude: ['fixtures/bin/libn*']}", ["libmultiarch.so"]),
        ("libraries: {exclude: ['*']}", []),
    ],
)
def test_selected_libraries(tmp_path: Path, text: str, names: list[str]) -> None:
    usage = used(MULTIARCH, BIN / "libnames.so", PLAIN)
    found = analyze(usage, settings(tmp_path, text))
    assert [Path(a.plan.library.path).name for a in found.libraries] == names
    left_out = "left out by libraries.exclude: libmultiarch.so, libnames.so"
    none_left = (f"nothing is left to look at; {left_out}",)
    assert found.warnings == found.unchecked == (() if names else none_left)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library that a distribution has installed."""
    site = tmp_path / "site"
    (site / "our_package").mkdir(parents=True)
    library = shutil.copy(MULTIARCH, site / "our_package")
    info = site / "Our.Package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: Our.Package\nVersion: 1.0\n")
    (info / "RECORD").write_text(
        "our_package/libmultiarch.so,,\nOur.Package-1.0.dist-info/RECORD,,\n"
    )
    monkeypatch.syspath_prepend(site)
    return Path(library)


@pytest.mark.parametrize("glob", ["dist:our-package", "dist:OUR_*", "dist:*package"])
def test_distributions(tmp_path: Path, installed: Path, glob: str) -> None:
    usage = used(installed, BIN / "libnames.so")
    kept = analyze(usage, settings(tmp_path, f"keep: {{libraries: ['{glob}']}}"))
    assert set(reasons(kept)) == {"library-policy"}
    assert "library-policy" not in reasons(kept, "libnames.so")
    alone = analyze(usage, settings(tmp_path, f"libraries: {{include: ['{glob}']}}"))
    assert [a.plan.library.path for a in alone.libraries] == [str(installed)]
    assert kept.warnings == alone.warnings == ()


@pytest.mark.parametrize("glob", ["dist:some-kernels", "*.cubin", "kernels/*"])
def test_globs_match_files_of_gpu_code(tmp_path: Path, glob: str) -> None:
    watched = WatchedFiles(
        distribution="some_kernels",
        version="1.0",
        site="/site",
        digest="",
        files={"kernels/a.cubin": ("sha256=", 1)},
        opened=(),
    )
    options = settings(tmp_path, f"keep: {{libraries: ['{glob}']}}")
    assert analyze(used(MULTIARCH), options, watched=[watched]).warnings == ()
    assert len(analyze(used(MULTIARCH), options).warnings) == 1
    options = settings(tmp_path, f"coverage: {{libraries: ['{glob}']}}")
    assert len(analyze(used(MULTIARCH), options, watched=[watched]).warnings) == 1


def test_a_distribution_that_is_misspelt(tmp_path: Path, installed: Path) -> None:
    text = "libraries:\n  exclude:\n    - dist:our-pakage\n"
    found = analyze(used(installed), settings(tmp_path, text))
    assert found.warnings == (
        f"{tmp_path}/negativa.yaml:3:5: libraries.exclude: 'dist:our-pakage' matches no library or "
        "file with GPU code of this run; did you mean dist:Our.Package?",
    )
    assert len(found.libraries) == 1


def test_kernel_globs_that_match_nothing(tmp_path: Path) -> None:
    usage = used(BIN / "libnames.so")
    library_map = read_library(BIN / "libnames.so", Scope(devices=("9.0",)))
    names = [k.name for e in library_map.iter_code() for k in library_map.kernels_of(e.content)]
    whole = max(names, key=len)
    text = f"keep:\n  kernels:\n  - '{names[0]}'\n  - '{whole[:-1]}?!'\n"

    found = analyze(usage, settings(tmp_path, text))

    [warning] = found.warnings
    assert warning.startswith(f"{tmp_path}/negativa.yaml:3:3: keep.kernels: '{whole[:-1]}?!'")
    assert warning.endswith("matches no kernel of this run")


def test_a_kernel_glob_is_compared_with_what_people_write(tmp_path: Path) -> None:
    path = QUICKSTART_LIBRARY
    text = "keep: {kernels: ['void matrices::transposed(*)', '*multiply<32>*']}\n"
    found = analyze(used(path), settings(tmp_path, text))
    assert reasons(found, path.name)["kernel-policy"] == 1
    [warning] = found.warnings
    assert "'void matrices::transposed(*)' matches no kernel of this run" in warning


@pytest.mark.parametrize("reason", ["incomplete", "policy", "loaded"])
def test_a_glob_on_code_that_is_kept_anyway(tmp_path: Path, reason: str) -> None:
    """A glob matches, even if it is not what keeps the code."""
    glob = (
        "*" if reason != "loaded" else next(iter(next(iter(use(MULTIARCH, (1,)).images)).kernels))
    )
    libraries = "[libmulti*]" if reason == "policy" else "[]"
    text = f"keep: {{kernels: ['{glob}'], libraries: {libraries}}}"
    lack = UsageWarning(code="gap", text="a gap", process=None)
    usage = used(MULTIARCH, regions=(1,), incomplete=(lack,) if reason == "incomplete" else ())
    assert analyze(usage, settings(tmp_path, text)).warnings == ()


@pytest.mark.parametrize(("process", "kept"), [(None, True), (0, True), (7, False)])
def test_incomplete_processes(tmp_path: Path, process: int | None, kept: bool) -> None:
    """A lack of one process concerns the libraries that it had loaded."""
    lack = UsageWarning(code="gap", text="a gap", process=process)
    found = analyze(used(MULTIARCH, incomplete=(lack,)), settings(tmp_path))
    assert (reasons(found) == {"incomplete": 21}) is kept
    notes = found.libraries[0].plan.notes
    assert notes == (("all of it is kept (incomplete): a gap",) if kept else ())


def test_added_libraries_are_reported_as_unused(tmp_path: Path) -> None:
    added = (str(BIN / "libframes.so"), str(MULTIARCH), "/no/such/lib.so")
    found = analyze(used(MULTIARCH, regions=(1,)), settings(tmp_path), added=added)
    assert reasons(found)["loaded"] == 1, "one that was traced stays as it was"
    assert not any(d.kept for d in decisions(found, "libframes.so"))
    assert found.unreadable == ("/no/such/lib.so: not found",)


def test_vetoes(tmp_path: Path) -> None:
    asked: list[Element] = []

    def veto(library: LibraryMap, element: Element) -> str | None:
        asked.append(element)
        return "ours" if str(element.arch) == "sm_80" else None

    added, vetoes = (str(BIN / "libframes.so"),), (lambda *_: None, veto)
    usage = used(MULTIARCH, regions=(1,))
    found = analyze(usage, settings(tmp_path), added=added, vetoes=vetoes)

    assert reasons(found)["hook"] == 3
    assert {d.detail for d in decisions(found) if d.reason == "hook"} == {"ours"}
    assert reasons(found, "libframes.so") == {"hook": 1, "no-used-kernel": 2}
    assert len(asked) == 20 + 3, "never for what is kept anyhow"


def test_libraries_that_are_damaged(tmp_path: Path) -> None:
    path = tmp_path / "libx.so"
    shutil.copy(MULTIARCH, path)
    usage = used(path, MULTIARCH)
    path.write_bytes(path.read_bytes()[:500])
    found = analyze(usage, settings(tmp_path))
    assert len(found.libraries) == 1
    [problem] = found.unreadable
    assert problem.startswith(str(path))


@pytest.mark.parametrize(
    ("name", "what"),
    [("kernels.sm_90.cubin", "a bare cubin"), ("identifier.fatbin", "a bare fatbin")],
)
def test_files_of_gpu_code_that_the_driver_loaded(name: str, what: str, tmp_path: Path) -> None:
    found = analyze(used(MULTIARCH), settings(tmp_path), added=(str(BIN / name),))
    [problem] = found.unreadable
    assert problem.startswith(f"{BIN / name}: ") and f"is {what}" in problem


def test_progress(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    usage = used(MULTIARCH, PLAIN)
    analyze(usage, settings(tmp_path), on_done=lambda done, total: seen.append((done, total)))
    total = MULTIARCH.stat().st_size + PLAIN.stat().st_size
    assert len(seen) == 3 and seen[0] == (0, total) and seen[-1] == (total, total)


@pytest.mark.parametrize(
    ("root", "file"),
    [
        ("/tmp/pytest-negativa-fixtures", "kernels.cu"),
        ("/tmp/pytest-negativa", "/tmp/pytest-negativa-fixtures/kernels.cu"),
    ],
)
def test_coverage_has_source_lines(tmp_path: Path, root: str, file: str) -> None:
    process = UsageProcess(header=replace(header(), root=root), trace="a", ended=True)
    usage = replace(used(BIN / "liblineinfo.so", regions=(0,)), processes=(process,))
    found = analyze(usage, settings(tmp_path, "coverage: {libraries: ['*']}"))
    [coverage] = [a.coverage for a in found.libraries]
    assert coverage is not None
    assert [(k.name, k.file, k.line) for k in coverage.kernels] == [
        ("scale", file, 2),
        ("shift", file, 3),
    ]
