"""negativa inspect --packages on file trees made of the compiled fixtures."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from click.testing import CliRunner

from pytest_negativa.arch import ComputeCapability, SmArch
from pytest_negativa.cli.main import main
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.gpucode.mapping import MapRequest
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.images.report import Suite, report_image, suite_of_run, wrong_arch_bytes
from pytest_negativa.images.tree import FileTree, read_tree
from pytest_negativa.models.image import (
    ImageLibrary,
    ImagePackage,
    ImageReport,
    Manager,
    SlimmableBy,
    SuiteUse,
)
from pytest_negativa.models.library import LibraryMap, Scope
from pytest_negativa.models.lock import (
    KeptCode,
    LeftOut,
    Lock,
    LockedLibrary,
    Proof,
    ProvingDevice,
    seal,
)
from pytest_negativa.models.plan import Decision, KeepReason, LibraryPlan
from pytest_negativa.models.sizes import format_bytes
from pytest_negativa.models.trace import LibraryUsage, Usage
from pytest_negativa.reporting.image import render_image_report
from pytest_negativa.rewriting.plan_edits import trim_kernels
from pytest_negativa.storage.lockfile import save_lock
from pytest_negativa.storage.schema import schema_text
from tests.support.compacting import plan_of as small_plan
from tests.support.libraries import BIN, IS_ROOT, MULTIARCH, PLAIN, without_build_id
from tests.support.sites import make_wheel, pip_install
from tests.support.slimmed import compact, plan_for, read, read_slimmed
from tests.support.usages import library_usage, usage_of

SM_90 = ComputeCapability(9, 0)
SITE = "usr/lib/python3/site-packages"
FRAMES = BIN / "libframes.so"
SUFFIX = BIN / "libsuffix.so"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_bytes(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def walk(root: Path) -> FileTree:
    return read_tree(root, MapRequest(Scope(), any_file=True), by_package=True)


def put(source: Path, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copyfile(source, target))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path.resolve() / "image"


def plan_of(library_map: LibraryMap, unused: int) -> LibraryPlan:
    """A plan in which so many elements are unused, the first ones."""
    data = Path(library_map.library.path).read_bytes()
    identity = msgspec.structs.replace(library_map.library, sha256=hashlib.sha256(data).hexdigest())
    spans = [element.payload for element in library_map.iter_code()]
    return LibraryPlan(
        library=identity,
        devices=("9.0",),
        decisions=tuple(
            Decision(s.start, s.end, i >= unused, "loaded" if i >= unused else "wrong-arch")
            for i, s in enumerate(spans)
        ),
        used_kernels=(),
        unused_kernels=(),
    )


def used(library: Path, *, anything: bool = True) -> LibraryUsage:
    library_map = read_library(library, Scope())
    offsets = [r.span.start for r in library_map.iter_regions()][:1] if anything else []
    return library_usage(library_map, {offset: ["kernel"] for offset in offsets})


def run_of(*libraries: LibraryUsage, plans: Sequence[LibraryPlan] = (), **more: Any) -> Suite:
    return suite_of_run("run", usage_of(*libraries, **more), plans)


def by_path(report: ImageReport) -> dict[str, ImageLibrary]:
    return {row.path: row for row in report.libraries}


class TestTree:
    def test_each_file_once_and_none_from_outside(self, root: Path, tmp_path: Path) -> None:
        library = put(MULTIARCH, root / "usr/lib/libm.so")
        outside = put(FRAMES, tmp_path / "outside/libframes.so")
        os.link(library, root / "usr/lib/libm.so.1")
        (root / "usr/lib/link.so").symlink_to("libm.so")
        (root / "usr/lib/absolute.so").symlink_to("/usr/lib/libm.so")
        (root / "usr/lib/escape.so").symlink_to(outside)
        (root / "usr/lib/above.so").symlink_to("../../../outside/libframes.so")
        (root / "lib").symlink_to("usr/lib")
        (root / "out").symlink_to(outside.parent)
        (root / "loop").symlink_to("loop")
        os.mkfifo(root / "pipe.so")
        write(root / "script.so", "#!/bin/sh")

        tree = walk(root)

        assert list(tree.libraries) == ["usr/lib/libm.so"]

    @pytest.mark.skipif(IS_ROOT, reason="root may read anything")
    def test_unreadable_files_are_not_forgotten(self, root: Path) -> None:
        for name in ("lib.so.1", "k.cubin", "notes.txt"):
            put(PLAIN, root / name).chmod(0)
        report = report_image(root)
        assert [line.partition(": ")[0] for line in report.unreadable] == [
            str(root / "k.cubin"),
            str(root / "lib.so.1"),
        ]

    def test_what_no_loader_loads(self, root: Path) -> None:
        put(BIN / "rdc_caller.o", root / "rdc.o")
        put(BIN / "kernels.sm_90.cubin", root / "k.cubin")
        data = bytearray(PLAIN.read_bytes())
        data[4] = 1  # EI_CLASS: 32 bits
        (root / "lib32.so").write_bytes(data)
        put(BIN / "program_pie", root / "program")
        tree = walk(root)
        assert sorted(tree.libraries) == ["k.cubin", "program"]

    @pytest.mark.parametrize(
        ("path", "wanted"),
        [
            ("usr/lib/a", "usr/lib/a"),
            ("/usr/lib/a", "usr/lib/a"),
            ("lib/a", "usr/lib/a"),
            ("/absolute/a", "usr/lib/a"),
            ("usr/../lib/../lib/a", "usr/lib/a"),
            ("../../../etc/passwd", "etc/passwd"),
            ("above/etc/passwd", "etc/passwd"),
            ("missing/b", "missing/b"),
            ("loop/a", "loop/a"),
            ("", ""),
        ],
    )
    def test_links_are_those_of_the_tree(self, root: Path, path: str, wanted: str) -> None:
        (root / "usr/lib").mkdir(parents=True)
        (root / "lib").symlink_to("usr/lib")
        (root / "absolute").symlink_to("/lib")
        (root / "above").symlink_to("../../../../../..")
        (root / "loop").symlink_to("pool")
        (root / "pool").symlink_to("loop")
        assert walk(root).overlay.folder(path).path == wanted


class TestPackages:
    def owner(self, root: Path, path: str) -> ImagePackage | None:
        return by_path(report_image(root))[path].package

    def test_wheels(self, root: Path) -> None:
        put(MULTIARCH, root / SITE / "pack/lib/libm.so")
        put(FRAMES, root / "usr/share/libframes.so")
        write(
            root / SITE / "some_pack-1.2+cu13.dist-info/RECORD",
            'pack/__init__.py,sha256=x,1\n"pack/lib/libm.so",sha256=x,1\n'
            "../../../share/libframes.so,,\n\n",
        )
        package = ImagePackage(name="some-pack", version="1.2+cu13", manager=Manager.WHEEL)
        assert self.owner(root, f"{SITE}/pack/lib/libm.so") == package
        assert self.owner(root, "usr/share/libframes.so") == package

    def test_conda(self, root: Path) -> None:
        put(MULTIARCH, root / "opt/env/lib/libm.so")
        write(
            root / "opt/env/conda-meta/libm-2.0-h1.json",
            json.dumps({"name": "libm", "version": "2.0", "files": ["lib/libm.so", "bin/m"]}),
        )
        for number, text in enumerate(["", "[", "[]", "{}", '{"name": 1, "version": 2}']):
            write(root / f"opt/env/conda-meta/broken-{number}.json", text)
        package = ImagePackage(name="libm", version="2.0", manager=Manager.CONDA)
        assert self.owner(root, "opt/env/lib/libm.so") == package

    def test_dpkg_by_way_of_a_link(self, root: Path) -> None:
        put(MULTIARCH, root / "usr/lib/x86_64-linux-gnu/libm.so.1")
        (root / "lib").symlink_to("/usr/lib")
        write(
            root / "var/lib/dpkg/info/libm1:amd64.list",
            "/.\n/lib\n/lib/x86_64-linux-gnu\n/lib/x86_64-linux-gnu/libm.so.1\n",
        )
        write(
            root / "var/lib/dpkg/status",
            "Package: other\nVersion: 1\n\nPackage: libm1\nArchitecture: amd64\nVersion: 13.0-1\n",
        )
        package = ImagePackage(name="libm1", version="13.0-1", manager=Manager.DPKG)
        assert self.owner(root, "usr/lib/x86_64-linux-gnu/libm.so.1") == package

    def test_a_wheel_in_an_environment_of_conda(self, root: Path) -> None:
        put(MULTIARCH, root / "site/libm.so")
        write(
            root / "conda-meta/libm.json",
            json.dumps({"name": "outer", "version": "1", "files": ["site/libm.so"]}),
        )
        write(root / "site/inner-2.dist-info/RECORD", "libm.so,,\n")
        owner = self.owner(root, "site/libm.so")
        assert owner is not None and owner.name == "inner"

    def test_lists_that_lead_outside_are_not_read(self, root: Path, tmp_path: Path) -> None:
        put(MULTIARCH, root / "libm.so")
        write(tmp_path / "RECORD", "libm.so,,\n")
        info = root / "evil-1.dist-info"
        info.mkdir()
        (info / "RECORD").symlink_to(tmp_path / "RECORD")
        os.mkfifo(root / "pipe")
        piped = root / "pipe-1.dist-info"
        piped.mkdir()
        os.mkfifo(piped / "RECORD")
        assert self.owner(root, "libm.so") is None

    def test_sums(self, root: Path) -> None:
        put(MULTIARCH, root / "a.so")
        put(FRAMES, root / "b.so")
        put(SUFFIX, root / "c.so")
        write(root / "pack-1.dist-info/RECORD", "a.so,,\nb.so,,\n")
        report = report_image(root, devices=[SM_90])
        rows = {row.package and row.package.name: row for row in report.packages}
        assert {name: row.libraries for name, row in rows.items()} == {"pack": 2, None: 1}
        assert rows["pack"].size == MULTIARCH.stat().st_size + FRAMES.stat().st_size
        for figure in ("size", "code_bytes", "slimmable_bytes"):
            total = sum(getattr(row, figure) for row in report.libraries)
            assert sum(getattr(row, figure) for row in report.packages) == total > 0


class TestSuite:
    def test_matched_wherever_it_lies(self, root: Path) -> None:
        put(MULTIARCH, root / "deep/renamed.so")
        put(FRAMES, root / "libframes.so")
        put(SUFFIX, root / "libsuffix.so")
        run = run_of(used(MULTIARCH), used(SUFFIX, anything=False))
        rows = by_path(report_image(root, run))
        assert {path: row.suite for path, row in rows.items()} == {
            "deep/renamed.so": SuiteUse.USED,
            "libframes.so": SuiteUse.NEVER_LOADED,
            "libsuffix.so": SuiteUse.LOADED,
        }

    def test_the_path_proves_nothing(self, root: Path) -> None:
        library = put(MULTIARCH, root / "libm.so")
        traced = used(library)
        put(FRAMES, library)
        assert by_path(report_image(root, run_of(traced)))["libm.so"].suite is (
            SuiteUse.NEVER_LOADED
        )

    def test_a_plan_is_for_its_very_content(self, root: Path) -> None:
        same = put(MULTIARCH, root / "same.so")
        other = put(MULTIARCH, root / "other.so")
        with other.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last[0] ^ 1]))
        library_map = read_library(MULTIARCH, Scope(headers_only=True))
        plan = plan_of(library_map, unused=3)

        report = report_image(root, run_of(used(MULTIARCH), plans=[plan]))

        rows = by_path(report)
        assert rows["same.so"].slimmable_bytes == plan.unused_bytes > 0
        assert rows["same.so"].slimmable_by is SlimmableBy.PLAN
        assert rows["other.so"].slimmable_by is SlimmableBy.ARCH
        assert rows["other.so"].slimmable_bytes == wrong_arch_bytes(library_map, [SM_90])
        assert rows["other.so"].suite is SuiteUse.USED
        assert same.stat().st_size == other.stat().st_size

    def test_without_build_id_content_decides(self, root: Path, tmp_path: Path) -> None:
        nameless = without_build_id(put(MULTIARCH, tmp_path / "nameless.so"))
        put(nameless, root / "copy.so")
        plan = plan_of(read_library(nameless, Scope(headers_only=True)), unused=0)
        row = by_path(report_image(root, run_of(used(nameless), plans=[plan])))["copy.so"]
        assert row.suite is SuiteUse.USED
        # A run that planned nothing knows nothing to recognise it by.
        report = report_image(root, run_of(used(nameless)))
        assert by_path(report)["copy.so"].suite is SuiteUse.UNKNOWN
        assert any("files that the suite may have loaded: " in note for note in report.notes)

    def test_devices_of_the_run_or_others(self, root: Path) -> None:
        put(MULTIARCH, root / "libm.so")
        library_map = read_library(MULTIARCH, Scope(headers_only=True))
        traced = run_of(devices=("8.0", "9.0"))
        report = report_image(root, traced)
        assert report.devices == ("8.0", "9.0")
        both = [ComputeCapability(8, 0), SM_90]
        assert report.libraries[0].slimmable_bytes == wrong_arch_bytes(library_map, both)
        report = report_image(root, traced, [SM_90])
        assert report.devices == ("9.0",)
        assert report.libraries[0].slimmable_bytes == wrong_arch_bytes(library_map, [SM_90])


class TestWrongArch:
    def test_elements(self) -> None:
        library_map = read_library(MULTIARCH, Scope(headers_only=True))
        summary_of = {
            device: wrong_arch_bytes(library_map, [ComputeCapability.parse(device)])
            for device in ("7.5", "9.0")
        }
        code = sum(e.payload.size for e in library_map.iter_code())
        assert 0 < summary_of["9.0"] < code and 0 < summary_of["7.5"] < code
        both = wrong_arch_bytes(library_map, [ComputeCapability(7, 5), SM_90])
        assert both == summary_of["7.5"] + summary_of["9.0"] - code


@dataclass
class Invoked:
    stdout: str
    stderr: str


def invoke(*arguments: str, status: int = 0) -> Invoked:
    result = CliRunner().invoke(main, ["inspect", "--packages", "--no-cache", *arguments])
    assert result.exit_code == status, result.output
    return Invoked(result.stdout, result.stderr)


def write_run(folder: Path, usage: Usage, plans: Sequence[LibraryPlan]) -> None:
    folder.mkdir()
    (folder / "usage.json").write_bytes(msgspec.json.encode(usage))
    (folder / "plan").mkdir()
    for number, plan in enumerate(plans):
        (folder / "plan" / f"{number}.json").write_bytes(msgspec.json.encode(plan))


def test_command(root: Path, tmp_path: Path) -> None:
    put(MULTIARCH, root / "lib/libm.so")
    put(PLAIN, root / "lib/libplain.so")
    put(BIN / "kernels.sm_90.cubin", root / "lib/k.cubin")
    plan = plan_of(read_library(MULTIARCH, Scope(headers_only=True)), unused=2)
    write_run(tmp_path / "20260101T000000Z-run", usage_of(used(MULTIARCH)), [plan])
    arguments = (str(root), "--run", str(tmp_path / "20260101T000000Z-run"))

    document = json.loads(invoke(*arguments, "--json").stdout)

    jsonschema.validate(document, json.loads(schema_text("packages")))
    assert document["run_id"] == "20260101T000000Z-run"
    assert document["without_code"] == 1
    assert document["without_code_bytes"] == PLAIN.stat().st_size
    cubin = (BIN / "kernels.sm_90.cubin").stat().st_size
    library, files = document["libraries"]
    assert (files["path"], files["size"], files["files"]) == ("lib/no package (files)", cubin, 1)
    assert library["slimmable_bytes"] == plan.unused_bytes
    done = invoke(*arguments)
    shown = done.stdout
    assert done.stderr == f"Next: negativa report --run {arguments[-1]}\n"
    assert invoke(str(root)).stderr == "Next: pytest --negativa\n"
    by_arch = f"Next: negativa slim --arch sm_90 --spare spares --dry-run {root}\n"
    assert invoke(str(root), "--arch", "H100").stderr == by_arch
    assert shown.startswith(f"{root}: ")
    assert "\nFiles below lib:\nfile " in shown and "\nlibm.so " in shown
    assert "Never loaded by run 20260101T000000Z-run: 0 files of 0 B." in shown
    code = library["code_bytes"] + cubin
    assert f"{format_bytes(code)} GPU code in 2 files" in shown.splitlines()[0]
    [total] = [line for line in shown.splitlines() if line.startswith("total")]
    assert f"  {format_bytes(code)}  " in total


@pytest.mark.parametrize("packed", [False, True])
def test_files_that_are_gpu_code_by_package(root: Path, tmp_path: Path, packed: bool) -> None:
    """They count in totals; the arch says which are slimmable."""
    site = root / SITE
    files = {f"kernels/{n}.cubin": BIN / f"kernels.{n}.cubin" for n in ("sm_80", "sm_90", "sm_90a")}
    pip_install(site, make_wheel(tmp_path, "some-kernels", "1.0", files))
    # As uv's cache has them.
    for name in files:
        cached = root / "cache" / Path(name).name
        cached.parent.mkdir(exist_ok=True)
        cached.hardlink_to(site / name)
    write(root / "opt/k.ptx", ".version 8.0\n.target sm_100\n")
    place: Path = root
    if packed:
        place = Path(shutil.make_archive(str(tmp_path / "image"), "tar", root))
    sizes = {name: path.stat().st_size for name, path in files.items()}
    package = ImagePackage(name="some-kernels", version="1.0", manager=Manager.WHEEL)

    by_arch = report_image(place, devices=[SM_90])
    kernels, ptx = by_arch.libraries
    assert kernels.package == package and ptx.package is None
    assert (kernels.files, kernels.size) == (3, sum(sizes.values()))
    assert kernels.slimmable_bytes == sizes["kernels/sm_80.cubin"]
    assert ptx.slimmable_bytes == ptx.size
    assert sum(row.code_bytes for row in by_arch.packages) == kernels.size + ptx.size
    text = "\n".join(render_image_report(by_arch, 0))
    assert f"{format_bytes(kernels.size + ptx.size)} GPU code in 4 files" in text
    assert "some-kernels (files)" in text
    assert {row.slimmable_bytes for row in report_image(place).libraries} == {None}


def test_no_arch_tells_that_a_fatbin_is_for_others(root: Path) -> None:
    for name in ("empty", "identifier"):
        put(BIN / f"{name}.fatbin", root / f"{name}.fatbin")
    [row] = report_image(root, devices=[ComputeCapability(5, 0)]).libraries
    assert (row.files, row.slimmable_bytes) == (2, 0)


def lock_of(plan: LibraryPlan, *, proved: bool = True) -> Lock:
    """A lock with the library of a plan, and another one left out."""
    library = plan.library
    assert library.sha256 is not None
    kept = [d for d in plan.decisions if d.kept]
    made = Lock(
        digest="",
        proof=Proof(
            proved=proved,
            run="locked-run",
            granularity="element",
            fill=1,
            tests={"passed": 1},
            devices=(ProvingDevice(name="a GPU", compute_capability="9.0"),),
            versions={},
        ),
        libraries=(
            LockedLibrary(
                path="pack/libm.so",
                build_id=library.build_id,
                sha256=library.sha256,
                size=library.size,
                devices=plan.devices,
                elements=len(plan.decisions),
                kept_elements=len(kept),
                code_bytes=plan.code_bytes,
                unused_bytes=plan.unused_bytes,
                code_sha256="0" * 64,
                kept=tuple(
                    KeptCode(offset=d.start, arch=SmArch.parse("sm_90"), reason=KeepReason.LOADED)
                    for d in kept
                ),
                not_proved=None if proved else "it was not loaded",
            ),
        ),
        left_out=(LeftOut(path="other/libframes.so", reason="changed"),),
    )
    return seal(made)


@pytest.mark.parametrize("proved", [True, False])
def test_lock(root: Path, tmp_path: Path, proved: bool) -> None:
    put(MULTIARCH, root / "elsewhere.so")
    put(FRAMES, root / "libframes.so")
    put(SUFFIX, root / "libsuffix.so")
    library_map = read_library(MULTIARCH, Scope(headers_only=True))
    plan = plan_of(library_map, unused=2)
    save_lock(lock_of(plan, proved=proved), tmp_path / "negativa.lock")

    words = (str(root), "--lock", str(tmp_path / "negativa.lock"))
    done = invoke(*words, "--json")

    assert invoke(*words).stderr == f"Next: negativa slim --lock {words[-1]} --spare spares\n"
    document = json.loads(done.stdout)
    assert document["run_id"] == "locked-run" and document["devices"] == ["9.0"]
    rows = {row["path"]: row for row in document["libraries"]}
    assert {path: row["suite"] for path, row in rows.items()} == {
        "elsewhere.so": "used",
        # Of what was left out only the name is known.
        "libframes.so": "unknown",
        "libsuffix.so": "never-loaded",
    }
    found = (rows["elsewhere.so"]["slimmable_by"], rows["elsewhere.so"]["slimmable_bytes"])
    if proved:
        assert found == ("lock", plan.unused_bytes)
    else:
        assert found == ("arch", wrong_arch_bytes(library_map, [SM_90]))
        assert "nothing in the lock was proved" in document["notes"]


def test_run_and_lock_at_once(root: Path, tmp_path: Path) -> None:
    root.mkdir()
    (tmp_path / "negativa.lock").touch()
    arguments = (str(root), "--run", str(root), "--lock", str(tmp_path / "negativa.lock"))
    assert "--run or --lock, not both" in invoke(*arguments, status=2).stderr


def test_command_without_gpu_code(root: Path) -> None:
    put(PLAIN, root / "libplain.so")
    size = PLAIN.stat().st_size / 1000
    assert invoke(str(root)).stdout == (
        f"{root}: no NVIDIA GPU code; 1 other ELF file of {size:.1f} kB\n"
    )


def test_slimmed_libraries(root: Path) -> None:
    """What is left is told, and nothing of it could go."""
    whole = put(MULTIARCH, root / "whole.so")
    before = read(MULTIARCH)
    plan = small_plan(before, lambda number: number in (3, 4))
    compact(before, plan, root / "small.so")
    compact(before, small_plan(before, lambda number: False), root / "empty.so")
    suite = run_of(used(whole), plans=[plan])
    report = report_image(root, suite, [SM_90])
    rows = by_path(report)
    assert set(rows) == {"whole.so", "small.so"}
    assert rows["small.so"].code_bytes == sum(d.size for d in plan.decisions if d.kept)
    assert (rows["small.so"].slimmable_bytes, rows["small.so"].slimmable_by) == (None, None)
    assert rows["small.so"].suite is SuiteUse.USED
    assert rows["whole.so"].slimmable_bytes is not None
    assert report.without_code == 1
    assert report.without_code_bytes == (root / "empty.so").stat().st_size
    assert report.unreadable == ()
    assert report.slimmed == ("empty.so", "small.so")
    text = "\n".join(render_image_report(report, top=1))
    assert "2 files were slimmed by negativa slim; only the GPU code that is left counts" in text
    assert text.endswith("\n  empty.so\n  and 1 more")


def test_the_options_that_add_columns(root: Path) -> None:
    put(MULTIARCH, root / "lib.so")
    plain = "\n".join(render_image_report(report_image(root), top=0))
    assert "--lock FILE adds the columns by the suite and slimmable; --arch sm_90 adds" in plain
    with_run = "\n".join(render_image_report(report_image(root, run_of()), top=0))
    assert "FILE adds" not in with_run


def test_tables_fit_a_terminal_and_have_no_empty_columns(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    folder = "a/path/as/long/as/that/of/an/environment/lib/python3.13/site-packages/some_package"
    put(MULTIARCH, root / folder / "lib/libm.so")
    shown = invoke(str(root), "--arch=sm_90").stdout
    assert f"\nFiles below {folder}/lib:\nfile " in shown
    tables = [line.split("  ") for line in shown.splitlines() if line.startswith(("file ", "pack"))]
    columns = [[header.strip() for header in line if header] for line in tables]
    # The share has no header.
    assert columns == [
        ["file", "size", "GPU code", "slimmable", "by"],
        ["package", "files", "size", "GPU code", "slimmable"],
    ]
    # A path stays whole.
    short = [line for line in shown.splitlines() if folder not in line and str(root) not in line]
    assert max(map(len, short)) <= 80


def test_of_trimmed_cubins_counts_what_the_file_holds(root: Path) -> None:
    source = BIN / "libcallgraph.so"
    root.mkdir()
    before = read(source)
    plan = plan_for(before, "calls_nothing")
    with ByteSource(source) as opened:
        edits, _ = trim_kernels(opened, before, plan, 1)
    compact(before, plan, root / "lib.so", edits)
    [row] = report_image(root).libraries
    left, removed = read_slimmed(root / "lib.so", Scope(headers_only=True))
    assert row.code_bytes == removed.stored_bytes
    assert 0 < row.code_bytes < sum(e.payload.size for e in left.iter_code())


def test_files_that_cannot_be_read(root: Path) -> None:
    root.mkdir()
    for number in range(12):
        (root / f"broken{number}.so").write_bytes(MULTIARCH.read_bytes()[:2000])
    put(MULTIARCH, root / "libm.so")
    done = invoke(str(root), "--arch=sm_90", status=1)
    assert "1 file of" in done.stdout and "0 other ELF files" in done.stdout
    lines = done.stderr.splitlines()
    assert len(lines) == 11
    assert lines[-1] == "negativa: error: 2 more files could not be read (see --json)"


def test_a_file_that_is_no_archive(tmp_path: Path) -> None:
    for file in (MULTIARCH, tmp_path / "text"):
        (tmp_path / "text").write_text("some text")
        done = invoke(str(file), status=2)
        assert done.stderr.startswith(
            f"negativa: error: {file}: is neither a folder nor an archive that is read; "
        )


def test_a_folder_that_is_no_run(root: Path) -> None:
    put(MULTIARCH, root / "libm.so")
    done = invoke(str(root), "--run", str(root), status=1)
    assert f"{root}: no traced run here, or one that is not located yet" in done.stderr
    (root / "usage.json").write_text("{")
    done = invoke(str(root), "--run", str(root), status=1)
    assert "usage.json: not the usage of a traced run of this release" in done.stderr
