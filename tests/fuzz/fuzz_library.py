"""Coverage-guided fuzzing of the readers with atheris; run by hand, from the repository's root.

atheris is no dependency of the tests, since it has no wheel for every Python. To run it::

    python3.11 -m venv fuzz-env
    fuzz-env/bin/pip install atheris -e .
    fuzz-env/bin/python -m tests.fuzz.fuzz_library library fuzz-corpus/library \
        -max_total_time=600 -timeout=10 -rss_limit_mb=2048

The first argument is a target: ``library`` (whole files), ``region``, ``frame``, ``cubin``,
``ptx`` or ``unpack``. The second is the folder of its corpus, seeded if it is empty. The rest
goes to libFuzzer. A crash, a time-out or too much memory leaves the input in a file of the
working directory; what it shows belongs into a regression test.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import atheris  # type: ignore[import-untyped,import-not-found,unused-ignore]

with atheris.instrument_imports(include=["pytest_negativa", "elftools"]):
    from pytest_negativa.errors import FormatError
    from pytest_negativa.gpucode.cubin import parse_cubin
    from pytest_negativa.gpucode.fatbin import RegionFault, WalkBudget, parse_region
    from pytest_negativa.gpucode.frames import parse_frame
    from pytest_negativa.gpucode.library import read_library
    from pytest_negativa.gpucode.names import NameTable
    from pytest_negativa.gpucode.payload import PayloadError, unpack
    from pytest_negativa.gpucode.ptx import parse_ptx
    from pytest_negativa.gpucode.source import ByteSource
    from pytest_negativa.models.library import Compression, Scope

from tests.support import builders
from tests.support.invariants import check_map
from tests.support.libraries import BIN

_SCRATCH = Path(tempfile.mkdtemp(prefix="negativa-fuzz-")) / "input"


def _library(data: bytes) -> None:
    _SCRATCH.write_bytes(data)
    try:
        library_map = read_library(_SCRATCH, Scope())
    except FormatError:
        return
    check_map(library_map)


def _region(data: bytes) -> None:
    _SCRATCH.write_bytes(data)
    with ByteSource(_SCRATCH) as source, contextlib.suppress(RegionFault, FormatError):
        parse_region(source, 0, len(data), WalkBudget(source.path, len(data)))


def _frame(data: bytes) -> None:
    _SCRATCH.write_bytes(data)
    with ByteSource(_SCRATCH) as source, contextlib.suppress(FormatError):
        parse_frame(source, 0, len(data), WalkBudget(source.path, len(data)))


def _cubin(data: bytes) -> None:
    with contextlib.suppress(PayloadError):
        parse_cubin(data, NameTable(), digest=True)


def _ptx(data: bytes) -> None:
    with contextlib.suppress(PayloadError):
        parse_ptx(data, NameTable())


def _unpack(data: bytes) -> None:
    compression = list(Compression)[data[0] % len(Compression)] if data else Compression.NONE
    promised = int.from_bytes(data[1:6], "little")
    try:
        content = unpack(data[6:], compression, promised)
    except PayloadError:
        return
    assert compression is Compression.NONE or len(content) == promised


_TARGETS: dict[str, Callable[[bytes], None]] = {
    "library": _library,
    "region": _region,
    "frame": _frame,
    "cubin": _cubin,
    "ptx": _ptx,
    "unpack": _unpack,
}


def _small_cubin() -> bytes:
    return builders.build_cubin(
        builders.CubinSpec(
            kernels={"kernel": bytes(16)},
            device_functions={"function": bytes(16)},
            externals=["vprintf"],
            global_data={"global": 4},
            constant_data={"constant": 8},
            calls=[("kernel", "function"), ("kernel", "vprintf")],
            references=[("kernel", "function")],
            address_taken=[("function", "#ii")],
            indirect_calls=[("kernel", "#ii")],
        )
    ).data


def _iter_regions() -> Iterator[bytes]:
    for flags in (0, builders.LZ4, builders.ZSTD):
        yield builders.build_region(
            [
                builders.ElementSpec(
                    content=_small_cubin(), flags=0x11 | flags, identifier=b"a.cu"
                ),
                builders.ElementSpec(
                    content=builders.build_ptx(functions=["function"], global_data=["global"]),
                    kind=builders.PTX,
                    flags=0x11 | flags,
                    options=b"-O3",
                ),
                builders.ElementSpec(
                    content=b"BC\xc0\xde", kind=builders.LTO_IR, flags=0x11 | flags
                ),
            ]
        )


def _iter_seeds(target: str) -> Iterator[bytes]:
    frame = builders.zstd_frame(_small_cubin(), checksum=True)
    if target == "library":
        for region in _iter_regions():
            yield builders.build_host(
                [
                    *builders.soname_sections("libseed.so", 0),
                    builders.build_id_note(bytes(range(20))),
                    builders.fatbin_section(region),
                    builders.fatbin_section(region, name=".rodata"),
                    builders.HostSection(name=".ldata", data=frame),
                ]
            ).data
        for path in BIN.iterdir():
            if path.stat().st_size < 11_000:
                yield path.read_bytes()
    elif target == "region":
        yield from _iter_regions()
    elif target == "frame":
        yield frame
        cubin = _small_cubin()
        yield builders.build_frame([builders.Block(0, cubin)], len(cubin))
        blocks = [builders.Block(0, cubin), builders.Block(1, b"\0", 1000)]
        yield builders.build_frame(blocks, len(cubin) + 1000)
    elif target == "cubin":
        yield _small_cubin()
        for path in BIN.glob("*.cubin"):
            yield path.read_bytes()
    elif target == "ptx":
        yield builders.build_ptx(functions=["function"], global_data=["global"])
    elif target == "unpack":
        for number, flags in enumerate((0, builders.LZ4, builders.ZSTD)):
            content = builders.build_ptx()
            head = bytes((number,)) + len(content).to_bytes(5, "little")
            yield head + builders.pack(content, flags)


def main() -> None:
    target, corpus = sys.argv[1], Path(sys.argv[2])
    corpus.mkdir(parents=True, exist_ok=True)
    if not any(corpus.iterdir()):
        for number, seed in enumerate(_iter_seeds(target)):
            (corpus / f"seed-{number}").write_bytes(seed)
    atheris.Setup([sys.argv[0], str(corpus), *sys.argv[3:]], _TARGETS[target])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
