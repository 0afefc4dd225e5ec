"""The gates of ``negativa inspect``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner

from pytest_negativa.cli.main import main
from pytest_negativa.storage.schema import schema_text
from tests.support.builders import (
    PTX,
    CubinSpec,
    ElementSpec,
    build_cubin,
    build_host,
    build_ptx,
    build_region,
    fatbin_section,
)
from tests.support.commands import inspect
from tests.support.compacting import build, needs_compiler
from tests.support.libraries import BIN, MULTIARCH, PLAIN


def as_json(*arguments: str | Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(inspect("--json", *arguments).stdout)
    jsonschema.validate(document, json.loads(schema_text("inspection")))
    return document


def row(output: str, name: str) -> list[list[str]]:
    return [line.split()[1:] for line in output.splitlines() if line.startswith(name)]


class TestRequired:
    def test_code_for_all(self, tmp_path: Path) -> None:
        shutil.copy(MULTIARCH, tmp_path)
        shutil.copy(PLAIN, tmp_path)
        done = inspect(tmp_path, "--require-arch", "sm_80,90")
        assert (done.exit_code, done.stderr) == (0, "")
        found = row(done.stdout, "libmultiarch.so")
        assert found == [[d, "3", "0", "-", "-", "0"] for d in ("8.0", "9.0")]
        assert PLAIN.name not in done.stdout

    def test_what_is_compiled_when_it_is_loaded(self) -> None:
        done = inspect(BIN / "libptx_only.so", BIN / "liblto.so", "--require-arch", "8.0")
        assert done.exit_code == 0
        assert row(done.stdout, "libptx_only.so") == [
            ["8.0", "0", "1", "290", "B", "ptx", "sm_75", "0"]
        ]
        assert row(done.stdout, "liblto.so")[0][-3:] == ["lto-ir", "sm_80", "0"]

    @pytest.mark.parametrize(
        ("objects", "linked"),
        [
            (("cubin sm_90 ptx sm_90", "ptx sm_90"), True),
            (("cubin sm_90 ptx sm_90", "cubin sm_120"), True),
            (("cubin sm_90 ptx sm_90", "cubin sm_90"), False),
            (("cubin sm_90 lto sm_90",), False),
        ],
    )
    def test_relocatable_code_that_the_driver_links(
        self, objects: tuple[str, ...], linked: bool, tmp_path: Path
    ) -> None:
        """As seen on a GPU: each object needs a cubin for it, or PTX."""

        def element(kind: str, arch: str) -> ElementSpec:
            number = int(arch.removeprefix("sm_"))
            if kind == "cubin":
                spec = CubinSpec(arch=number, kernels={"k": b"code"})
                return ElementSpec(content=build_cubin(spec).data, arch=number)
            code = build_ptx() if kind == "ptx" else b"\xed\x43\x4e\x7f" + bytes(60)
            return ElementSpec(content=code, kind=PTX if kind == "ptx" else 8, arch=number)

        regions = []
        for words in (text.split() for text in objects):
            pairs = zip(words[::2], words[1::2], strict=True)
            regions.append(build_region([element(*pair) for pair in pairs]))
        sections = [
            fatbin_section(build_region([element("cubin", "sm_90")])),
            fatbin_section(*regions, name="__nv_relfatbin"),
        ]
        path = tmp_path / "librdc.so"
        path.write_bytes(build_host(sections).data)
        assert inspect(path, "--require-arch", "9.0").exit_code == 0
        done = inspect(path, "--require-arch", "12.0")
        assert done.exit_code == (0 if linked else 1)
        if not linked:
            assert "no code that sm_120 can load; it has cubin sm_90" in done.stderr

    def test_relocatable_code_alone(self) -> None:
        done = inspect(BIN / "librdc_unlinked.so", "--require-arch", "80")
        assert done.exit_code == 1
        has = "it has cubin sm_80 for a linker, cubin sm_90 for a linker\n"
        assert done.stderr.endswith(f"no code that sm_80 can load; {has}")
        assert inspect(BIN / "rdc_caller.o", "--require-arch", "80").exit_code == 0

    def test_no_code_for_one(self) -> None:
        done = inspect(MULTIARCH, BIN / "libdebug.so", "--require-arch", "90,80")
        assert done.exit_code == 1
        path = BIN / "libdebug.so"
        message = f"{path}: no code that sm_80 can load; it has cubin sm_90, ptx sm_90"
        assert done.stderr == f"negativa: error: {message}\n"
        assert row(done.stdout, "libdebug.so")[0][-1] == "ALL"

    def test_a_gate_that_checks_nothing_fails(self, tmp_path: Path) -> None:
        shutil.copy(PLAIN, tmp_path)
        done = inspect(tmp_path, "--require-arch", "80,90")
        assert done.exit_code == 1
        assert done.stderr.endswith(": no GPU code that devices load, so none for sm_80, sm_90\n")

    @needs_compiler
    def test_empty_cubins_that_slim_left(self, tmp_path: Path) -> None:
        """They are what the device linker makes for each arch, and no code to run."""
        kernels = {"fill": bytes(range(256)) * 1024}
        contents = [CubinSpec(arch=80, kernels=kernels), CubinSpec(arch=90)]
        cubins = [ElementSpec(content=build_cubin(c).data, arch=c.arch) for c in contents]
        library = build(tmp_path, fatbin=build_region(cubins), ldata=b"")
        assert inspect(library, "--require-arch=90").exit_code == 0
        words = ["slim", "--no-way-back", "--arch=sm_90", str(tmp_path)]
        slimmed = CliRunner().invoke(main, words)
        assert slimmed.exit_code == 0, slimmed.output
        done = inspect(library, "--require-arch=90")
        assert f"{library}: no code that sm_90 can load" in done.stderr, slimmed.output
        assert row(done.stdout, library.name)[0][-1] == "ALL"

    def test_regions_without_code(self) -> None:
        [library] = as_json(BIN / "libplaces.so", "--require-arch", "80,90")["libraries"]
        first, second = library["loadable"]
        assert (first["machine"], first["compiled"], first["nothing"]) == (1, 0, 3)
        assert (second["machine"], second["compiled"], second["nothing"]) == (2, 1, 1)
        assert second["compiled_from"] == ["ptx sm_90"] and library["map"] is None

    def test_relocatable_code_is_no_region_that_loads(self) -> None:
        # Its linked cubin is for sm_80 and sm_90 alone; the relocatable code is not counted.
        [library] = as_json(BIN / "librdc_linked.so", "--require-arch", "80")["libraries"]
        sections = {s["name"]: s["regions"] for s in library["summary"]["sections"]}
        assert len(sections) == 2
        assert library["loadable"][0]["machine"] == sections[".nv_fatbin"] == 1


class TestDead:
    def test_the_limit(self, tmp_path: Path) -> None:
        shutil.copy(MULTIARCH, tmp_path)
        shutil.copy(PLAIN, tmp_path)
        assert inspect(tmp_path, "--arch=80,90", "--max-dead", "72%").exit_code == 0
        done = inspect(tmp_path, "--arch=80,90", "--max-dead", "71.5")
        assert done.exit_code == 1
        assert done.stderr.endswith(": 71.8% of the GPU code is for other GPUs, more than 71.5%\n")

    def test_a_gate_that_checks_nothing_fails(self) -> None:
        done = inspect(PLAIN, "--arch=90", "--max-dead=0")
        assert done.exit_code == 1
        assert done.stderr.endswith(
            ": no GPU code that devices load, so --max-dead checks nothing\n"
        )

    @pytest.mark.parametrize("name", ["libdebug.so", "liblto.so"])
    def test_what_is_no_machine_code(self, name: str) -> None:
        assert inspect(BIN / name, "--arch=80,90", "--max-dead=0").exit_code == 1

    def test_files_for_linkers_alone(self, tmp_path: Path) -> None:
        shutil.copy(BIN / "librdc.a", tmp_path)
        for how in (["--arch=70", "--max-dead=5"], ["--require-arch=70"]):
            done = inspect(tmp_path, *how)
            assert done.exit_code == 1 and ": no GPU code that devices load, so " in done.stderr
        assert inspect(PLAIN, MULTIARCH, "--arch=90", "--max-dead=100").exit_code == 1

    @pytest.mark.parametrize(
        ("words", "problem"),
        [
            (("--max-dead=5%",), "--max-dead needs --arch"),
            (("--arch=80", "--max-dead=101"), "expected a percentage from 0 to 100"),
        ],
    )
    def test_wrong_usage(self, words: tuple[str, ...], problem: str) -> None:
        done = inspect(MULTIARCH, *words)
        assert done.exit_code == 2 and problem in done.stderr
