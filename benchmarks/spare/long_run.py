"""What a spare costs in the long run, and whether it holds: pairs of processes, and a soak.

Needs PyTorch, and this package with its C parts; 16 GB of disk. Without a GPU all runs on the CPU.

1. Start: the time and CPU time of ``import torch``, its peak memory and mappings, in turns.
2. Steady state: processes on the originals, on a copy of them, on libraries all of whose code came
   back, and on libraries that kept what the first pass touched, take turns. Each pair has new
   processes, because two of them differ even on the originals. Medians of microseconds per step.
3. Soak: processes with threads, forks and DataLoader workers, on libraries without any code and
   constants, for so many seconds. Each must end well and print what a process on the originals
   prints. A line tells the state every minute. --logged has them log what comes back, as in
   staging.

Run: python benchmarks/spare/long_run.py PYTHON [--soak SECONDS] [--at-once N] [--to FOLDER]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

from pytest_negativa.errors import NegativaError
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.models.library import Scope
from pytest_negativa.models.spans import Range
from pytest_negativa.pages.auditors import misses_environment
from pytest_negativa.pages.misses import Misses
from pytest_negativa.pages.page_logs import read_misses
from pytest_negativa.rewriting.compact.cut import CutOptions, cut_library
from pytest_negativa.rewriting.compact.records import Cut

HERE = Path(__file__).parent
BEGIN = time.monotonic()
SMALLEST = 4 << 20  # bytes of a library that is cut
PAIRS = 12
STEPS, PARTS, WARM_UP = 10, 200, 20  # steps in a part, and parts of a process


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGIN:6.1f} s  {text}", flush=True)


def command(
    python: str, tree: Path, logs: Path | None, *what: str
) -> tuple[list[str], dict[str, str]]:
    environ = {**os.environ, "PYTHONPATH": str(tree)}
    if logs is not None:
        environ |= misses_environment(environ, logs)
    return [python, str(HERE / "worker.py"), *what], environ


# ---- Trees ----


def make_trees(folder: Path, python: str, *, all_came_back_alone: bool) -> dict[str, Path]:
    script = "import torch, pathlib; print(pathlib.Path(torch.__file__).parent.parent)"
    site = Path(subprocess.check_output([python, "-c", script], text=True).strip())
    files = [
        path
        for path in site.rglob("*.so*")
        if path.is_file() and not path.is_symlink() and path.stat().st_size > SMALLEST
    ]
    trees = {
        "original": site,
        "copy": folder / "copy",
        "all came back": folder / "cut",
        "kept": folder / "kept",
    }
    if all_came_back_alone:
        del trees["copy"], trees["kept"]
    for tree in list(trees.values())[1:]:
        subprocess.run(["cp", "-as", f"{site}/.", tree], check=True)
    for path in files:
        if "copy" in trees:
            target = trees["copy"] / path.relative_to(site)
            target.unlink()
            shutil.copy2(path, target)
    with ProcessPoolExecutor() as pool:
        targets = [trees["all came back"] / path.relative_to(site) for path in files]
        done = list(pool.map(cut, files, targets))
        say(f"{sum(row is not None for row in done)} libraries cut")
        if all_came_back_alone:
            return trees
        # What one pass of the steps touches stays in the third tree.
        words, environ = command(python, trees["all came back"], folder / "logs", "steps")
        subprocess.run(words, env=environ, input="100\n", text=True, check=True)
        missed = {misses.original: misses for misses in read_misses([folder / "logs"])}
        logs = [missed.get(bytes.fromhex(row.original_sha256)) if row else None for row in done]
        targets = [trees["kept"] / path.relative_to(site) for path in files]
        kept = sum(pool.map(cut_by_log, files, targets, logs))
    say(f"{kept} libraries cut with what {sum(len(m.pages) for m in missed.values()):,} pages hold")
    return trees


def containers(path: Path) -> list[Range]:
    """The regions of GPU code."""
    found = read_library(path, Scope(headers_only=True))
    return [(region.span.start, region.span.end) for region in found.iter_regions()]


def cut(path: Path, target: Path) -> Cut | None:
    """Cut all code of a library."""
    options = CutOptions(min_hole=4096)
    try:
        return cut_library(path, target, target.parent, [], options, containers(path))
    except NegativaError:
        return None


def cut_by_log(path: Path, target: Path, misses: Misses | None) -> bool:
    try:
        needed = [] if misses is None else misses.ranges()
        options = CutOptions(min_hole=16384)
        cut_library(path, target, target.parent, needed, options, containers(path))
    except NegativaError:
        return False
    return True


# ---- 1 ----

START = """
import os, resource, sys, time
begin = time.perf_counter(), time.process_time()
import torch
ends = time.perf_counter(), time.process_time()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(*(b - a for a, b in zip(begin, ends)), peak / 1024, len(open("/proc/self/maps").readlines()))
"""


def starts(python: str, trees: dict[str, Path]) -> None:
    found: dict[str, list[list[float]]] = {name: [] for name in trees}
    for turn in range(PAIRS + 1):
        for name in turned(list(trees), turn):
            environ = {**os.environ, "PYTHONPATH": str(trees[name])}
            output = subprocess.check_output([python, "-c", START], env=environ, text=True)
            found[name].append([float(word) for word in output.split()])
    for name, rows in found.items():
        wall, spent, peak, maps = (
            statistics.median(column) for column in zip(*rows[1:], strict=True)
        )
        say(
            f"import {name:14} median {wall:.2f} s, {spent:.2f} s of CPU time, peak memory "
            f"{peak:.0f} MiB, {maps:.0f} mappings"
        )


def turned(names: list[str], turn: int) -> list[str]:
    """Each goes first in turn."""
    return names[turn % len(names) :] + names[: turn % len(names)]


# ---- 2 ----


def steady(python: str, trees: dict[str, Path]) -> None:
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in trees}
    for turn in range(PAIRS):
        processes = {}
        for name in turned(list(trees), turn):
            words, environ = command(python, trees[name], None, "steps")
            processes[name] = subprocess.Popen(
                words, env=environ, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        parts: dict[str, list[tuple[float, ...]]] = {name: [] for name in trees}
        for part in range(WARM_UP + PARTS):
            for name in turned(list(processes), part):
                process = processes[name]
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write(f"{STEPS}\n")
                process.stdin.flush()
                parts[name].append(tuple(map(float, process.stdout.readline().split())))
        for name, rows in parts.items():
            columns = zip(*rows[WARM_UP:], strict=True)
            # The first decile: other programs disturb some parts.
            found[name].append(tuple(sorted(column)[PARTS // 10] for column in columns))
        if turn == PAIRS - 1:
            for name, process in processes.items():
                tell_memory(name, process.pid)
        for process in processes.values():
            process.communicate()
    for name, rows in found.items():
        for column, what in enumerate(("of the clock", "of CPU time")):
            times = [row[column] for row in rows]
            base = [row[column] for row in found["original"]]
            against = sorted(a / b for a, b in zip(times, base, strict=True))
            say(
                f"steady {name:14} us a step {what}: median {statistics.median(times):.1f}; "
                f"against the original of the same turn: median {statistics.median(against):.4f}, "
                f"{against[0]:.4f} to {against[-1]:.4f}"
            )


def tell_memory(name: str, pid: int) -> None:
    folder = Path(f"/proc/{pid}")
    maps = len((folder / "maps").read_text().splitlines())
    lines = (folder / "smaps_rollup").read_text().splitlines()[1:]
    memory = dict(line.split(":", 1) for line in lines)
    say(
        f"steady {name:14} {maps} mappings, Rss {memory['Rss'].strip()}, Pss "
        f"{memory['Pss'].strip()}"
    )


# ---- 3 ----


def soak(
    python: str, trees: dict[str, Path], seconds: float, at_once: int, logs: Path | None
) -> None:

    def one(tree: Path) -> tuple[int, str, str]:
        words, environ = command(python, tree, logs, "soak")
        done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    status, output, errors = one(trees["original"])
    if status:
        say(f"soak: the original fails: {errors[-400:]}")
        return
    wanted = json.loads(output)
    say(f"soak: the original gives {len(wanted)} sums")
    begin = told = time.monotonic()
    count, bad = 0, 0
    with ThreadPoolExecutor(at_once) as pool:
        while time.monotonic() < begin + seconds:
            for status, output, errors in pool.map(one, [trees["all came back"]] * at_once):
                count += 1
                found = json.loads(output) if status == 0 else {}
                differ = [
                    f"{name}: {found.get(name)} for {value}"
                    for name, value in wanted.items()
                    if not math.isclose(found.get(name, math.nan), value, rel_tol=1e-4)
                ]
                if status or differ:
                    bad += 1
                    say(f"soak: status {status}, {differ[:3]} {errors[-300:]}")
            if time.monotonic() > told + 60:
                told = time.monotonic()
                tell_soak(told - begin, count, bad, logs)
    tell_soak(time.monotonic() - begin, count, bad, logs)


def tell_soak(seconds: float, count: int, bad: int, logs: Path | None) -> None:
    missed = ""
    if logs is not None:
        found = (miss.times for log in read_misses([logs]) for miss in log.pages.values())
        missed = f", {sum(found):,} misses"
    say(
        f"soak: {seconds / 60:.0f} minutes, {count} processes (each with 8 threads, 2 forks, 2 "
        f"DataLoader workers){missed}; {bad} processes with another result or end"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("python")
    parser.add_argument("--soak", type=float, default=60, help="seconds")
    parser.add_argument("--logged", action="store_true", help="the soak logs what comes back")
    parser.add_argument("--at-once", type=int, default=3, help="processes of the soak")
    parser.add_argument("--only", choices=["start", "steady", "soak"], action="append")
    parser.add_argument("--to", type=Path, help="folder on a file system with 16 GB left")
    arguments = parser.parse_args()
    parts = arguments.only or ["start", "steady", "soak"]
    python = arguments.python
    with tempfile.TemporaryDirectory(dir=arguments.to) as scratch:
        folder = Path(scratch)
        trees = make_trees(folder, python, all_came_back_alone=parts == ["soak"])
        if "start" in parts:
            starts(python, trees)
        if "steady" in parts:
            steady(python, trees)
        if "soak" in parts:
            logs = folder / "soak-logs" if arguments.logged else None
            soak(python, trees, arguments.soak, arguments.at_once, logs)


if __name__ == "__main__":
    main()
