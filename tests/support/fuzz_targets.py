"""What is fuzzed: a reader of each kind of input, and inputs to begin with.

A target takes any bytes and returns; an exception other than the reader's own error is a fault of
the reader. ``fuzz_readers`` searches for such bytes, and ``test_corpus`` tries those that it found.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from pytest_negativa.errors import FormatError, OptionError, StoreError
from pytest_negativa.gpucode.cubin import parse_cubin
from pytest_negativa.gpucode.fatbin import RegionFault, WalkBudget, parse_region
from pytest_negativa.gpucode.files import read_tables
from pytest_negativa.gpucode.library import map_library
from pytest_negativa.gpucode.names import NameTable
from pytest_negativa.gpucode.payload import PayloadError, unpack
from pytest_negativa.gpucode.ptx import parse_ptx
from pytest_negativa.gpucode.scan import parse_frame
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.library import Compression, Scope
from pytest_negativa.processes.redirect import read_logs
from pytest_negativa.settings.file import load_config
from pytest_negativa.settings.resolve import resolve
from pytest_negativa.slimming.manifest import load_manifest
from pytest_negativa.slimming.tree import MANIFEST_NAME
from pytest_negativa.storage.lockfile import decode_lock, encode_lock
from pytest_negativa.storage.outcomes import read_outcomes
from pytest_negativa.tracing.merge import merge_traces
from tests.support import builders
from tests.support.invariants import check_map
from tests.support.libraries import BIN, QUICKSTART, TESTS, TRACES

_FOLDER = Path(tempfile.mkdtemp(prefix="negativa-fuzz-"))
_SCRATCH = _FOLDER / "input"


def _library(data: bytes) -> None:
    _SCRATCH.write_bytes(data)
    try:
        with ByteSource(_SCRATCH) as source:
            library_map = map_library(source, read_tables(source), Scope())
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


def _trace(data: bytes) -> None:
    _SCRATCH.write_bytes(data)
    merge_traces([_SCRATCH])


def _outcomes(data: bytes) -> None:
    _SCRATCH.write_bytes(data)
    with contextlib.suppress(StoreError):
        read_outcomes(_SCRATCH)


def _lock(data: bytes) -> None:
    try:
        lock = decode_lock(data, "negativa.lock")
    except StoreError:
        return
    assert decode_lock(encode_lock(lock), "negativa.lock") == lock


def _config(data: bytes) -> None:
    _SCRATCH.write_bytes(data)
    try:
        config = load_config(_SCRATCH)
    except OptionError:
        return
    resolve({}, {}, config, root=_FOLDER)


def _log(data: bytes) -> None:
    folder = _FOLDER / "logs"
    folder.mkdir(exist_ok=True)
    (folder / "1.2.3.log").write_bytes(data)
    (process,) = read_logs(folder)
    assert process.problems or process.pid >= 0


def _manifest(data: bytes) -> None:
    (_FOLDER / MANIFEST_NAME).write_bytes(data)
    with contextlib.suppress(StoreError):
        load_manifest(_FOLDER)


TARGETS: Mapping[str, Callable[[bytes], None]] = {
    "library": _library,
    "region": _region,
    "frame": _frame,
    "cubin": _cubin,
    "ptx": _ptx,
    "unpack": _unpack,
    "trace": _trace,
    "outcomes": _outcomes,
    "lock": _lock,
    "config": _config,
    "log": _log,
    "manifest": _manifest,
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


def iter_seeds(target: str) -> Iterator[bytes]:
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
    elif target == "trace":
        for path in (*TRACES.rglob("*.jsonl"), *QUICKSTART.rglob("*.jsonl")):
            if path.stat().st_size < 64_000:
                yield path.read_bytes()
    yield from (path.read_bytes() for path in corpus(target))


def corpus(target: str) -> tuple[Path, ...]:
    """The inputs of a target that are kept: files to begin with, and those that showed a fault."""
    return tuple(sorted((TESTS / "fuzz" / "corpus" / target).glob("*")))
