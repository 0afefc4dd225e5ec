"""``negativa inspect`` of many libraries, for one arch with kernel names, beside the floor.

The floor is what no reader can go below: every container read once, and what a device of the
arch loads unpacked. It is measured in the same run, over the spans that the map gives, in one
process and in two. Also the second look, with maps from the cache.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import sysconfig
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import lz4.block
import zstandard
from measuring import Cost, measure, print_load, run, warm_up

from pytest_negativa.arch import ComputeCapability, ElementKind
from pytest_negativa.gpucode.files import read_tables
from pytest_negativa.gpucode.library import map_library
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.installed.libraries import find_libraries
from pytest_negativa.models.library import Compression, Scope

NEGATIVA = Path(sysconfig.get_path("scripts")) / "negativa"


@dataclass(frozen=True)
class Work:
    """What the floor does with one library: spans to read, and of these what to unpack."""

    path: Path
    containers: list[tuple[int, int]]
    packed: list[tuple[int, int, Compression, int]]

    @property
    def cost(self) -> int:
        return sum(end - start for start, end in self.containers) + sum(p[3] for p in self.packed)


def work_of(path: Path, device: ComputeCapability | None) -> Work:
    """The work for what a device loads; None: for all code."""
    with ByteSource(path) as source:
        library_map = map_library(source, read_tables(source), Scope(headers_only=True))
    work = Work(path, [], [])
    work.containers.extend((r.span.start, r.span.end) for r in library_map.iter_regions())
    work.containers.extend((f.span.start, f.span.end) for f in library_map.iter_frames())
    loaded = library_map.loaded_starts([device] if device else [])
    work.packed.extend(
        (block.payload.start, block.stored_size, block.compression, block.unpacked_size)
        for block in library_map.iter_code()
        if (device is None or block.payload.start in loaded)
        and block.kind is not ElementKind.LTO_IR
    )
    work.packed.sort()
    return work


def do(work: Work) -> None:
    unpacker = zstandard.ZstdDecompressor()
    fd = os.open(work.path, os.O_RDONLY)
    packed = iter([*work.packed, (1 << 62, 0, Compression.NONE, 0)])
    start, size, compression, unpacked_size = next(packed)
    for container_start, container_end in sorted(work.containers):
        data = memoryview(os.pread(fd, container_end - container_start, container_start))
        while start < container_end:
            payload = data[start - container_start : start - container_start + size]
            if compression is Compression.ZSTD:
                unpacker.decompress(payload, max_output_size=unpacked_size)
            elif compression is Compression.LZ4:
                lz4.block.decompress(payload, uncompressed_size=unpacked_size)
            start, size, compression, unpacked_size = next(packed)
    os.close(fd)


def do_all(works: list[Work]) -> None:
    for work in works:
        do(work)


def in_processes(works: list[Work], jobs: int) -> tuple[float, float]:
    def children_cpu() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before, start = children_cpu(), time.perf_counter()
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("fork")) as pool:
        list(pool.map(do, works))
    return time.perf_counter() - start, children_cpu() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("libraries", nargs="+", help="files, folders or distributions")
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3, help="the best of N is shown")
    arguments = parser.parse_args()
    device = ComputeCapability.parse(arguments.arch)
    print_load()

    paths = sorted({p for name in arguments.libraries for p in find_libraries(name).paths})
    warm_up(paths)
    works = [work_of(path, device) for path in paths]
    works.sort(key=lambda work: -work.cost)
    print(
        f"{len(paths):,} ELF files, {sum(p.stat().st_size for p in paths) / 1e6:,.0f} MB; "
        f"containers {sum(e - s for w in works for s, e in w.containers) / 1e6:,.0f} MB; "
        f"unpacked for {arguments.arch} "
        f"{sum(p[3] for w in works for p in w.packed) / 1e6:,.0f} MB"
    )
    base = [str(NEGATIVA), "inspect", f"--jobs={arguments.jobs}", f"--arch={arguments.arch}"]
    runs: dict[str, list[Cost]] = {}
    floors: dict[str, list[tuple[float, float]]] = {}
    for _ in range(arguments.repeat):
        # Contenders take turns, so that a busy spell hits all of them.
        floors.setdefault("floor, 1 process", []).append(measure(lambda: do_all(works)))
        name = f"floor, {arguments.jobs} processes"
        floors.setdefault(name, []).append(in_processes(works, arguments.jobs))
        for details in ([], ["--kernels"]):
            with tempfile.TemporaryDirectory() as cache:
                for look in ("first look", "second look"):
                    cost = run(
                        [*base, *details, *arguments.libraries],
                        environment={"NEGATIVA_CACHE_DIR": cache},
                    )
                    runs.setdefault(" ".join([look, *details]), []).append(cost)
    for name, figures in floors.items():
        wall, cpu = min(figures)
        print(f"{name:24} {wall:7.2f} s wall, {cpu:7.2f} s CPU")
    alone_cpu = min(cpu for _, cpu in floors["floor, 1 process"])
    floor_wall = min(floors[f"floor, {arguments.jobs} processes"])[0]
    for name, costs in runs.items():
        best = min(costs, key=lambda c: c.wall_s)
        print(f"{name:24} {best}")
        print(
            f"{'':24} {best.wall_s / floor_wall:7.2f} times the floor by wall time, "
            f"{best.cpu_s / alone_cpu:.2f} by CPU time"
        )


if __name__ == "__main__":
    main()
