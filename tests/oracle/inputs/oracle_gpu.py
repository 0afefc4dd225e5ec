"""A GPU of the oracle's own, for sessions with ``-p oracle_gpu``.

Libraries are loaded for real. "Using" a region does what a driver would do with it: note it in the
trace, and fail if the bytes that it needs are gone. It knows the product by its hook for detectors
and by the format of trace files, and by nothing else.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

HERE = Path.cwd()
PLACES: dict[str, list[dict[str, int]]] = json.loads((HERE / "places.json").read_text())
"""By file name: of each region its ``start`` and ``size``, and its elements' payloads by arch."""
_LINE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) \S+ \d+ +(/.*)$", re.MULTILINE)
_current: OracleGpu | None = None


def _mappings() -> Iterator[tuple[int, int, int, str]]:
    """Address range, file offset and path of this process's files."""
    for start, end, offset, path in _LINE.findall(Path("/proc/self/maps").read_text()):
        yield int(start, 16), int(end, 16), int(offset, 16), path


class OracleGpu:
    """A detector, as the hook wants it."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("a")
        self.write(**{**header, "detector": "oracle"})
        self.context: object = None
        self.ids: dict[str, int] = {}
        self.seen: set[str] = set()
        self.gaps = 0

    def write(self, **record: object) -> None:
        # Never in parts, and at once: the process may be killed.
        os.write(self.file.fileno(), (json.dumps(record) + "\n").encode())

    def once(self, **record: object) -> None:
        if (key := json.dumps(record)) not in self.seen:
            self.seen.add(key)
            self.write(**record)

    def known(self, record: str, **fields: object) -> int:
        """The number of a library, context or image, which is written the first time."""
        key = json.dumps([record, fields])
        if key not in self.ids:
            self.ids[key] = len(self.ids) + 1
            more = {"time_ns": time.time_ns()} if record == "context" else {}
            self.write(record=record, id=self.ids[key], **fields, **more)
        return self.ids[key]

    def here(self) -> int:
        return self.known("context", context=self.context)

    def library(self, path: str) -> int:
        status = os.stat(path)
        fields = {"path": path, "size": status.st_size, "mtime_ns": status.st_mtime_ns}
        note = re.search(rb"\x04\0\0\0\x14\0\0\0\x03\0\0\0GNU\0(.{20})", _head(path), re.DOTALL)
        return self.known(
            "library", library={**fields, "build_id": note[1].hex() if note else None}
        )

    def start(self) -> None:
        global _current
        _current = self
        device = {"name": "Oracle", "compute_capability": "9.0", "uuid": "GPU-0"}
        versions = {"cuda_version": 13000, "driver_version": "580.1"}
        self.write(record="device", device={**device, **versions})

    def set_context(self, context: object) -> None:
        self.context = json.loads(msgspec.json.encode(context))

    def drain(self) -> None:
        for path in sorted({path for *_, path in _mappings() if path.startswith(f"{HERE}/")}):
            self.library(path)

    def pause(self, reason: str) -> None:
        self.gaps += 1
        gap = {"id": self.gaps, "why": reason, "context": self.here()}
        self.write(record="gap", **gap, time_ns=time.time_ns())

    def resume(self) -> None:
        self.write(record="gap-end", id=self.gaps, time_ns=time.time_ns())

    def warn(self, code: str, text: str, *, incomplete: bool = False) -> None:
        self.write(record="warning", code=code, text=text, incomplete=incomplete)

    def stop(self) -> None:
        if not self.file.closed:
            self.drain()
            self.write(record="end", time_ns=time.time_ns())
            self.file.close()


def _head(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(1 << 16)


def pytest_negativa_register_detector(path: Path, header: object) -> OracleGpu:
    return OracleGpu(path, json.loads(msgspec.json.encode(header)))


def load(library: Path) -> int:
    """Load a library; returns its address (``l_addr`` comes first in ``struct link_map``)."""
    return ctypes.c_size_t.from_address(ctypes.CDLL(str(library))._handle).value


def on_copy(library: Path) -> bool:
    """Whether this process has another file than the one that was named."""
    load(library)
    paths = {path for *_, path in _mappings() if Path(path).name == library.name}
    return str(library) not in paths


def whole(library: Path, region: int, arch: int = 90) -> bool:
    """Whether the code of a region for a GPU is there."""
    at = load(library) + PLACES[library.name][region][str(arch)]
    # By a load, as a driver reads: pages that are missing come back.
    return len(set(ctypes.string_at(at, 32))) > 1


def use(library: Path, region: int, *kernels: str) -> None:
    """Have the driver load a region, and look up kernels of it."""
    if not whole(library, region):
        raise RuntimeError(f"no kernel image is available in region {region}")
    place = PLACES[library.name][region]
    address = load(library) + place["start"]
    [(start, offset, path)] = [m[::2] + m[3:] for m in _mappings() if m[0] <= address < m[1]]
    if _current is None:
        return
    image = _current.known(
        "image",
        form="fatbin",
        call="cuLibraryLoadData",
        context=_current.here(),
        library=_current.library(path),
        offset=address - start + offset,
        size=place["size"],
    )
    for name in kernels:
        _current.once(record="kernel", image=image, name=name, context=_current.here())


def launch(*kernels: str, within: tuple[str, ...] = ()) -> None:
    """Launch kernels, for a microsecond each; for traces that count launches."""
    if _current is not None:
        for name in kernels:
            more = {"count": 1, "gpu_ns": 1000, "ranges": within, "context": _current.here()}
            _current.write(record="launch", name=name, **more)
