"""``negativa inspect`` as people and programs meet it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner

from pytest_negativa.cli.main import main
from pytest_negativa.gpucode.demangle import demangle
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.sizes import format_bytes
from pytest_negativa.rewriting.plan_edits import trim_kernels
from pytest_negativa.storage.schema import schema_text
from tests.support.builders import (
    CubinSpec,
    ElementSpec,
    HostSection,
    build_cubin,
    build_host,
    build_region,
    fatbin_section,
)
from tests.support.commands import inspect
from tests.support.compacting import plan_of
from tests.support.compiling import compile_shared, needs_compiler
from tests.support.libraries import (
    BIN,
    MANIFEST,
    MULTIARCH,
    NEGATIVA,
    PLAIN,
    golden_elements,
    make_large,
)
from tests.support.sites import install
from tests.support.slimmed import compact, plan_for, read


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("NEGATIVA_CACHE_DIR", str(folder))
    return folder


def inspect_json(*arguments: str | Path) -> dict[str, Any]:
    result = inspect("--json", *arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    document: dict[str, Any] = json.loads(result.stdout)
    jsonschema.validate(document, json.loads(schema_text("inspection")))
    assert document["errors"] == []
    return document


def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The installed command, as a shell would run it."""
    return subprocess.run(
        [NEGATIVA, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )


def cells(output: str) -> list[list[str]]:
    """The cells of all table rows (columns are two spaces or more apart)."""
    return [
        [cell.strip() for cell in line.split("  ") if cell.strip()] for line in output.split("\n")
    ]


class TestTables:
    def test_library(self) -> None:
        result = inspect(MULTIARCH)
        assert (result.exit_code, result.stderr) == (0, "")
        assert result.stdout.startswith(
            f"{MULTIARCH}: 39.5 kB, GPU code 21.8 kB (55.2%), 3 regions, 21 elements, 6 kernels\n"
        )
        rows = cells(result.stdout)
        assert [".nv_fatbin", "3", "21", "0", "21.8 kB"] in rows
        assert ["sm_75", "cubin", "3", "2.9 kB", "15.2 kB", "6"] in rows
        assert ["sm_120", "ptx", "3", "992 B", "3.0 kB", "6"] in rows
        assert "for other GPUs" not in result.stdout

    def test_arch(self) -> None:
        output = inspect("--arch", "sm_89", MULTIARCH).stdout
        rows = cells(output)
        # 904 + 952 + 1096 of the golden headers.
        assert ["sm_86", "cubin", "3", "3.0 kB", "16.2 kB", "6", "3.0 kB", "0 B"] in rows
        assert ["sm_90", "cubin", "3", "3.2 kB", "18.2 kB", "-", "0 B", "3.2 kB"] in rows
        assert (
            "A device of compute capability 8.9 loads at most 3.0 kB (13.5%) of this; "
            "18.8 kB (86.5%) is for other GPUs."
        ) in output

    def test_elements(self) -> None:
        output = inspect("--elements", MULTIARCH).stdout
        rows = [row for row in cells(output) if row[:1] and row[0].startswith("0x")]
        kinds = {1: "ptx", 2: "cubin"}
        assert [row[:7] for row in rows] == [
            [
                f"{e['header_offset']:#x}",
                f"{region['offset']:#x}",
                kinds[e["kind"]],
                f"sm_{e['arch']}",
                "zstd",
                f"{e['compressed_size']:,}",
                f"{e['uncompressed_size']:,}",
            ]
            for region in MANIFEST["golden"]["regions"]
            for e in region["elements"]
        ]

    @pytest.mark.parametrize("options", [[], ["--headers-only"]])
    def test_frames_that_a_device_loads(self, options: list[str]) -> None:
        library = BIN / "libframes.so"
        output = inspect("--elements", "--arch=9.0", *options, library).stdout
        rows = [row for row in cells(output) if row[:1] and row[0].startswith("0x")]
        assert [(row[0], row[3], row[-1]) for row in rows] == [
            ("0x1008", "sm_90", "yes"),
            ("0x1ff8", "sm_80", "-"),
            ("0x2380", "sm_90", "yes"),
        ]

    def test_kernels(self) -> None:
        output = inspect("--kernels", "--arch=9.0", BIN / "libnames.so").stdout
        listed = {line.split("  ")[0] for line in output.split("\n") if "[sm_90 " in line}
        expected = {
            kernel
            for element in MANIFEST["files"]["libnames.so"]["cuobjdump"]["elements"]
            if element["arch"] == "sm_90"
            for kernel in element["kernels"]
        }
        assert listed == expected
        assert len(listed) > 5

    @pytest.mark.parametrize("name", ["libplain.so", "libfalse_hits.so"])
    def test_without_gpu_code(self, name: str) -> None:
        result = inspect(BIN / name)
        assert (result.exit_code, result.stderr) == (0, "")
        size = (BIN / name).stat().st_size
        assert result.stdout == f"{BIN / name}: {size / 1000:.1f} kB, no NVIDIA GPU code\n"

    def test_folder(self, tmp_path: Path) -> None:
        folder = tmp_path / "libs"
        folder.mkdir()
        for name in ("libmultiarch.so", "libframes.so", "libplain.so"):
            (folder / name).write_bytes((BIN / name).read_bytes())
        (folder / "again.so").symlink_to("libmultiarch.so")
        (folder / "hard.so").hardlink_to(folder / "libmultiarch.so")
        (folder / "notes.txt").write_text("no library")
        os.mkfifo(folder / "fifo")
        result = inspect("--arch=9.0", folder)
        then = f"Next: negativa slim --arch sm_90 --spare spares --dry-run {folder}\n"
        assert (result.exit_code, result.stderr) == (0, then)
        assert f"{folder}: 2 libraries with GPU code, 1 without\n" in result.stdout
        rows = cells(result.stdout)
        assert [
            "total",
            "51.2 kB",
            "27.7 kB",
            "54.1%",
            "3",
            "21",
            "3",
            "17",
            "8.2 kB",
            "70.3%",
        ] in rows
        assert result.stdout.count("libmultiarch.so") + result.stdout.count("hard.so") == 1

    def test_folder_without_gpu_code(self, tmp_path: Path) -> None:
        (tmp_path / "libplain.so").write_bytes(PLAIN.read_bytes())
        assert inspect(tmp_path).stdout == f"{tmp_path}: 1 library, no NVIDIA GPU code\n"

    def test_code_of_other_vendors(self, tmp_path: Path) -> None:
        hip = HostSection(name=".hip_fatbin", data=b"__CLANG_OFFLOAD_BUNDLE__".ljust(5000, b"\1"))
        sycl = HostSection(name="__CLANG_OFFLOAD_BUNDLE__sycl-spir64_gen", data=bytes(700))
        folder = tmp_path / "folder"
        folder.mkdir()
        (folder / "libamd.so").write_bytes(build_host([hip]).data)
        (folder / "libboth.so").write_bytes(build_host([hip, sycl]).data)
        amd = "; .hip_fatbin (AMD, 5.0 kB) is not read\n"
        assert inspect(folder / "libamd.so").stdout.endswith(f" kB, no NVIDIA GPU code{amd}")
        both = (
            "; .hip_fatbin (AMD, 10.0 kB) is not read"
            "; __CLANG_OFFLOAD_BUNDLE__sycl-spir64_gen (Intel, 700 B) is not read\n"
        )
        assert inspect(folder).stdout == f"{folder}: 2 libraries, no NVIDIA GPU code{both}"
        report = CliRunner().invoke(main, ["inspect", "--packages", str(folder)])
        assert report.exit_code == 0 and both in report.stdout
        shutil.copy(MULTIARCH, folder)
        assert inspect(folder).stdout.startswith(
            f"{folder}: 1 library with GPU code, 2 without; .hip"
        )
        found = inspect_json(folder / "libamd.so")["libraries"][0]["summary"]["foreign"]
        assert found == [{"section": ".hip_fatbin", "vendor": "AMD", "size": 5000}]

    def test_distribution(self, tmp_path: Path) -> None:
        site = tmp_path / "site"
        site.mkdir()
        install(site, "demo-gpu", ("demo-kit[fft]",), ("demo/lib.so",))
        install(site, "demo-kit", ("demo-fft ; extra == 'fft'",), ("kit.so",), ("fft",))
        install(site, "demo-fft", (), ("fft.so",))
        # Through the installed command: what is installed is looked up on the module path.
        alone = run("inspect", "demo-gpu", PYTHONPATH=str(site))
        assert (alone.returncode, alone.stderr) == (0, "")
        assert "demo-gpu 1.0: 1 library with GPU code, 0 without\n" in alone.stdout
        both = run("inspect", "--deps", "demo-gpu", PYTHONPATH=str(site))
        assert "demo-gpu 1.0 and 2 distributions it requires: 3 libraries" in both.stdout

    def test_damage_is_told(self, tmp_path: Path) -> None:
        library = tmp_path / "lib.so"
        data = bytearray(MULTIARCH.read_bytes())
        # In the compressed bytes of the first cubin.
        start = golden_elements()[0]["payload_offset"]
        data[start + 30 : start + 90] = bytes(60)
        library.write_bytes(data)
        result = inspect(library)
        assert result.exit_code == 0
        assert f"{library}: element at offset 0x2090: " in result.stdout
        assert "; kept\n" in result.stdout

    def test_damage_is_told_where_nothing_is_left(self, tmp_path: Path) -> None:
        library = tmp_path / "lib.so"
        library.write_bytes(build_host([fatbin_section(b"not a region")]).data)
        alone, folder = inspect(library), inspect(tmp_path)
        assert f"{library}: {library.stat().st_size} B, no NVIDIA GPU code that is understood" in (
            alone.stdout
        )
        assert "1 library, no NVIDIA GPU code" in folder.stdout
        for result in (alone, folder):
            assert result.exit_code == 0
            assert f"{library}: at offset 0x40: .nv_fatbin: 16 bytes" in result.stdout
            assert "are not understood; kept" in result.stdout

    def test_kernels_of_one_name_in_two_regions(self, tmp_path: Path) -> None:
        library = tmp_path / "lib.so"
        regions = [
            build_region([ElementSpec(content=build_cubin(CubinSpec(kernels={"k": code})).data)])
            for code in (bytes(1024), bytes(64), bytes(1024))
        ]
        library.write_bytes(build_host([fatbin_section(*regions)]).data)
        assert "k  [sm_90 1,024 B, sm_90 64 B]" in inspect("--kernels", library).stdout.split("\n")

    def test_kernels_that_are_asked_for(self) -> None:
        every = inspect("--kernels", BIN / "libnames.so").stdout.split("\n")
        names = [line for line in every if line.endswith("]")]
        assert len(names) > 2 and names[0].startswith("_Z")
        mangled = names[0].partition("  [")[0]
        for asked in (mangled, demangle(mangled)):
            found = inspect("--kernels", "--match", asked, BIN / "libnames.so").stdout
            assert [line for line in found.split("\n") if line.endswith("]")] == names[:1]
        assert inspect("--top=1", PLAIN).exit_code == 2

    def test_names_that_a_terminal_would_act_on(self, tmp_path: Path) -> None:
        image = build_cubin(CubinSpec(kernels={"k\x1b[2Jernel": bytes(64)})).data
        region = build_region([ElementSpec(content=image, identifier=b"\x1b]0;x\x07.cu")])
        folder = tmp_path / "a\x1b[31m\nb"
        folder.mkdir()
        library = folder / "lib\x1bc.so"
        odd = HostSection(name="\x1b[7m.odd", data=region)
        library.write_bytes(build_host([odd, fatbin_section(b"no region")]).data)
        (folder / "text\x1bc").write_bytes(b"no library")
        for path in (library, folder, folder / "text\x1bc", folder / "absent\x1bc"):
            result = inspect("--kernels", "--elements", path)
            assert result.stdout or result.stderr
            for output in (result.stdout, result.stderr):
                assert all(line.isprintable() for line in output.split("\n"))
        output = inspect("--kernels", "--elements", library).stdout
        assert r"k\x1b[2Jernel  [" in output
        for shown in (r"\x1b]0;x\x07.cu", r"\x1b[7m.odd", r"a\x1b[31m\nb/lib\x1bc.so: "):
            assert shown in output

    def test_file_name_that_is_not_utf8(self, tmp_path: Path) -> None:
        name = os.fsencode(tmp_path) + b"/lib\xff.so"
        Path(os.fsdecode(name)).write_bytes(MULTIARCH.read_bytes())
        for option in ([], ["--json"]):
            done = subprocess.run([NEGATIVA, "inspect", *option, name], capture_output=True)
            assert done.returncode == 1
            assert b"Traceback" not in done.stderr
            assert b"the path is not UTF-8" in done.stderr


class TestJson:
    @pytest.mark.parametrize("option", ["--elements", "--kernels"])
    def test_details_bring_the_map(self, option: str) -> None:
        (library,) = inspect_json(option, MULTIARCH)["libraries"]
        library_map = library["map"]
        assert library_map["format"] == 1
        (section,) = library_map["sections"]
        spans = [e["payload"] for region in section["regions"] for e in region["elements"]]
        assert spans == [
            [e["payload_offset"], e["payload_offset"] + e["size"]] for e in golden_elements()
        ]
        assert "scale" in library_map["names"]

    def test_same_with_and_without_cache(self, tmp_path: Path, cache_folder: Path) -> None:
        large = make_large(MULTIARCH, tmp_path / "large.so")
        asked = ("", "--arch=9.0", "--arch=8.6 --headers-only", "--headers-only", "--elements")
        for options in asked:
            for form in ("", " --json"):
                arguments = [*(options + form).split(), str(large)]
                fresh = inspect("--no-cache", *arguments)
                outputs = {inspect(*arguments).stdout for _ in range(2)} | {fresh.stdout}
                assert len(outputs) == 1, arguments
        assert list(cache_folder.iterdir())

    def test_the_file_of_settings_names_the_cache(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("NEGATIVA_CACHE_DIR")
        monkeypatch.chdir(tmp_path)
        (tmp_path / "negativa.yaml").write_text("cache_dir: maps")
        assert inspect(make_large(MULTIARCH, tmp_path / "large.so")).exit_code == 0
        assert len(list((tmp_path / "maps").iterdir())) == 1
        (tmp_path / "negativa.yaml").write_text("cache_dirs: maps")
        result = inspect(tmp_path / "large.so")
        assert (result.exit_code, result.stderr) == (
            2, f"negativa: error: {tmp_path}/negativa.yaml:1:1: unknown key 'cache_dirs'; "
            "did you mean cache_dir?\n",
        )  # fmt: skip

    def test_no_cache_leaves_no_folder(self, tmp_path: Path, cache_folder: Path) -> None:
        inspect("--no-cache", make_large(MULTIARCH, tmp_path / "large.so"))
        assert not cache_folder.exists()


@pytest.mark.parametrize("flags", [(), ("--packages",)])
def test_archives_of_a_folder_are_told_of(tmp_path: Path, flags: tuple[str, ...]) -> None:
    for name in ("a-1-py3-none-any.whl", "b.conda", "image.tar.gz"):
        (tmp_path / name).write_bytes(b"")

    def note() -> str:
        done = CliRunner().invoke(main, ["inspect", *flags, str(tmp_path)])
        assert done.exit_code == 0
        return done.stderr

    told = f"negativa: note: {tmp_path}: 3 archives were not opened: name them\n"
    assert note() == told
    # What is found needs no note.
    shutil.copy(MULTIARCH, tmp_path)
    assert "not opened" not in note()


class TestSlimmed:
    @pytest.fixture
    def slimmed(self, tmp_path: Path) -> Path:
        before = read(MULTIARCH)
        (tmp_path / "libs").mkdir()
        library = tmp_path / "libs" / "libsmall.so"
        compact(before, plan_of(before, lambda number: number in (2, 4, 10)), library)
        return library

    def test_library(self, slimmed: Path) -> None:
        output = inspect(slimmed).stdout
        line = output.split("\n")[0]
        assert " in the file), " in line
        assert line.startswith(f"{slimmed}: ") and "2 regions, 3 elements, " in line
        assert output.split("\n\n")[-1].startswith(
            "Slimmed by negativa slim from 39.5 kB; listed is what is left. "
        )
        assert "unknown" not in output

    def test_elements_and_kernels_are_those_of_the_original(self, slimmed: Path) -> None:
        def listed(library: Path) -> list[list[str]]:
            output = cells(inspect("--elements", library).stdout)
            return [row[2:] for row in output if row[:1] and row[0].startswith("0x")]

        assert "address" in inspect("--elements", slimmed).stdout
        original = listed(MULTIARCH)
        assert listed(slimmed) == [original[i] for i in (2, 4, 10)]
        names = {line.split("  ")[0] for line in inspect("--kernels", slimmed).stdout.split("\n")}
        assert {k for k in names if k.startswith("_Z")} <= {
            line.split("  ")[0] for line in inspect("--kernels", MULTIARCH).stdout.split("\n")
        }

    def test_functions_that_are_gone(self, tmp_path: Path) -> None:
        before = read(BIN / "libcallgraph.so")
        plan = plan_for(before, "calls_nothing")
        with ByteSource(BIN / "libcallgraph.so") as source:
            edits, _ = trim_kernels(source, before, plan, 1)
        compact(before, plan, tmp_path / "lib.so", edits)
        output = inspect("--arch=9.0", "--kernels", tmp_path / "lib.so").stdout
        assert "calls_nothing  [sm_90 " in output
        assert "calls_pointer  [" not in output and "\n  [" not in output
        none = inspect("--kernels", "--match=gen_*", BIN / "libcallgraph.so").stdout
        assert "\n\n0 of " in none and none.endswith(" kernels match\n")

    def test_several_libraries(self, slimmed: Path) -> None:
        shutil.copy(slimmed, slimmed.with_name("second.so"))
        shutil.copy(MULTIARCH, slimmed.with_name("whole.so"))
        output = inspect("--headers-only", slimmed.parent).stdout
        assert "3 libraries with GPU code, 0 without" in output
        size = format_bytes(2 * MULTIARCH.stat().st_size)
        assert f"2 of these libraries were slimmed by negativa slim from {size}; " in output
        assert " of sections with GPU code are no longer in the files.\n" in output

    def test_nothing_left(self, tmp_path: Path) -> None:
        before = read(MULTIARCH)
        compact(before, plan_of(before, lambda number: False), tmp_path / "lib.so")
        first, second, _ = inspect(tmp_path / "lib.so").stdout.split("\n")
        assert first.endswith(", no NVIDIA GPU code")
        assert second.startswith("Slimmed by negativa slim from 39.5 kB; ")


class TestArch:
    def test_several_devices(self) -> None:
        listed = inspect("--arch=sm_80,90", MULTIARCH).stdout
        assert listed == inspect("--arch", "compute_80", "--arch", "9.0,80", MULTIARCH).stdout
        loaded = 904 + 952 + 1104 + 992 + 1032 + 1160
        assert (
            f"A device of compute capability 8.0 or 9.0 loads at most {format_bytes(loaded)}"
            in (listed)
        )
        assert "loaded on 8.0, 9.0" in listed
        [library] = inspect_json("--arch=sm_80,90", MULTIARCH)["libraries"]
        assert library["summary"]["devices"] == ["8.0", "9.0"]
        assert sum(row["loaded_bytes"] for row in library["summary"]["code"]) == loaded

    @needs_compiler
    def test_native(self, tmp_path: Path) -> None:
        driver = {"LD_LIBRARY_PATH": str(tmp_path)}
        compile_shared("driver.c", tmp_path / "libcuda.so.1")
        native = run("inspect", "--arch", "native,80", MULTIARCH, **driver)
        assert (native.returncode, native.stderr) == (0, "")
        assert native.stdout == inspect("--arch=9.0,80", MULTIARCH).stdout
        without = run("inspect", "--arch", "native", MULTIARCH, **driver, STANDIN_NO_DEVICE="1")
        assert without.returncode == 2
        assert (
            "native: no GPU works on this machine (cuInit gave error 100); name" in without.stderr
        )


class TestErrors:
    """Exit status 1 for what can't be read, 2 for wrong usage; never a traceback."""

    @pytest.mark.parametrize(
        ("arguments", "status", "message"),
        [
            (["/absent/lib.so"], 2, "negativa: error: /absent/lib.so: no such file or folder\n"),
            (
                ["not-installed-at-all"],
                2,
                "negativa: error: not-installed-at-all: neither a file or folder nor a "
                "distribution that is installed for ",
            ),
            (["pytest-negativ"], 2, "did you mean pytest-negativa?\n"),
            ([""], 2, "negativa: error: an empty name"),
            (["--arch=foo", str(PLAIN)], 2, "'foo' is no GPU architecture; expected a form like"),
            (["--arch=9.9", str(PLAIN)], 2, "knows no GPU of arch sm_99; did you mean sm_90?"),
            (["--jobs=0", str(PLAIN)], 2, "0 is not in the range"),
            (["--kernels", "--headers-only", str(PLAIN)], 2, "--kernels needs the code unpacked"),
            (["--nonsense", str(PLAIN)], 2, "No such option"),
        ],
    )
    def test_command(self, arguments: list[str], status: int, message: str) -> None:
        done = inspect(*arguments)
        assert (done.exit_code, done.stdout) == (status, "")
        assert message in done.stderr

    def test_one_broken_of_several(self, tmp_path: Path) -> None:
        broken = tmp_path / "broken.so"
        broken.write_bytes(MULTIARCH.read_bytes()[:10_000])
        for done in (run("inspect", MULTIARCH, broken, PLAIN), run("inspect", PLAIN, tmp_path)):
            assert done.returncode == 1
            assert f"{PLAIN}: 5.7 kB, no NVIDIA GPU code\n" in done.stdout
            assert done.stderr.startswith(f"negativa: error: {broken}: at offset ")
            assert done.stderr.endswith("is it truncated?\n")
        result = inspect("--json", MULTIARCH, broken)
        document = json.loads(result.stdout)
        assert result.exit_code == 1
        assert [x["summary"]["path"] for x in document["libraries"]] == [str(MULTIARCH)]
        assert result.stderr == f"negativa: error: {document['errors'][0]}\n"

    def test_output_that_nobody_reads(self) -> None:
        with subprocess.Popen(
            [NEGATIVA, "inspect", "--elements", *[MULTIARCH] * 200],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            assert process.stderr.read() == b""


def test_help() -> None:
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    assert "inspect" in result.stdout
    assert run("--version").stdout.startswith("negativa, version ")


class TestOtherFiles:
    """Files that are GPU code themselves, and files that only a linker reads."""

    def test_folder(self, tmp_path: Path) -> None:
        cubins = tmp_path / "package" / "cubins"
        cubins.mkdir(parents=True)
        for name in ("kernels.sm_80.cubin", "kernels.sm_90.cubin"):
            # The first bytes tell the kind, whatever the name is.
            shutil.copy(BIN / name, cubins / f"{name}.data")
        for name in ("libmultiarch.so", "kernels.ptx", "librdc.a", "cpu.bc"):
            shutil.copy(BIN / name, tmp_path)
        output = inspect(tmp_path, "--arch=9.0").stdout
        rows = cells(output)
        assert output.startswith(
            f"{tmp_path}: 1 library with GPU code, 0 without, 3 files that are GPU code, "
            "1 file for linkers alone\n"
        )
        names = ["2 cubin files in package/cubins", "kernels.ptx", "libmultiarch.so", "librdc.a"]
        found = {row[0]: row[1:] for row in rows if row and row[0] in names}
        assert sorted(found) == names
        assert " ".join(found[names[0]]) == "9.8 kB 9.8 kB 100.0% 0 2 0 2 5.2 kB 46.9%"
        assert len(found["librdc.a"]) == 7, "no figures of loaded code"

    def test_gates_leave_them_out(self, tmp_path: Path) -> None:
        for name in ("libmode_size.so", "kernels.sm_75.cubin", "librdc.a"):
            shutil.copy(BIN / name, tmp_path)
        assert inspect(tmp_path, "--require-arch=sm_90").exit_code == 0
        assert inspect(BIN / "kernels.sm_75.cubin", "--require-arch=sm_90").exit_code == 1
        assert inspect("--arch=sm_90", "--max-dead=99", tmp_path).exit_code == 0

    def test_elements_without_an_arch(self) -> None:
        rows = cells(inspect("--elements", BIN / "gpu.bc").stdout)
        assert ["0x0", "-", "bitcode", "-", "none", "1,604", "1,604", "-"] in rows
