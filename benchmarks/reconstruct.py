"""Writing all copies of a run beside ``cp`` of the same files to the same file system.

Takes the plans of a traced run (``.negativa/RUN``), whose libraries must still be there. The
originals are in the page cache, for both; the two take turns, each into an empty folder, and
what the one left to be written to the disk is written (``sync``) before the other starts. Shown
with and without that: without, both write to memory. Also the second look, at copies that are
there.

Run: python benchmarks/reconstruct.py RUN_FOLDER [--runs 5] [--to FOLDER]
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from measuring import print_load, warm_up

from pytest_negativa.rewriting.reconstruct import reconstruct
from pytest_negativa.storage.results import load_planned
from pytest_negativa.storage.runs import Run


def _timed(task: Callable[[], object]) -> tuple[float, float]:
    """Seconds until the call is back, and until the disk has what it wrote."""
    start = time.perf_counter()
    task()
    back = time.perf_counter() - start
    os.sync()
    return back, time.perf_counter() - start


def _copy(paths: list[Path], folder: Path) -> None:
    # By number: libraries of different folders may share a name.
    for number, path in enumerate(paths):
        subprocess.run(["cp", path, folder / str(number)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", type=Path, help="folder of a traced run")
    parser.add_argument("--runs", type=int, default=5, help="of each (default: 5)")
    parser.add_argument("--to", type=Path, help="folder on the file system to write to")
    parser.add_argument("--jobs", type=int, help="libraries at a time")
    arguments = parser.parse_args()
    print_load()
    planned = load_planned(Run(arguments.run))
    paths = [Path(p.plan.library.path) for p in planned if p.plan.unused_bytes]
    warm_up(paths)
    unused = sum(p.plan.unused_bytes for p in planned)
    print(
        f"{len(paths)} libraries, {sum(p.stat().st_size for p in paths) / 1e6:,.0f} MB, "
        f"of which unused {unused / 1e6:,.0f} MB"
    )
    times: dict[str, list[tuple[float, float]]] = {"cp": [], "copies": [], "again": []}
    for _ in range(arguments.runs):
        with tempfile.TemporaryDirectory(dir=arguments.to) as name:
            os.sync()
            times["cp"].append(_timed(lambda n=name: _copy(paths, Path(n))))  # type: ignore[misc]
            shutil.rmtree(name)
            root = Path(name, "root")
            root.mkdir(parents=True)
            os.sync()
            for kind in ("copies", "again"):
                times[kind].append(
                    _timed(lambda r=root: reconstruct(planned, r, jobs=arguments.jobs))  # type: ignore[misc]
                )
    medians = {}
    for kind, figures in times.items():
        back, synced = (statistics.median(column) for column in zip(*figures, strict=True))
        medians[kind] = back, synced
        print(
            f"{kind:7} {back:6.2f} s to memory (min {min(f[0] for f in figures):.2f}), "
            f"{synced:6.2f} s to the disk (min {min(f[1] for f in figures):.2f})"
        )
    ratios = [ours / theirs for ours, theirs in zip(medians["copies"], medians["cp"], strict=True)]
    print(f"copies take {ratios[0]:.2f} times as long as cp to memory, {ratios[1]:.2f} to the disk")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"peak RSS {peak / 1e3:,.0f} MB, maps included")


if __name__ == "__main__":
    main()
