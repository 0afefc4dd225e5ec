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

    with tempfile.TemporaryDirectory() as folder:
        extract = run(
            [arguments.cuobjdump, "-xelf", "all", arguments.library.resolve()], Path(folder)
        )
        print(f"cuobjdump -xelf all:\n  {extract}")
        cubins = sorted(Path(folder).iterdir())
        chosen = cubins
        if arguments.sample is not None and arguments.sample < len(cubins):
            step = len(cubins) / arguments.sample
            chosen = [cubins[int(i * step)] for i in range(arguments.sample)]
        dumps = [dump(arguments.cuobjdump, cubin, arguments.output) for cubin in chosen]
    factor = len(cubins) / len(chosen)
    wall = sum(wall for wall, _ in dumps) * factor
    cpu = sum(cpu for _, cpu in dumps) * factor
    note = "" if factor == 1 else f", EXTRAPOLATED from {len(chosen)} of them"
    print(f"cuobjdump -elf for each of {len(cubins):,} cubins{note}:")
    print(f"  {wall:7.2f} s wall, {cpu:7.2f} s CPU")
    wall, cpu = wall + extract.wall_s, cpu + extract.cpu_s
    print(f"published procedure: {wall:.2f} s wall, {cpu:.2f} s CPU")
    print(f"ours:                {our_wall:.2f} s wall, {our_cpu:.2f} s CPU")
    print(f"ratio: {wall / our_wall:.1f} by wall time, {cpu / our_cpu:.1f} by CPU time")


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
