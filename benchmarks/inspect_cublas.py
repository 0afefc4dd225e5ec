"""``negativa inspect --kernels`` against the published procedure, side by side.

The published procedure: ``cuobjdump -xelf all LIB``, then ``cuobjdump -elf CUBIN`` for each
extracted file, whose symbol tables name the kernels. Ours: one command, all archs, cache off.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from measuring import print_load, run, warm_up

NEGATIVA = Path(sysconfig.get_path("scripts")) / "negativa"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("library", type=Path, help="e.g. libcublas.so.13")
    parser.add_argument("--cuobjdump", default="cuobjdump", help="default: the one on the PATH")
    parser.add_argument("--repeat", type=int, default=5, help="runs of ours (median is taken)")
    parser.add_argument(
        "--sample",
        type=int,
        metavar="N",
        help="dump only N cubins, spread over the library, and extrapolate",
    )
    parser.add_argument(
        "--output",
        choices=["pipe", "file", "null"],
        default="pipe",
        help="where the dumps go: to a reader (default), to a file, or nowhere, which is cheapest",
    )
    arguments = parser.parse_args()
    print_load()
    warm_up([arguments.library])
    command = [NEGATIVA, "inspect", "--no-cache", "--kernels", arguments.library]
    ours = sorted((run(command) for _ in range(arguments.repeat)), key=lambda c: c.wall_s)
    our_wall = statistics.median(c.wall_s for c in ours)
    our_cpu = statistics.median(c.cpu_s for c in ours)
    print(f"negativa inspect --kernels, median of {arguments.repeat}:")
    print(f"  {ours[len(ours) // 2]}")

    published = published_procedure(
        arguments.cuobjdump, arguments.library, arguments.output, arguments.sample
    )
    print(published.text)
    wall, cpu = published.wall_s, published.cpu_s
    print(f"ours:                {our_wall:.2f} s wall, {our_cpu:.2f} s CPU")
    print(f"ratio: {wall / our_wall:.1f} by wall time, {cpu / our_cpu:.1f} by CPU time")


@dataclass(frozen=True)
class Published:
    """What the published procedure costs, and how that came about."""

    wall_s: float
    cpu_s: float
    text: str


def published_procedure(
    cuobjdump: str, library: Path, output: str = "null", sample: int | None = None
) -> Published:
    """Run it once.

    Args:
        cuobjdump: the command.
        library: whose cubins are extracted and dumped.
        output: where the dumps go: "pipe", "file" or "null".
        sample: how many cubins to dump; the rest is extrapolated. None: all.
    """
    with tempfile.TemporaryDirectory() as folder:
        extract = run([cuobjdump, "-xelf", "all", library.resolve()], Path(folder))
        cubins = sorted(Path(folder).iterdir())
        chosen = cubins
        if sample is not None and sample < len(cubins):
            chosen = [cubins[int(i * len(cubins) / sample)] for i in range(sample)]
        dumps = [dump(cuobjdump, cubin, output) for cubin in chosen]
    factor = len(cubins) / len(chosen)
    wall = sum(wall for wall, _ in dumps) * factor
    cpu = sum(cpu for _, cpu in dumps) * factor
    note = "" if factor == 1 else f", EXTRAPOLATED from {len(chosen)} of them"
    text = (
        f"cuobjdump -xelf all:\n  {extract}\n"
        f"cuobjdump -elf for each of {len(cubins):,} cubins{note}:\n"
        f"  {wall:7.2f} s wall, {cpu:7.2f} s CPU\n"
        f"published procedure: {wall + extract.wall_s:.2f} s wall, {cpu + extract.cpu_s:.2f} s CPU"
    )
    return Published(wall + extract.wall_s, cpu + extract.cpu_s, text)


def dump(cuobjdump: str, cubin: Path, output: str) -> tuple[float, float]:
    """Wall and CPU seconds of one dump."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    with tempfile.TemporaryFile() if output == "file" else Path(os.devnull).open("wb") as sink:
        target = subprocess.PIPE if output == "pipe" else sink
        subprocess.run(
            [cuobjdump, "-elf", cubin], check=True, stdout=target, stderr=subprocess.DEVNULL
        )
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, cpu


if __name__ == "__main__":
    main()
