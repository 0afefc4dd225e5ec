"""What a spare costs in the long run, and whether it holds: pairs of processes, and a soak.

Needs one GPU, PyTorch with its NVIDIA wheels, and this package with its C parts; 10 GB of disk.

1. Steady state: processes on the originals, on libraries all of whose code came back, and on
   libraries that kept what the first pass touched, take turns. Medians of microseconds per step.
2. Soak: processes with threads, forks and DataLoader workers, on libraries without any code, for so
   many seconds. Each must end well and print what a process on the originals prints.

Run: python benchmarks/spare/long_run.py PYTHON [--soak SECONDS] [--to FOLDER]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

from driver_reads import HERE, SMALLEST, containers, cut, say

from pytest_negativa.errors import NegativaError
from pytest_negativa.rewriting.compact.cut import CutOptions, cut_library
from pytest_negativa.spare.misses import Misses, read_logs

PAIRS = 12
STEPS = 800
AT_ONCE = 3


def command(
    python: str, tree: Path, what: str, logs: Path | None
) -> tuple[list[str], dict[str, str]]:
    environ = {**os.environ, "PYTHONPATH": str(tree)}
    if logs is not None:
        environ["NEGATIVA_SPARE_LOG"] = str(logs)
    return [python, str(HERE / "worker.py"), what], environ


# ---- Trees ----


def make_trees(folder: Path, python: str) -> dict[str, Path]:
    script = "import torch, pathlib; print(pathlib.Path(torch.__file__).parent.parent)"
    site = Path(subprocess.check_output([python, "-c", script], text=True).strip())
    files = [
        path
        for path in site.rglob("*.so*")
        if path.is_file() and not path.is_symlink() and path.stat().st_size > SMALLEST
    ]
    trees = {"original": site, "all came back": folder / "cut", "kept": folder / "kept"}
    for tree in list(trees.values())[1:]:
        subprocess.run(["cp", "-as", f"{site}/.", tree], check=True)
    with ProcessPoolExecutor() as pool:
        targets = [trees["all came back"] / path.relative_to(site) for path in files]
        done = list(pool.map(cut, files, targets, itertools.repeat("gpu+host")))
        say(f"{sum(row[0] is not None for row in done)} libraries cut")
        # What one pass of the steps touches stays in the third tree.
        words, environ = command(python, trees["all came back"], "steps", folder / "logs")
        subprocess.run(words, env=environ, input="100\n", text=True, check=True)
        missed = {misses.original: misses for misses in read_logs([folder / "logs"])}
        logs = [
            missed.get(bytes.fromhex(row[0].original_sha256)) if row[0] else None for row in done
        ]
        targets = [trees["kept"] / path.relative_to(site) for path in files]
        kept = sum(pool.map(cut_by_log, files, targets, logs))
    say(f"{kept} libraries cut with what {sum(len(m.pages) for m in missed.values()):,} pages hold")
    return trees


def cut_by_log(path: Path, target: Path, misses: Misses | None) -> bool:
    try:
        needed = [] if misses is None else misses.ranges()
        options = CutOptions(min_hole=16384)
        cut_library(path, target, target.parent, needed, options, containers(path))
    except NegativaError:
        return False
    return True


# ---- 1 ----


def steady(python: str, trees: dict[str, Path]) -> None:
    processes = {}
    for name, tree in trees.items():
        words, environ = command(python, tree, "steps", None)
        processes[name] = subprocess.Popen(
            words, env=environ, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
    found: dict[str, list[float]] = {name: [] for name in trees}
    for turn in range(PAIRS + 2):
        # Each goes first in turn.
        names = list(processes)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            process = processes[name]
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(f"{STEPS}\n")
            process.stdin.flush()
            found[name].append(float(process.stdout.readline()))
    for name, times in found.items():
        times = times[2:]  # The first turns warm up.
        against = [a / b for a, b in zip(times, found["original"][2:], strict=True)]
        maps = len(Path(f"/proc/{processes[name].pid}/maps").read_text().splitlines())
        say(
            f"steady {name:14} us a step: median {statistics.median(times):.1f}, "
            f"{min(times):.1f} to {max(times):.1f}; against the original of the same turn: median "
            f"{statistics.median(against):.4f}; {maps} mappings"
        )
    for process in processes.values():
        process.communicate()


# ---- 2 ----


def soak(python: str, trees: dict[str, Path], seconds: float) -> None:
    def one(tree: Path) -> tuple[int, str, str]:
        words, environ = command(python, tree, "soak", None)
        done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    status, output, errors = one(trees["original"])
    if status:
        say(f"soak: the original fails: {errors[-400:]}")
        return
    wanted = json.loads(output)
    say(f"soak: the original gives {len(wanted)} sums")
    end = time.monotonic() + seconds
    count, bad = 0, 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        while time.monotonic() < end:
            for status, output, errors in pool.map(one, [trees["all came back"]] * AT_ONCE):
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
    say(f"soak: {count} processes, {bad} with another result or end")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("python")
    parser.add_argument("--soak", type=float, default=60, help="seconds")
    parser.add_argument("--to", type=Path, help="folder on a file system with 10 GB left")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.to) as scratch:
        trees = make_trees(Path(scratch), arguments.python)
        steady(arguments.python, trees)
        soak(arguments.python, trees, arguments.soak)


if __name__ == "__main__":
    main()
