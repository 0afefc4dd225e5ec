"""Time from the end of the tests to the finished report, cold and with maps in the cache.

Takes the libraries of a traced run (``.negativa/RUN``) and makes its report anew: first with an
empty cache, then again. On a machine with PyTorch's libraries and a run of examples/pytorch,
for instance.

Run: python benchmarks/report_time.py RUN_FOLDER [--runs 5]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

from pytest_negativa.analysis.report import plan_run
from pytest_negativa.settings.resolve import load_settings
from pytest_negativa.storage.runs import Run
from pytest_negativa.tracing.merge import merge_traces


def _report(run: Path, folder: Path, cache: Path) -> float:
    settings = load_settings({}, {**os.environ, "NEGATIVA_CACHE_DIR": str(cache)}, root=folder)
    start = time.perf_counter()
    usage = merge_traces(Run(run).trace_files())
    plan_run(usage, settings, Run(folder / "run"), failure=None)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a traced run")
    parser.add_argument("--runs", type=int, default=5, help="of each kind (default: 5)")
    arguments = parser.parse_args()
    cold, cached = [], []
    for _ in range(arguments.runs):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            cold.append(_report(arguments.run, folder, folder / "cache"))
            cached.append(_report(arguments.run, folder, folder / "cache"))
    for text, times in (("cold", cold), ("cached", cached)):
        print(
            f"{text:7} median {statistics.median(times):.2f} s "
            f"(min {min(times):.2f}, max {max(times):.2f}), {len(times)} runs"
        )


if __name__ == "__main__":
    main()
