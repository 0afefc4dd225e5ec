"""Wheels of other projects: ``inspect`` counts what a reader counts that shares no code with it.

They were chosen to stress a reader: CUDA 10.2 to 13, other places of GPU code, other headers. One
at a time is downloaded, unpacked and deleted. ``pytest -m wheels -rP`` prints the table's rows.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.libraries import NEGATIVA
from tests.support.scanner import scan
from tests.support.wheels import unpack_wheel

pytestmark = pytest.mark.wheels

MB = 1_000_000

# A process's peak begins with that of the process that started it: a small one.
MEASURE = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime, used.ru_maxrss, file=sys.stderr)
"""


@dataclass(frozen=True)
class Wheel:
    """A pinned wheel, and what it holds.

    Args:
        disk: MB of the wheel and its unpacked ELF files together, at most.
        libraries: its ELF files with GPU code.
        elements: in all of them together.
    """

    version: str
    disk: int
    libraries: int
    elements: int


WHEELS = {
    "bitsandbytes": Wheel("0.50.2", 200, 7, 392),
    "catboost": Wheel("1.2.10", 400, 1, 836),
    "cupy-cuda11x": Wheel("13.6.0", 400, 3, 39),
    "cupy-cuda12x": Wheel("14.2.0", 500, 3, 39),
    "faiss-gpu-cu12": Wheel("1.14.1.post1", 250, 1, 364),
    "mxnet-cu102": Wheel("1.9.1", 1600, 1, 990),
    "nvidia-nvshmem-cu12": Wheel("3.8.0", 400, 1, 196),
    "onnxruntime-gpu": Wheel("1.31.1", 700, 1, 2_172),
    "paddlepaddle-gpu": Wheel("2.6.2", 4000, 5, 4_211),
    "quadrants": Wheel("1.3.3", 200, 1, 15),
    "sgl-kernel": Wheel("0.3.21", 2200, 12, 1_502),
    "spconv-cu118": Wheel("2.3.8", 400, 1, 4_077),
    "tensorflow": Wheel("2.21.0", 2200, 4, 7_725),
    "torch": Wheel("2.15.0", 2000, 3, 3_244),
    "vllm": Wheel("0.33.0", 1500, 9, 1_171),
    "warp-lang": Wheel("1.19.0", 500, 1, 118),
    "xformers": Wheel("0.0.35", 50, 1, 44),
    "xgboost": Wheel("3.2.0", 500, 1, 520),
}


@pytest.fixture(params=WHEELS)
def unpacked(
    request: pytest.FixtureRequest, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, list[Path]]]:
    """The name of a wheel and its ELF files; one wheel at a time, on all workers together."""
    name: str = request.param
    wheel = WHEELS[name]
    free = shutil.disk_usage(tmp_path).free / MB
    if free < 2 * wheel.disk:
        pytest.fail(f"{name} needs {wheel.disk} MB in {tmp_path}, of {free:.0f} MB half at most")
    with (tmp_path_factory.getbasetemp().parent / "wheels.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield name, unpack_wheel(f"{name}=={wheel.version}", tmp_path)
        finally:
            shutil.rmtree(tmp_path)


def inspect(libraries: list[Path]) -> tuple[dict[str, Any], float, float]:
    """What ``negativa inspect`` says of each library; its CPU seconds and peak memory in MB."""
    command: list[str | Path] = [
        NEGATIVA,
        "inspect",
        "--json",
        "--no-cache",
        "--jobs=1",
        *libraries,
    ]
    done = subprocess.run(
        [sys.executable, "-S", "-c", MEASURE, *command], capture_output=True, check=True, text=True
    )
    seconds, kilobytes = done.stderr.split()
    summaries = {
        entry["summary"]["path"]: entry["summary"] for entry in json.loads(done.stdout)["libraries"]
    }
    return summaries, float(seconds), int(kilobytes) * 1024 / MB


def as_scanned(summary: dict[str, Any]) -> tuple[int, int, Counter[tuple[str, str]], int]:
    counts = Counter({(row["arch"], row["kind"]): row["elements"] for row in summary["code"]})
    frames = sum(count for (_, kind), count in counts.items() if kind == "frame")
    elements = Counter({key: n for key, n in counts.items() if key[1] != "frame"})
    regions = sum(section["regions"] for section in summary["sections"])
    return regions, frames, elements, summary["kernels"]


def test_counts_are_those_of_an_independent_reader(unpacked: tuple[str, list[Path]]) -> None:
    name, libraries = unpacked
    summaries, seconds, megabytes = inspect(libraries)

    scanned = {str(path): scan(path) for path in libraries}
    with_code = {path: s for path, s in scanned.items() if s.regions or s.frames}
    total = sum((s.elements for s in with_code.values()), Counter[tuple[str, str]]())
    kernels: set[str] = set().union(*(s.kernels for s in with_code.values()))
    ours = sum((as_scanned(s)[2] for s in summaries.values()), Counter[tuple[str, str]]())
    print(
        f"| {name} {WHEELS[name].version} | {len(with_code)} | {ours.total():,} | "
        f"{total.total():,} | {sum(s.frames for s in with_code.values())} | {len(kernels):,} | "
        f"{sum(p.stat().st_size for p in libraries) / MB:,.0f} MB | {seconds:.1f} s | "
        f"{megabytes:,.0f} MB |"
    )
    assert {path for path, summary in summaries.items() if summary["sections"]} == {*with_code}
    for path, theirs in scanned.items():
        expected = (theirs.regions, theirs.frames, theirs.elements, len(theirs.kernels))
        assert as_scanned(summaries[path]) == expected, path
    assert (len(with_code), total.total()) == (WHEELS[name].libraries, WHEELS[name].elements)
