"""A whole site-packages folder with spares: sizes, what stays and why, imports, memory.

Traces a suite (CPU pages and, on a GPU, its code), locks it unproved, and slims copies of the
folder: with the gaps that slim takes by default, and with as many as there are. Prints, without
nvrtc and nvJitLink, bytes before and after, and what stays by section and reason. Then original and
copy take turns: the time of an import and of a fork, RSS, PSS and mappings of 1 and 8 processes.

Run: python benchmarks/spare/stack.py SUITE [--module torch] [--arch sm_90] [--to FOLDER]
with the interpreter of an environment that has pytest-negativa and the module. --arch slims by an
arch, where there is no GPU for a lock.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.elf import read_host_elf
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.hostcode.gather import load_usage
from pytest_negativa.models.spans import intersection, minus, size, union
from pytest_negativa.slimming.spares import note_of

LEFT_OUT = "libnvrtc", "libnvJitLink"
PAIRS, PROCESSES = 10, 8
# Prints what one process costs when it has imported a module, and waits for its end.
WORKER = """
import importlib, os, sys, time
begin = time.perf_counter()
module = importlib.import_module(sys.argv[1])
took = time.perf_counter() - begin
if sys.argv[1] == "torch" and module.cuda.is_available():
    a = module.rand(512, 512, device="cuda"); float((a @ a).sum())
def fork():
    begin = time.perf_counter()
    if (child := os.fork()) == 0: os._exit(0)
    os.waitpid(child, 0)
    return time.perf_counter() - begin
forks = sorted(fork() for _ in range(9))
maps = sum(1 for _ in open("/proc/self/maps"))
print(took, forks[4], maps, flush=True)
sys.stdin.read()
"""


def _libraries(folder: Path) -> list[Path]:
    found = (path for path in sorted(folder.rglob("*.so*")) if not path.is_symlink())
    return [path for path in found if path.is_file() and path.open("rb").read(4) == b"\x7fELF"]


def _print_sizes(title: str, site: Path, copy: Path, run: Path) -> None:
    usage = {one.sha256: one for one in load_usage(run).libraries}
    before = after = gaps = 0
    gpu_before = gpu_after = 0
    stays: Counter[tuple[str, str]] = Counter()
    for path in _libraries(site):
        slim = copy / path.relative_to(site)
        if path.name.startswith(LEFT_OUT):
            continue
        with ByteSource(path) as source:
            try:
                elf = read_host_elf(source)
            except FormatError:
                continue
            note = note_of(slim)
            one = usage.get(source.sha256())
        holes = () if note is None else note.holes
        gone = union((hole.offset, hole.offset + hole.end - hole.start) for hole in holes)
        gaps += len(holes)
        before, after = before + path.stat().st_size, after + slim.stat().st_size
        if any("fatbin" in section.name for section in elf.sections):
            gpu_before += path.stat().st_size
            gpu_after += slim.stat().st_size
        unneeded = () if one is None else union((*minus(one.watched, one.touched), *one.unread))
        for section in elf.sections:
            here = list(minus([(section.offset, section.offset + section.size)], gone))
            short = size(intersection(here, unneeded))
            reason = "not traced" if one is None else "used, or may not leave"
            stays[section.name, reason] += size(here) - short
            stays[section.name, "not used, but in no gap"] += short
    print(f"{title}: {before / 1e6:,.0f} -> {after / 1e6:,.0f} MB; with GPU code "
          f"{gpu_before / 1e6:,.0f} -> {gpu_after / 1e6:,.0f} MB; {gaps:,} gaps")  # fmt: skip
    for (name, reason), count in stays.most_common(16):
        print(f"    {count / 1e6:8.1f} MB {name:20} {reason}")


def _start(site: Path, module: str) -> subprocess.Popen[str]:
    environ = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
    )


def _costs(workers: Sequence[subprocess.Popen[str]]) -> tuple[float, float, float, float, float]:
    """Seconds of the import and of a fork, mappings, and MB of RSS and PSS of each, on average."""
    rows = []
    lines = [worker.stdout.readline() for worker in workers if worker.stdout is not None]
    for worker, line in zip(workers, lines, strict=True):
        text = Path(f"/proc/{worker.pid}/smaps_rollup").read_text()
        sizes = dict(row.split()[:2] for row in text.splitlines()[1:])
        memory = (int(sizes[name]) / 1e3 for name in ("Rss:", "Pss:"))
        rows.append((*map(float, line.split()), *memory))
    for worker in workers:
        worker.communicate()
    took, fork, maps, rss, pss = map(statistics.mean, zip(*rows, strict=True))
    return took, fork, maps, rss, pss


def _print_turns(site: Path, copy: Path, module: str) -> None:
    turns = [[_costs([_start(one, module)]) for one in (site, copy)] for _ in range(PAIRS + 1)]
    # The first turn reads from the disk.
    ratios = sorted(slim[0] / original[0] for original, slim in turns[1:])
    print(f"import of {module}: slim / original {statistics.median(ratios):.3f} "
          f"({ratios[0]:.3f} to {ratios[-1]:.3f}, {PAIRS} pairs)")  # fmt: skip
    eight = [_costs([_start(one, module) for _ in range(PROCESSES)]) for one in (site, copy)]
    for name, *rows, of_all in zip(("original", "slim"), *turns[1:], eight, strict=True):
        took, fork, maps, rss, pss = map(statistics.median, zip(*rows, strict=True))
        print(f"{name:9} import {took:.3f} s, fork {fork * 1e3:.1f} ms, {maps:,.0f} mappings, RSS "
              f"{rss:,.0f}, PSS {pss:,.0f} MB; each of {PROCESSES}: RSS {of_all[3]:,.0f}, PSS "
              f"{of_all[4]:,.0f} MB")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("suite", type=Path)
    parser.add_argument("--module", default="torch")
    parser.add_argument("--arch", help="slim by this arch, without a lock")
    parser.add_argument("--to", type=Path, help="folder on the file system to work on")
    arguments = parser.parse_args()
    site, begin = Path(sysconfig.get_path("purelib")), time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - begin:4.0f} s: {text}", flush=True)

    with tempfile.TemporaryDirectory(dir=arguments.to) as scratch:
        suite = Path(shutil.copytree(arguments.suite, Path(scratch, "suite")))
        command = [sys.executable, "-m"]
        cpu_alone = ["pytest_negativa", "trace", "--cpu", "--", *command, "pytest", "-q"]
        traced = ["pytest", "-q", "--negativa", "--negativa-cpu"]
        subprocess.run([*command, *(cpu_alone if arguments.arch else traced)], cwd=suite)
        run = (suite / ".negativa" / "latest").resolve()
        say(f"traced in {run.name}")
        words = ["--arch", arguments.arch]
        if not arguments.arch:
            lock = [*command, "pytest_negativa", "lock", "--unproved"]
            subprocess.run(lock, cwd=suite, check=True)
            words = ["--lock", str(suite / "negativa.lock"), "--spare-never-loaded"]
        for title, more in (("2,500 gaps", []), ("all gaps", ["--spare-gaps", "1000000"])):
            copy = Path(scratch, title.replace(",", "").replace(" ", "-"), "site-packages")
            copy.parent.mkdir()
            subprocess.run(["cp", "-a", "--reflink=auto", site, copy], check=True)
            spares = copy.parent / "spares"
            slim = [*command, "pytest_negativa", "slim", *words, "--spare", str(spares)]
            slim += ["--cpu-pages", str(run), *more, "--yes", str(copy)]
            done = subprocess.run(slim, capture_output=True, text=True)
            print(*done.stderr.splitlines()[-6:], sep="\n")
            say(f"slimmed, status {done.returncode}")
            _print_sizes(title, site, copy, run)
            _print_turns(site, copy, arguments.module)
            say("measured")
            shutil.rmtree(copy.parent)


if __name__ == "__main__":
    main()
