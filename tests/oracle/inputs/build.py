"""Builds the libraries of this folder (with gcc, g++, ld and gold), when run as a module.

The fixtures are too small to be slimmed. These have the same GPU code several times, so that they
are large, and small as ``.so.xz``. They are inputs: a rebuilt one means new recorded results.
"""

from __future__ import annotations

import lzma
import struct
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
FIXTURES = ROOT / "tests" / "fixtures" / "bin"
QUICKSTART = FIXTURES.parent / "quickstart" / "quickstart" / "libquickstart.so"

HOST = r"""
#include <stdexcept>
#include <string>
extern "C" const char gpu_start[];
struct Wrapper { int magic, version; const void *data; void *unused; };
__attribute__((section(".nvFatBinSegment"), used))
static Wrapper wrapper = { 0x466243b1, 1, gpu_start, nullptr };
static int one() { return 1; }
static int two() { return 2; }
__attribute__((used)) static int (*const table[])() = { one, two };
static thread_local int counter = 40;
static char large_bss[100000];
static std::string initialised = "by a constructor";
extern "C" int call(int i) { return table[i & 1](); }
extern "C" int count() { return ++counter; }
extern "C" int bss_sum() { int s = 0; for (char c : large_bss) s += c; large_bss[5] = 1; return s; }
extern "C" const void *registered() { return wrapper.data; }
extern "C" int constructed() { return initialised == "by a constructor"; }
__attribute__((noinline)) static void thrower(int i) { if (i) throw std::runtime_error("thrown"); }
extern "C" int catches(int i) {
    try { thrower(i); } catch (const std::exception &e) { return std::string(e.what()).size(); }
    return 0;
}
"""
# What is never executed here needs no C library: it loads wherever the product runs.
BARE_HOST = r"""
extern const char gpu_start[];
static int one(void) { return 1; }
static int two(void) { return 2; }
__attribute__((used)) static int (*const table[])(void) = { one, two };
__attribute__((section(".nvFatBinSegment"), used))
static struct { int magic, version; const void *data; void *unused; } wrapper =
    { 0x466243b1, 1, gpu_start, 0 };
int call(int i) { return table[i & 1](); }
"""
# Functions of 20 KiB each: each has pages of its own.
FUNCTIONS = "\n".join(
    f"""
    .section .text.page{n}, "ax", @progbits
    .balign 4096
    .global page{n}
    .type page{n}, @function
page{n}:
    mov ${n}, %eax
    ret
    .fill 20474, 1, 0x90
    .size page{n}, . - page{n}
"""
    for n in range(30)
)
DEBUG = '\n.section .debug_fake,"",@progbits\n.fill 100000, 1, 0x41\n'


def sections(path: Path, *names: str) -> bytes:
    """The contents of sections of an ELF file, one behind the other."""
    data = path.read_bytes()
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count, index = struct.unpack_from("<HHH", data, 58)
    rows = [struct.unpack_from("<IIQQQQ", data, table + size * i) for i in range(count)]
    strings = rows[index][4]
    found = b""
    for name, _, _, _, offset, length in rows:
        start = strings + name
        if data[start : data.index(b"\0", start)].decode() in names:
            found += data[offset : offset + length]
            found += bytes(-len(found) % 8)
    assert found, (path, names)
    return found


def nv(*fixtures: str) -> bytes:
    return b"".join(sections(FIXTURES / f"lib{name}.so", ".nv_fatbin") for name in fixtures)


def by_arch(code: bytes, times: int) -> bytes:
    """The elements of all regions, in regions of one arch each: unused ones in long rows."""
    rows: list[tuple[int, bytes]] = []
    at = code.find(b"\x50\xed\x55\xba")
    while at >= 0:
        (size,) = struct.unpack_from("<Q", code, at + 8)
        place, end = at + 16, at + 16 + size
        while place < end:
            header, payload = struct.unpack_from("<IQ", code, place + 4)
            (arch,) = struct.unpack_from("<I", code, place + 28)
            rows.append((arch, code[place : place + header + payload]))
            place += header + payload
        at = code.find(b"\x50\xed\x55\xba", end)
    rows = sorted(rows * times, key=lambda row: row[0])
    return b"".join(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(e)) + e for _, e in rows)


def assembly(parts: dict[str, bytes], folder: Path, extra: str) -> str:
    text = ""
    for number, (name, data) in enumerate(parts.items()):
        (folder / f"{number}.bin").write_bytes(data)
        flags = "awl" if name == ".ldata" else "a"
        label = ".global gpu_start\n.hidden gpu_start\ngpu_start:\n" if number == 0 else ""
        text += f'.section {name}, "{flags}", @progbits\n.balign 8\n{label}.incbin "{number}.bin"\n'
    return text + extra + '\n.section .note.GNU-stack, "", @progbits\n'


def build(name: str, parts: dict[str, bytes], *flags: str, host: str = "", extra: str = "") -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        source = folder / ("host.cpp" if host == HOST else "host.c")
        source.write_text(host or BARE_HOST)
        (folder / "data.s").write_text(assembly(parts, folder, extra))
        compiler = "g++" if host == HOST else "gcc"
        bare = () if host == HOST else ("-nostdlib",)
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", name, source.name, "data.s"]
        command += [*bare, f"-Wl,-soname,{name}", "-Wl,--build-id=sha1", *flags]
        subprocess.run(command, cwd=folder, check=True)
        data = (folder / name).read_bytes()
    packed = lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)
    (HERE / f"{name}.xz").write_bytes(packed)
    print(f"{name:16} {len(data):10,} {len(packed):8,}")


def main() -> None:
    quickstart = sections(QUICKSTART, ".nv_fatbin")
    mixed = nv("multiarch", "cuda12", "callgraph", "suffix", "mode_none")
    relocatable = b"".join(
        sections(FIXTURES / f"lib{name}.so", "__nv_relfatbin")
        for name in ("callgraph_rdc", "rdc_linked", "pointers")
    )
    frames = sections(FIXTURES / "libframes.so", ".ldata")
    places = sections(FIXTURES / "libplaces.so", ".ldata")

    # quickstart's four regions, two with a call graph, of which the second has device functions
    # that are no part of their kernels, then what nothing uses.
    used = quickstart + nv("callgraph", "callgraph_rdc")
    build("libapp.so", {".nv_fatbin": used + mixed + by_arch(mixed, 8)}, extra=FUNCTIONS)
    build("libcxx.so", {".nv_fatbin": by_arch(mixed, 5)}, host=HOST, extra=FUNCTIONS + DEBUG)
    relr = "-Wl,-z,pack-relative-relocs"
    build("librelr.so", {".nv_fatbin": by_arch(mixed, 4)}, relr, host=HOST)
    build("libgold.so", {".nv_fatbin": by_arch(mixed, 4) + mixed}, "-fuse-ld=gold", extra=DEBUG)
    rdc = nv("callgraph_rdc", "rdc_linked")
    relocatable = by_arch(relocatable, 12) + relocatable
    build("librdc.so", {".nv_fatbin": by_arch(rdc, 8), "__nv_relfatbin": relocatable})
    build("libldata.so", {".nv_fatbin": by_arch(mixed, 5), ".ldata": (frames + places) * 40})
    build(
        "liblarge.so",
        {".nv_fatbin": by_arch(mixed, 9)},
        "-Wl,-z,max-page-size=65536,-z,noseparate-code,-z,norelro,--hash-style=sysv",
    )
    cask = by_arch(nv("multiarch"), 15)
    build("libtables.so", {".rodata": by_arch(mixed, 3), ".cask_resource": cask})
    build("libold.so", {".nv_fatbin": by_arch(nv("abi7", "cuda11", "ptx_only", "lto"), 8)})
    build("libhost.so", {".rodata": b"no GPU code" * 9}, extra=FUNCTIONS + DEBUG)


if __name__ == "__main__":
    main()
