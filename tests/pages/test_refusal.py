"""What ld.so says of a library that can't have its spare, and that it loads one of any layout."""

from __future__ import annotations

import dataclasses
import os
import resource
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.relocation import RelocationSection

from pytest_negativa.pages.note import PROBLEMS
from pytest_negativa.rewriting.compact.cut import CutOptions
from pytest_negativa.rewriting.compact.records import Cut
from tests.support.compiling import compile_c
from tests.support.cutting import (
    Kit,
    build_kit,
    compile_later,
    compile_library,
    may_mount,
    needs_stub,
)

pytestmark = needs_stub

ABSENT, CLOSED, OTHER, UNTRUSTED, NOEXEC, UNMAPPED = PROBLEMS


def message_of(cut: Cut, problem: str) -> str:
    """What a program prints of a library that can't be loaded."""
    return (
        f"{cut.library}: undefined symbol: [negativa] its spare {cut.spare.name} {problem}. "
        "Put the spare beside the library, or put the original back.\n"
    )


@pytest.mark.parametrize(
    ("problem", "damage"),
    [
        (ABSENT, lambda spare: spare.unlink()),
        (CLOSED, lambda spare: (spare.unlink(), spare.symlink_to(spare))),
        (OTHER, lambda spare: os.truncate(spare, spare.stat().st_size - 4096)),
        (OTHER, lambda spare: (spare.unlink(), spare.mkdir())),
        (UNTRUSTED, lambda spare: spare.chmod(0o666)),
        (UNTRUSTED, lambda spare: spare.parent.chmod(0o1777)),
    ],
)
def test_the_message_has_the_reason(
    kit: Kit, tmp_path: Path, problem: str, damage: Callable[[Path], object]
) -> None:
    cut = kit.cut(tmp_path)
    damage(cut.spare)
    done = kit.run("plain", cut.library)
    assert (done.returncode, done.stdout, done.stderr) == (3, message_of(cut, problem), "")


def test_no_descriptor_is_left(kit: Kit, cut: Cut) -> None:
    """ld.so needs one itself; the folder of the spare takes it."""
    done = subprocess.run(
        [kit.program, "plain", cut.library, str(kit.pages)],
        env={},
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (4, 4)),
    )
    assert (done.returncode, done.stdout) == (3, message_of(cut, CLOSED))


def test_no_memory_is_left(kit: Kit, cut: Cut) -> None:
    """It loads as soon as there is some."""
    done = kit.run("little-memory", cut.library)
    assert (done.returncode, done.stdout) == (0, message_of(cut, UNMAPPED)[:-1] + "\n" + kit.output)
    assert "failed to map" in kit.run("little-memory", kit.library).stdout


@pytest.mark.slow
@pytest.mark.skipif(not may_mount(), reason="needs to mount file systems")
def test_more_than_is_copied_where_no_code_may_run(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    kit = build_kit(tmp_path_factory.mktemp("large"), pages=4200)
    (mount := tmp_path / "mount").mkdir()
    cut = kit.cut(tmp_path, options=CutOptions(min_hole=4096, folders=(str(mount),)))
    script = (
        'mount -t tmpfs -o noexec,mode=755 tmpfs "$1" && mv "$2" "$1" && exec "$3" plain "$4" 5'
    )
    command = ["unshare", "-m", "sh", "-c", script, "-"]
    command += map(str, (mount, cut.spare, kit.program, cut.library))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, message_of(cut, NOEXEC))


# Each is refused without its spare, and loads with it.
LAYOUTS = {
    "no count of relative rows": ("-Wl,-z,nocombreloc",),
    "packed relative relocations": ("-Wl,-z,pack-relative-relocs",),
    "hash table of System V": ("-Wl,--hash-style=sysv",),
    "code and data in one segment": ("-Wl,-z,noseparate-code",),
    "each in a segment of its own": ("-Wl,-z,separate-code",),
    "all at once": ("-Wl,-z,now",),
    "no table of jumps": ("-fno-plt", "-Wl,-z,now"),
    "gold": ("-fuse-ld=gold",),
    "lld": ("-fuse-ld=lld",),
}
MODES = """
import ctypes, os, sys
library, spare, pages = sys.argv[1:]
os.rename(spare, spare + ".away")
modes = [os.RTLD_LAZY, os.RTLD_NOW, os.RTLD_NOW | os.RTLD_GLOBAL, os.RTLD_LAZY | os.RTLD_DEEPBIND]
for mode in modes:
    try:
        ctypes.CDLL(library, mode)
    except OSError as e:
        assert str(e).startswith(f"{library}: undefined symbol: [negativa] its spare "), e
    else:
        sys.exit("loaded without its spare")
os.rename(spare + ".away", spare)
for mode in modes:
    if os.fork() == 0:
        loaded = ctypes.CDLL(library, mode)
        sums = loaded.constructed(), loaded.sum(0, int(pages))
        print(*sums, *(loaded.thrown(i) for i in range(0, 150, 30)), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


def loads_in_all_modes(kit: Kit, cut: Cut) -> None:
    for environ in ({}, {"LD_BIND_NOW": "1"}):
        done = subprocess.run(
            [sys.executable, "-I", "-c", MODES, cut.library, cut.spare, str(kit.pages)],
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, 4 * kit.output, "")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(kit: Kit, tmp_path: Path, layout: str) -> None:
    try:
        library = compile_library(tmp_path, *LAYOUTS[layout])
    except subprocess.CalledProcessError:
        pytest.skip("this linker is not installed, or knows no such option")
    kit = dataclasses.replace(kit, library=library)
    loads_in_all_modes(kit, kit.cut(tmp_path / "cut"))


def test_the_rows_of_jumps_are_a_part_of_the_others(kit: Kit, tmp_path: Path) -> None:
    """As linkers before 2005 have them, and prelink."""
    library = Path(shutil.copy(kit.library, tmp_path))
    with library.open("r+b") as file:
        dynamic = ELFFile(file).get_section_by_name(".dynamic")
        assert isinstance(dynamic, DynamicSection)
        tags = {row.entry.d_tag: (i, row.entry.d_val) for i, row in enumerate(dynamic.iter_tags())}
        size = tags["DT_RELASZ"][1]
        assert tags["DT_RELA"][1] + size == tags["DT_JMPREL"][1]
        file.seek(dynamic["sh_offset"] + 16 * tags["DT_RELASZ"][0] + 8)
        file.write(struct.pack("<Q", size + tags["DT_PLTRELSZ"][1]))
    kit = dataclasses.replace(kit, library=library)
    loads_in_all_modes(kit, kit.cut(tmp_path / "cut"))


def test_a_library_without_any_relocation(tmp_path: Path) -> None:
    source = tmp_path / "library.c"
    source.write_text(
        '__asm__(".balign 4096\\n.globl sum\\n.type sum, @function\\n'
        'sum: lea (%rdi,%rsi), %eax\\nret\\n.balign 4096\\n");\n'
    )
    library = tmp_path / "libpages.so"
    subprocess.run(["gcc", "-shared", "-nostdlib", "-o", library, source], check=True)
    with library.open("rb") as file:
        assert not [s for s in ELFFile(file).iter_sections() if s["sh_type"] == "SHT_RELA"]
    cut = Kit(library, library, 1).cut(tmp_path / "cut")
    code = """
import ctypes, os, sys
print(ctypes.CDLL(sys.argv[1]).sum(1, 2))
"""
    command = [sys.executable, "-I", "-c", code, str(cut.library)]
    for environ in ({}, {"LD_BIND_NOW": "1"}):
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert (done.stdout, done.stderr) == ("3\n", "")
    cut.spare.unlink()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert message_of(cut, ABSENT).rstrip() in done.stderr


def test_a_program_with_its_own_copy_of_the_librarys_data(tmp_path: Path) -> None:
    cut, _ = compile_later(tmp_path)
    flags = ("-fno-pic", "-no-pie", "-L", str(tmp_path), "-llater", "-Wl,-rpath,$ORIGIN")
    program = compile_c("spare/main.c", tmp_path / "copying", *flags)
    with program.open("rb") as file:
        rows = ELFFile(file).get_section_by_name(".rela.dyn")
        assert isinstance(rows, RelocationSection)
        assert 5 in [row["r_info_type"] for row in rows.iter_relocations()]  # R_X86_64_COPY
    for environ in ({"SETTING": "it"}, {"SETTING": "it", "LD_BIND_NOW": "1"}):
        done = subprocess.run([program], env=environ, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "42 it of copying\n")
    cut.spare.unlink()
    done = subprocess.run([program], env={}, capture_output=True, text=True, check=False)
    assert done.returncode == 127 and message_of(cut, ABSENT).rstrip() in done.stderr


def test_a_spare_is_no_library(kit: Kit, cut: Cut) -> None:
    """Programs that load all that they find in a folder try it."""
    done = kit.run("plain", cut.spare)
    assert done.returncode == 3
    assert done.stdout == f"{cut.spare}: object file has no loadable segments\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_a_program_with_more_rights_than_its_caller_has(kit: Kit) -> None:
    """The variable names the caller's folder, so it counts for nothing."""
    with tempfile.TemporaryDirectory() as name:
        (folder := Path(name)).chmod(0o755)
        program = Path(shutil.copy(kit.program, folder))
        spares = folder / "spares"
        spares.mkdir()
        away = kit.cut(folder / "away")
        away.spare.rename(spares / away.spare.name)
        named = kit.cut(folder / "named", options=CutOptions(4096, folders=(str(spares),)))
        named.spare.rename(spares / named.spare.name)

        def run(cut: Cut) -> tuple[int, str]:
            done = subprocess.run(
                [program, "plain", cut.library, str(kit.pages)],
                env={"NEGATIVA_SPARE_DIR": str(spares)},
                user=65534,
                group=65534,
                extra_groups=[],
                capture_output=True,
                text=True,
                check=False,
            )
            return done.returncode, done.stdout

        assert run(away) == run(named) == (0, kit.output)
        if os.statvfs(program).f_flag & os.ST_NOSUID:
            pytest.skip("this file system knows no set-user-ID")
        program.chmod(0o755 | stat.S_ISUID)
        assert run(named) == (0, kit.output)
        assert run(away) == (3, message_of(away, ABSENT))
        program.chmod(0o755)
        setcap = shutil.which("setcap", path="/usr/sbin:/sbin:/usr/bin")
        if setcap is None:
            pytest.skip("needs setcap")
        subprocess.run([setcap, "cap_net_raw=ep", program], check=True)
        assert run(away) == (3, message_of(away, ABSENT))
        assert run(named) == run(kit.cut(folder / "beside")) == (0, kit.output)
