"""Compares what a traced suite read of GPU code with what it looked up, and times the watch.

    python benchmarks/watched_traces.py examples/pytorch --pairs 3 [--eager] [-- -k matmul]

Sessions run in turns, with and without the watch. Of the last watched one it counts the elements
that were loaded, those of them whose pages were read, and those that were read and never loaded.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from pathlib import Path

from pytest_negativa.models.plan import KeepReason
from pytest_negativa.models.spans import covers, intersection, size
from pytest_negativa.pages.auditors import watch_environment
from pytest_negativa.pages.gather import with_pages
from pytest_negativa.pages.page_watch import prepare_logs
from pytest_negativa.storage.results import load_planned, load_usage
from pytest_negativa.storage.runs import Run, RunsFolder

LOADED = (KeepReason.LOADED.value, KeepReason.MEMORY_IMAGE.value)


def trace(suite: Path, runs: Path, words: list[str], environ: dict[str, str]) -> float:
    """Seconds of a traced session, which must not fail to trace."""
    command = [sys.executable, "-m", "pytest", "-q", "--negativa", *words]
    environ = {**environ, "NEGATIVA_DIR": str(runs)}
    begin = time.monotonic()
    done = subprocess.run(command, cwd=suite, env=environ, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        sys.exit(f"{done.stdout}{done.stderr}")
    return time.monotonic() - begin


def compare(run: Run) -> None:
    """Print how the pages that were read agree with the elements that were loaded."""
    usage = load_usage(run)
    assert usage is not None
    watched = {used.library.path: used for used in with_pages(usage, run).libraries}
    loaded = loaded_read = others = unused = untouched = 0
    pages = sum(size(used.touched) for used in watched.values()) // 4096
    for one in load_planned(run):
        used = watched.get(one.plan.library.path)
        if used is None:
            continue
        regions = sorted(region.span for region in one.library_map.iter_regions())
        images = {image.offset for image in used.images}
        for decision in one.plan.decisions:
            span = (decision.start, decision.end)
            read = any(intersection([span], used.touched))
            at = bisect_right(regions, span) - 1
            if decision.kept and decision.reason in LOADED:
                loaded, loaded_read = loaded + 1, loaded_read + read
            elif decision.reason == KeepReason.TOUCHED.value:
                others += 1
                print(f"  read and not loaded: {one.plan.library.path} {span[0]:#x}", end="")
                print(" (its region was loaded)" if regions[at].start in images else "")
            if not decision.kept:
                unused += decision.size
                untouched += size(intersection([span], used.untouched))
                if covers(used.touched, *span):
                    print(f"  read as a whole and unused: {one.plan.library.path} {span[0]:#x}")
    print(f"{pages:,} pages read; {loaded:,} elements loaded, {loaded_read:,} of them were read")
    print(f"{others:,} elements read and not loaded; eager: {usage.loads_eagerly}")
    print(f"watched and not read: {untouched:,} of {unused:,} unused bytes")


def main() -> None:
    """Run the sessions, and print the comparison and the times."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("suite", type=Path)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("words", nargs="*", help="for pytest")
    arguments = parser.parse_args()
    environ = dict(os.environ)
    if arguments.eager:
        environ["CUDA_MODULE_LOADING"] = "EAGER"
    times: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        runs, plain, logs = (Path(folder, name) for name in ("runs", "plain", "logs"))
        trace(arguments.suite, plain, arguments.words, environ)
        for number in range(arguments.pairs):
            for is_watched in (False, True) if number % 2 else (True, False):
                added: dict[str, str] = {}
                if is_watched:
                    logs = Path(folder, f"logs{number}")
                    logs.mkdir()
                    prepare_logs(logs)
                    added = watch_environment(environ, logs, only_gpu=True)
                target = runs if is_watched else plain
                seconds = trace(arguments.suite, target, arguments.words, {**environ, **added})
                times[is_watched].append(seconds)
        found = RunsFolder(runs).find(None)
        logs.rename(found.touch_logs)
        locate = [sys.executable, "-m", "pytest_negativa", "locate", "--run", str(found)]
        # The suite may ask for reports in folders that it doesn't have here.
        locate += ["--report", "terminal"]
        subprocess.run(locate, check=True, stdout=subprocess.DEVNULL, cwd=arguments.suite)
        compare(found)
    for is_watched, measured in times.items():
        shown = ", ".join(f"{second:.2f}" for second in measured)
        name = "watched" if is_watched else "plain"
        print(f"{name}: {statistics.median(measured):.2f} s ({shown})")


if __name__ == "__main__":
    main()
