"""Driver calls as CUPTI would show them, over real memory of this process; run as a program.

``scenario.py python|native FOLDER FATBIN`` feeds the same calls to one of the two detectors.
What lies at each address is real: the file FATBIN mapped, cubin and PTX on the heap, wrappers.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path

from pytest_negativa.models.trace import Context, Phase, Role
from pytest_negativa.storage.runs import Run
from pytest_negativa.tracing.cupti import CuptiDetector
from pytest_negativa.tracing.start import make_header
from pytest_negativa.tracing.trace_files import TraceWriter

Call = Callable[..., None]
PTX = b"// a comment\n.version 8.0\n.target sm_80\n.visible .entry k() { ret; }\n"
RUN_ID = "run-1"
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")  # Elf64_Ehdr
_SECTION = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr


class CallbackData(ctypes.Structure):
    """The members of CUpti_CallbackData that are read."""

    _fields_ = [
        ("site", ctypes.c_int),
        ("name", ctypes.c_void_p),
        ("params", ctypes.c_void_p),
        ("result", ctypes.c_void_p),
    ]


class Pointer:
    """What cupti-python hands to a callback, as far as it is used."""

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


def python_call(detector: CuptiDetector) -> Call:
    def call(cbid: int, *slots: int, result: int = 0) -> None:
        params = (ctypes.c_uint64 * len(slots))(*slots)
        code = ctypes.c_int(result)
        for site in (0, 1):
            data = CallbackData(site, 0, ctypes.addressof(params), ctypes.addressof(code))
            detector._on_call(None, 1, cbid, Pointer(ctypes.addressof(data)))

    return call


def native_call(library: ctypes.CDLL) -> Call:
    def call(cbid: int, *slots: int, result: int = 0) -> None:
        library.negativa_test_call(cbid, (ctypes.c_uint64 * 8)(*slots), result)

    return call


def tables_first(cubin: bytes) -> bytes:
    """A cubin with the section headers before the sections, without program headers."""
    header = list(_HEADER.unpack_from(cubin))
    start, size, count = header[6], header[11], header[12]
    table = b"".join(
        _SECTION.pack(*fields[:4], fields[4] + size * count, *fields[5:])
        for fields in _SECTION.iter_unpack(cubin[start : start + size * count])
    )
    # e_phoff, e_shoff, e_phnum
    header[5], header[6], header[10] = 0, _HEADER.size, 0
    return _HEADER.pack(*header) + table + cubin[_HEADER.size : start]


def play(call: Call, fatbin: Path) -> None:
    """The calls. Strings and images must live as long as they are pointed to."""
    keep: list[object] = []

    def text(value: bytes) -> int:
        buffer = ctypes.create_string_buffer(value)
        keep.append(buffer)
        return ctypes.addressof(buffer)

    def handle(value: int) -> int:
        number = ctypes.c_uint64(value)
        keep.append(number)
        return ctypes.addressof(number)

    with fatbin.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    keep.append(mapped)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    cubin = fatbin.with_name("kernels.sm_90.cubin").read_bytes()

    # A fatbin of a file, behind a wrapper on the heap, of both versions.
    wrapper = (ctypes.c_uint64 * 3)(0x466243B1 | 1 << 32, address, 0)
    linked_from = (ctypes.c_uint64 * 2)(address, 0)
    wrapper2 = (ctypes.c_uint64 * 3)(0x466243B1 | 2 << 32, address, ctypes.addressof(linked_from))
    call(678, handle(0x1000), ctypes.addressof(wrapper2))
    for _ in range(3):
        call(681, 0, 0x1000, text(b"_Z1kv"))
    call(681, 0, 0x1000, text(b"no such kernel"), result=500)
    call(684, 0, 0, 0x1000, text(b"variable"))
    call(685, 0, 0, 0x1000, text(b"managed"))
    call(678, handle(0x1100), ctypes.addressof(wrapper))
    # The bare fatbin, then a handle that the driver gives again to another image.
    call(19, handle(0x2000), address)
    call(23, 0, 0x2000, text(b"from module"))
    call(22, 0x2000)
    call(19, handle(0x2000), text(PTX))
    call(23, 0, 0x2000, text(b"k"))
    # The same name at another address, and another name at the same.
    name = ctypes.create_string_buffer(b"first")
    for value in (b"first", b"other"):
        name.value = value
        call(23, 0, 0x2000, ctypes.addressof(name))
    # A cubin on the heap, enumerated; its module is the library's.
    call(678, handle(0x3000), text(cubin))
    call(682, handle(0x3001), 0x3000)
    call(738, 0, 1, 0x3001)
    call(23, 0, 0x3001, text(b'\xff not utf-8 \xc3\xa9 "\\\n'))
    # One whose tables come first.
    call(678, handle(0x3100), text(tables_first(cubin)))
    call(681, 0, 0x3100, text(b"behind the tables"))
    # The linker.
    call(382, 0x4000, 1, text(PTX), len(PTX), 0)
    output = text(cubin[:100])
    call(365, 0x4000, handle(output), handle(100))
    # By file name, and one that isn't there.
    call(18, handle(0x5000), text(os.fsencode(fatbin)))
    call(23, 0, 0x5000, text(b"from file"))
    call(18, handle(0x5001), text(b"/no/such/file"))
    # Bad pointers, a handle never seen, an image of no known kind.
    call(678, handle(0x6000), 8)
    call(678, 8, address)
    call(681, 0, 0x7777, text(b"stranger"))
    call(19, handle(0x6001), text(b"neither"))
    # Calls that failed: of a library and of none, twice the same.
    for _ in range(2):
        call(678, handle(0x8000), ctypes.addressof(wrapper), result=209)
    call(678, handle(0x8000), text(b"neither"), result=200)
    call(681, 0, 0x8000, text(b"of no image"), result=400)
    call(740, 0, 1, 0x3000, result=2)


def play_files(call: Call, fatbin: Path, folder: Path) -> None:
    """Fatbins in files that are removed and replaced while they are mapped, and in none."""
    keep: list[object] = []

    def load(path: Path) -> int:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        keep.append(mapped)
        return ctypes.addressof(ctypes.c_char.from_buffer(mapped))

    def use(address: int, kernel: bytes, cbid: int = 678) -> None:
        names = ctypes.create_string_buffer(kernel), ctypes.c_uint64(0x9000 + len(keep))
        keep.append(names)
        call(cbid, ctypes.addressof(names[1]), address)
        call(681, 0, names[1].value, ctypes.addressof(names[0]))

    folder.mkdir()
    data = fatbin.read_bytes()
    seen, unseen, replaced, odd = (
        folder / name for name in ("seen", "unseen", "replaced", "odd (deleted)")
    )
    for path in (seen, unseen, replaced, odd):
        path.write_bytes(data)
    first, second, old = load(seen), load(unseen), load(replaced)
    use(first, b"a")
    seen.unlink()
    use(first, b"b", 19)
    unseen.unlink()
    use(second, b"c")
    use(old, b"d")
    (folder / "new").write_bytes(data + b"\0")
    (folder / "new").replace(replaced)
    use(load(replaced), b"e")
    use(old, b"f", 19)
    use(load(odd), b"g")
    # Memory without a file, which the kernel's mappings name like a deleted one.
    for number, kernel in ((-1, b"h"), (os.memfd_create("image"), b"i")):
        if number >= 0:
            os.truncate(number, len(data))
        shared = mmap.mmap(number, len(data), flags=mmap.MAP_SHARED)
        shared.write(data)
        keep.append(shared)
        use(ctypes.addressof(ctypes.c_char.from_buffer(shared)), kernel)


def main() -> None:
    which, folder, fatbin = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    run = Run(folder / RUN_ID)
    context = Context(phase=Phase.CALL, nodeid='t.py::t["é\n"]', detail="d")
    if which == "python":
        writer = TraceWriter(
            run.new_trace_file(),
            make_header(run, Role.SOLO, root=folder, detector="python"),
        )
        detector = CuptiDetector(writer)
        detector.set_context(context)
        play(python_call(detector), fatbin)
        play_files(python_call(detector), fatbin, folder / "files")
        if os.fork() == 0:
            detector.warn("child", "must not be in the parent's trace")
            os._exit(0)
        os.wait()
        detector.stop()
        return
    library = ctypes.CDLL(sys.argv[4])
    run.trace_dir.mkdir(parents=True)
    for name, value in (
        ("NEGATIVA_TRACE_DIR", str(run.trace_dir)),
        ("NEGATIVA_RUN_ID", RUN_ID),
        ("NEGATIVA_CUPTI", "/no/such/libcupti.so"),
    ):
        os.environ[name] = value
    assert library.InitializeInjection() == 1
    assert library.InitializeInjection() == 1
    library.negativa_context(context.phase.value.encode(), (context.nodeid or "").encode(), b"d")
    play(native_call(library), fatbin)
    play_files(native_call(library), fatbin, folder / "files")
    if os.fork() == 0:
        library.negativa_warn(b"child", b"must not be in the parent's trace", 0)
        os._exit(0)
    os.wait()


if __name__ == "__main__":
    main()
