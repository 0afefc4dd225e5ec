"""Hostile inputs for the parts in C: ``hostile.py injection|redirect|... LIBRARY FOLDER SEED``.

It runs under sanitizers, which end the process at the first bad access.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import struct
import sys
from pathlib import Path

from pytest_negativa.pages.note import MAGIC, NOTE_VERSION
from pytest_negativa.pages.page_logs import read_misses

CBIDS = (18, 19, 20, 21, 22, 23, 24, 26, 190, 241, 363, 364, 365, 382, 383, 678, 679, 680, 681, 682,
         684, 685, 738, 740)  # fmt: skip
NAMES = (b"", b"k", b"\xff\x80\0", b"\xe0\x80\x80", b"\xf0\x9f\x98", b'"\\\n\x01', b"n" * 5000)
SEARCHES = (
    (b".entry",),
    (b"\x50\xed\x55\xba",),
    (b"\x50\xed\x55\xba", b"\x28\xb5\x2f\xfd", b"\x7fELF\2\1\1"),
)
SIZES = (0, 1, 15, 63, 64, 4096, 1 << 20, (1 << 30) + 1, 1 << 40, (1 << 63) + 5, (1 << 64) - 1)


class Arena:
    """Memory that ends at a page that can't be read."""

    PAGES = 4

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        page = mmap.PAGESIZE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._map = mmap.mmap(-1, (self.PAGES + 1) * page, flags=flags)
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.end = self.start + self.PAGES * page
        assert libc.mprotect(ctypes.c_void_p(self.end), page, 0) == 0

    def put(self, data: bytes, *, at_end: bool) -> int:
        """The address of a copy; at the end, the byte after it can't be read."""
        address = self.end - len(data) if at_end else self.start
        ctypes.memmove(address, data, len(data))
        return address


def image(chance: random.Random, arena: Arena) -> bytes:
    """Something like an image, with sizes and pointers of any kind."""
    size = chance.choice(SIZES)
    pointer = chance.choice((0, 1, 8, arena.start, arena.end - 1, arena.end, (1 << 64) - 8))
    head = chance.choice(
        (
            struct.pack("<IHHQ", 0xBA55ED50, 1, chance.choice((0, 16, 65535)), size),
            struct.pack("<IIQQ", 0x466243B1, chance.choice((1, 2, 99)), pointer, pointer),
            b"\x7fELF\x02\x01".ljust(32, b"\0") + struct.pack("<QQ", size, size) + b"\xff" * 16,
            b"// .version 8.0\n.target sm_90\n",
            b".version 8.0\0\0",
            chance.randbytes(64),
        )
    )
    return head[: chance.choice((len(head), len(head), 3, 17))]


def attack_injection(path: str, folder: Path, chance: random.Random) -> None:
    library = ctypes.CDLL(path)
    os.environ["NEGATIVA_TRACE_DIR"] = str(folder)
    os.environ["NEGATIVA_RUN_ID"] = "run-1"
    os.environ["NEGATIVA_CUPTI"] = "/no/such/libcupti.so"
    os.environ["NEGATIVA_LACKS"] = "n" * chance.choice((0, 20, 106, 107, 108, 5000))
    os.environ["PYTEST_CURRENT_TEST"] = chance.choice(("", "(", " (call)", "t[\udcff] (call)"))
    assert library.InitializeInjection() == 1
    arena, others = Arena(), Arena()
    file = folder / os.fsdecode(b"odd\n\xff name \\012.so")
    for number in range(400):
        name = chance.choice(NAMES)
        wrapped = others.put(image(chance, arena), at_end=chance.random() < 0.7)
        values = (
            arena.put(image(chance, others), at_end=chance.random() < 0.7),
            others.put(name, at_end=chance.random() < 0.7) if number % 3 else wrapped,
            chance.choice(SIZES),
            0x1000 + number % 7,
        )
        slots = (ctypes.c_uint64 * 8)(*(chance.choice(values) for _ in range(8)))
        library.negativa_test_call(chance.choice(CBIDS), slots, number % 10 == 0)
        if number % 50 == 0:
            # Mapped, replaced and gone, under a name that the kernel escapes.
            file.write_bytes(image(chance, arena) * 100)
            with file.open("rb") as opened:
                arena_file = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
            address = ctypes.addressof(ctypes.c_char.from_buffer(arena_file))
            slots = (ctypes.c_uint64 * 8)(values[0], address, address, 64)
            if number % 100:
                file.unlink()
            library.negativa_test_call(678, slots, 0)
        if number % 90 == 0:
            library.negativa_context(b"call", name, None)
            library.negativa_warn(b"code", name, 1)
    file.unlink(missing_ok=True)
    if chance.random() < 0.3:
        os.closerange(3, 50)
        library.negativa_warn(b"code", b"after all descriptors were closed", 1)


class LinkMap(ctypes.Structure):
    """link.h."""

    _fields_ = [
        ("addr", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("dynamic", ctypes.c_void_p),
        ("next", ctypes.c_void_p),
        ("previous", ctypes.c_void_p),
    ]


def table(folder: Path, chance: random.Random) -> bytes:
    """A table as redirect.py writes it, then damaged."""
    originals = (folder / "lib.so", Path("/", "a" * 200, "b" * 200, "lib.so"))
    root = folder / "copies"
    rows = []
    for original in originals:
        copy = Path(f"{root}{original}")
        ids = (os.stat(path) if path.exists() else None for path in (original, copy))
        fields = [
            str(n) for s in ids for n in ((os.major(s.st_dev), os.minor(s.st_dev), s.st_ino)
                                          if s else (1, 2, 3))
        ]  # fmt: skip
        rows.append("\t".join(("library", *fields, str(copy))))
    lines = [f"negativa-redirect 1\t{root}", *rows, f"end\t{len(rows)}"]
    data = bytearray("\n".join((*lines, "")).encode())
    for _ in range(chance.choice((0, 0, 1, 3))):
        place = chance.randrange(len(data))
        data[place : place + chance.choice((0, 1, 9))] = chance.choice(
            (
                b"",
                b"\t",
                b"\n",
                b"\0",
                b"9" * 30,
                b"/",
                b"\xff",
                b"library\t1\t2\t3\t4\t5\t6\t/\n",
            )
        )
    return bytes(data)


def attack_redirect(path: str, folder: Path, chance: random.Random) -> None:
    library = ctypes.CDLL(path)
    library.la_objsearch.restype = ctypes.c_char_p
    original = folder / "lib.so"
    copy = Path(f"{folder / 'copies'}{original}")
    copy.parent.mkdir(parents=True)
    for target in (original, copy):
        target.write_bytes(b"\x7fELF")
    (folder / "link.so").symlink_to(original)
    (folder / "loop.so").symlink_to("loop.so")
    (folder / "table").write_bytes(table(folder, chance))
    os.environ["NEGATIVA_REDIRECT_TABLE"] = str(folder / "table")
    os.environ["NEGATIVA_REDIRECT_LOGS"] = chance.choice(
        (str(folder), "no/folder", "/" + "x" * 5000)
    )
    if library.la_version(chance.choice((0, 1, 2, 1 << 31))) == 0:
        return
    program = LinkMap(0, b"", None, None, None)
    own = LinkMap(0, str(copy).encode(), None, None, None)
    bad = LinkMap(0, b"relative", None, None, None)
    names = [
        os.fsencode(p)
        for p in (
            original,
            copy,
            folder / "link.so",
            folder / "loop.so",
            folder / "copies/../lib.so",
        )
    ]
    names += [b"lib.so", b"$ORIGIN/lib.so", b"${ORIGIN}/../../lib.so", b"/", b"//", b"/x/" * 2000]
    names += [os.fsencode(folder / "copies") + b"/x" * 2040, b"/" + b"y" * 4095, b"./\xff\n\\"]
    for _ in range(200):
        name = chance.choice(names) + chance.choice((b"", b"", b"/", b"/..", b"\x7f"))
        map_of = ctypes.pointer(chance.choice((program, own, bad)))
        cookie = ctypes.c_size_t(ctypes.cast(map_of, ctypes.c_void_p).value or 0)
        found = library.la_objsearch(name, ctypes.byref(cookie), chance.choice((1, 2, 4, 8, 64)))
        assert found
        opened = LinkMap(0, name, chance.choice((None, id(names), 8)), None, None)
        library.la_objopen(ctypes.byref(opened), 0, ctypes.byref(cookie))


def attack_first_result(path: str, folder: Path, chance: random.Random) -> None:
    os.environ["NEGATIVA_FIRST_RESULT"] = str(
        folder / chance.choice(("mark", "no/folder", "x" * 300))
    )
    library = ctypes.CDLL(path)
    library.la_symbind64.restype = ctypes.c_size_t
    library.la_version(2)
    returns = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0)
    cookie = ctypes.c_size_t(1)
    for number in range(200):
        name = chance.choice((b"cuLaunchKernel", b"cuGetProcAddress", b"cuStreamQuery", b"", b"cu"))
        name += chance.choice((b"", b"_v2", b"_ptsz", b"_v2_ptds", b"x"))
        opened = LinkMap(0, chance.choice((b"", b"/", b"libcuda.so", b"/x/libcuda.so.1")))
        library.la_objopen(ctypes.byref(opened), 0, ctypes.byref(cookie))
        real = (ctypes.cast(returns, ctypes.c_void_p).value or 0) + number % 9
        symbol = (ctypes.c_uint64 * 3)(0, real, 0)
        found = library.la_symbind64(
            symbol, 0, ctypes.byref(cookie), ctypes.byref(cookie), symbol, name
        )
        assert found


def attack_search(path: str, folder: Path, chance: random.Random) -> None:
    arena = Arena()
    words = (b".", b".entry", b".func", b".global", b".const", b" ", b"\t", b"\0", b".entr", b"x",
             b"\x50\xed\x55\xba", b"\x28\xb5\x2f\xfd", b"\x7fELF\2\1\1", b"\x50\xed",
             b"\x7fELF")  # fmt: skip
    for _ in range(200):
        find, search = ctypes.CDLL(path).negativa_find, chance.choice(SEARCHES)
        find.restype = ctypes.c_ssize_t
        text = b"".join(chance.choices(words, k=chance.randrange(20)))
        size, start = len(text), chance.randrange(len(text) + 2)
        address = arena.put(text, at_end=True)
        found = find(
            *(ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_size_t(start)),
            *((ctypes.c_char_p * len(search))(*search), ctypes.c_size_t(len(search))),
            ctypes.c_bool(chance.random() < 0.5),
        )
        assert found == -1 or start <= found < size


def elf_library(folder: Path, chance: random.Random) -> tuple[bytes, int]:
    """A library with code and unwind tables, whose sections may be damaged; its first address."""
    page, base = mmap.PAGESIZE, chance.choice((0, 0, 0x40_0000))
    names = b"\0.text\0.plt\0.eh_frame\0.init\0.shstrtab\0.nv_fatbin\0.ldata\0"
    size = 8 * page
    # Headers; code; unwind tables; data: type, flags, offset, address, in file, in memory.
    loads = [
        (1, 4, 0, base, page), (1, 5, page, base + page, 4 * page),
        (1, 4, 5 * page, base + 5 * page, 2 * page), (1, 6, 7 * page, base + 7 * page, page),
    ]  # fmt: skip
    segments = b"".join(
        struct.pack("<IIQQQQQQ", kind, flags, offset, address, address, length, length, page)
        for kind, flags, offset, address, length in loads
    )
    rows = [[0] * 10]
    for name, flags, address, length in (
        (b".plt", 6, page, 64),
        (b".text", 6, page + 64, 4 * page - 64),
        (b".eh_frame", 2, 5 * page, page),
        (b".nv_fatbin", 2, 6 * page, page),
        (b".ldata", 3, 7 * page, page),
    ):
        rows.append([names.index(name), 1, flags, base + address, address, length, 0, 0, 16, 0])
    rows += [list(chance.choice(rows)) for _ in range(chance.choice((0, 0, 5, 40)))]
    rows.append([names.index(b".shstrtab"), 3, 0, 0, page - len(names), len(names), 0, 0, 1, 0])
    for _ in range(chance.choice((0, 0, 0, 1, 4))):
        chance.choice(rows)[chance.randrange(10)] = chance.choice(
            (*SIZES, base, base + page, base + 5 * page - 1, (1 << 64) - page // 2)
        )
    sections = b"".join(
        struct.pack("<IIQQQQIIQQ", *(v & ((1 << (32 if i in (0, 1, 6, 7) else 64)) - 1)
                                     for i, v in enumerate(row)))
        for row in rows
    )  # fmt: skip
    header = [b"\x7fELF\x02\x01\x01".ljust(16, b"\0"), 3, 62, 1, 0, 64, size, 0, 64, 56,
              len(loads), 64, len(rows), len(rows) - 1]  # fmt: skip
    if chance.random() < 0.3:
        field = chance.choice((5, 6, 9, 10, 11, 12, 13))
        wide = 64 if field in (5, 6) else 16
        header[field] = chance.choice((0, 1, 63, 64, 65, *SIZES)) & ((1 << wide) - 1)
    head = struct.pack("<16sHHIQQQIHHHHHH", *header) + segments
    data = bytearray(head.ljust(page - len(names), b"\0") + names)
    # `ret` everywhere.
    data += b"\xc3" * (6 * page) + (0xBA55ED50).to_bytes(4, "little").ljust(page, b"\xc3")
    return bytes(data) + sections, base


def attack_pages(path: str, folder: Path, chance: random.Random) -> None:
    logs = folder / "logs"
    logs.mkdir()
    if chance.random() < 0.9:
        (logs / "lost").write_bytes(bytes(chance.choice((4096, 4096, 100))))
    os.environ["NEGATIVA_PAGES_LOGS"] = chance.choice(
        (*(str(logs),) * 20, "relative", f"{logs}/", "/" + "x" * 5000, f"{folder}/x/{'y' * 4060}")
    )
    files = []
    for number in range(8):
        data, base = elf_library(folder, chance)
        file = folder / f"lib{number}.so"
        file.write_bytes(data)
        files.append((file, data, base))
    if chance.random() < 0.5:
        os.environ["NEGATIVA_PAGES_GPU"] = chance.choice(("", "1"))
    library = ctypes.CDLL(path)
    version = library.la_version(chance.choice((0, *(1, 2, 1 << 31) * 3)))
    assert version <= 2
    if version == 0:
        return
    opened = []
    libc = ctypes.CDLL(None)
    for file, data, base in files:
        size = 8 * mmap.PAGESIZE
        # A file that lies about its addresses leads to memory around it that can't be read.
        gap, flags = 0x40_0000 + size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, 2 * gap + size, flags=flags, prot=7)
        memory[gap : gap + size] = data[:size]
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + gap
        for around in (start - gap, start + size):
            assert libc.mprotect(ctypes.c_void_p(around), ctypes.c_size_t(gap), 0) == 0
        if chance.random() < 0.1:
            # Replaced by another library since it was mapped, or cut.
            file.write_bytes(chance.choice((*(d for _, d, _ in files), data[:5000], b"")))
        dynamic = (ctypes.c_uint64 * 4)(chance.choice((*(1,) * 8, 22, 30)), 4, 0, 0)
        name = chance.choice(
            (*(os.fsencode(file),) * 30, b"relative", b"/", b"/" + b"y" * 5000, b"\xff\n")
        )
        map_of = LinkMap(start - base, name, ctypes.addressof(dynamic))
        cookie = ctypes.c_size_t()
        library.la_objopen(ctypes.byref(map_of), 0, ctypes.byref(cookie))
        opened.append((memory, start, size, cookie, dynamic))
    for _, start, size, cookie, _ in opened:
        for _ in range(20):
            # Reading faults; the handler makes the page readable.
            assert ctypes.string_at(start + chance.randrange(size), 1) is not None
        if chance.random() < 0.5:
            library.la_objclose(ctypes.byref(cookie))
            ctypes.string_at(start, size)


def attack_holes(path: str, folder: Path, chance: random.Random) -> None:
    """Libraries with a spare whose notes are damaged; see ``spare/format.h``."""
    page, holes = mmap.PAGESIZE, 16
    os.environ["NEGATIVA_SPARE_LOG"] = str(folder / "logs")
    library, libc = ctypes.CDLL(path), ctypes.CDLL(None)
    assert library.la_version(1) == 1
    touched, kept = 0, []
    for _ in range(8):
        # Pages that can't be read, the note, its holes, and such pages again.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, (holes + 5) * page, flags=flags, prot=7)
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        rows = [[(3 + 2 * n) * page, (4 + 2 * n) * page, 9 * n * page, 1, 0] for n in range(8)]
        numbers = [NOTE_VERSION, 0, 0, 0, 120, len(rows), 120 + 32 * len(rows), 0, 0, 0]
        for _ in range(chance.choice((0, 0, 1, 3))):
            damaged = chance.choice([numbers, *rows])
            # The end of a hole is the stub's to trust: it maps the hole before anything is touched.
            field = chance.choice([i for i in range(len(damaged)) if damaged is numbers or i != 1])
            damaged[field] = chance.choice((*SIZES, 1 << 48))
        wide = [v & ((1 << (64 if i in (2, 3) else 32)) - 1) for i, v in enumerate(numbers)]
        note = struct.pack("<8sII", MAGIC, *wide[:2]) + bytes(64)
        note += struct.pack("<QQIIIIII", *wide[2:])
        for row in rows:
            note += struct.pack("<QQQII", *(v & ((1 << 64) - 1) for v in row[:3]),
                                *(v & 0xFFFF_FFFF for v in row[3:]))  # fmt: skip
        at = chance.choice((page, page, page, 2 * page - len(note), 2 * page - 8, 0, page + 4))
        memory[at : at + len(note)] = note[: len(memory) - at]
        for start, length in ((0, page), ((holes + 3) * page, 2 * page)):
            libc.mprotect(ctypes.c_void_p(base + start), ctypes.c_size_t(length), 0)
        dynamic = (ctypes.c_uint64 * 4)(0x6E65_6761, at, 0, 0)
        cookie = ctypes.c_size_t()
        map_of = LinkMap(base, b"/lib.so", ctypes.addressof(dynamic))
        library.la_objopen(ctypes.byref(map_of), 0, ctypes.byref(cookie))
        for start, end, _, _, constants in rows[: wide[5]] if cookie else ():
            # As the stub does it with what the note has now; constants come from the spare.
            armed = not constants & 0xFFFF_FFFF
            if armed and 3 * page <= start < end <= (holes + 3) * page:
                hole = ctypes.c_void_p(base + start)
                assert libc.mprotect(hole, ctypes.c_size_t(end - start), 0) == 0
                assert ctypes.string_at(base + start + chance.randrange(end - start), 1) == b"\0"
                touched += 1
        if chance.random() < 0.5:
            library.la_objclose(ctypes.byref(cookie))
        kept.append((memory, dynamic))
    logs = read_misses([folder / "logs"])
    counted = sum(miss.times for one in logs for miss in one.pages.values())
    assert counted <= touched and (counted > 0) == (touched > 0)


def main() -> None:
    part, path, base, first, count = sys.argv[1:]
    attack = {
        "injection": attack_injection,
        "redirect": attack_redirect,
        "first_result": attack_first_result,
        "search": attack_search,
        "pages": attack_pages,
        "holes": attack_holes,
    }[part]
    for seed in range(int(first), int(first) + int(count)):
        folder = Path(base, str(seed))
        folder.mkdir()
        child = os.fork()
        if child == 0:
            attack(path, folder, random.Random(seed))
            # Destructors run, too: the end of a trace is written there.
            ctypes.CDLL(None).exit(0)
        _, status = os.waitpid(child, 0)
        if status != 0:
            sys.exit(f"{part}, seed {seed}: status {status}")


if __name__ == "__main__":
    main()
