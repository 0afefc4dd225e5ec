"""A stack of packages with spares: sizes, what stays and why, imports, memory, first touches.

Part ``sizes`` traces a suite (CPU pages and, on a GPU, its code), locks it unproved, and slims
copies of the packages: with the holes that slim takes by default, and with as many as there are. It
prints, without nvrtc and nvJitLink, bytes before and after, and what stays by section and reason.
In the other parts, a copy of the originals and the copy with the default holes take turns:

- ``import``: the time of an import, with files in the page cache, and with them dropped from it;
  and what of them is there in the end;
- ``memory``: RSS, PSS and mappings of several processes at once, and the time of a fork;
- ``touch``: the first read of a page that left, against the original's page fault, warm and cold;
- ``work``: a first pass of ``passes.py`` and later ones, with modules loaded lazily and eagerly.

What a part made stays in the folder of --to, so that a later call goes on. A table ends the output.

Run: python benchmarks/spare/stack.py SUITE --to FOLDER [--part sizes ...] [--module torch]
with the interpreter of an environment that has pytest-negativa and the packages. --arch slims by an
arch, where there is no GPU for a lock.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from pytest_negativa.errors import FormatError
from pytest_negativa.gpucode.elf import read_host_elf
from pytest_negativa.gpucode.source import ByteSource
from pytest_negativa.models.spans import intersection, minus, size, union
from pytest_negativa.pages.gather import require_usage
from pytest_negativa.slimming.spares import note_of
from pytest_negativa.storage.runs import run_at

sys.path.insert(0, str(Path(__file__).parents[1]))
from page_cache import cached, drop, warm

PARTS = "sizes", "import", "memory", "touch", "work"
LEFT_OUT = "libnvrtc", "libnvJitLink"
COLD_PAIRS, WORK_PAIRS, MOST_PAGES, MOST_COLD_PAGES = 3, 4, 4000, 400
WINDOW = 64 << 10  # what the kernel maps around a page
BEGIN = time.monotonic()

# Argument: a module. Prints seconds of its import by the clock and of CPU time, bytes read from
# disk, seconds of a fork, and mappings; waits for a line.
IMPORT = """
import importlib, os, resource, sys, time
def fork():
    begin = time.perf_counter()
    if (child := os.fork()) == 0: os._exit(0)
    os.waitpid(child, 0)
    return time.perf_counter() - begin
before = resource.getrusage(resource.RUSAGE_SELF).ru_inblock
begin = time.perf_counter(), time.process_time()
importlib.import_module(sys.argv[1])
took = time.perf_counter() - begin[0], time.process_time() - begin[1]
read = (resource.getrusage(resource.RUSAGE_SELF).ru_inblock - before) * 512
forks = sorted(fork() for _ in range(9))
print(*took, read, forks[4], sum(1 for _ in open("/proc/self/maps")), flush=True)
sys.stdin.readline()
"""
# Arguments: a module, its tree, a file with addresses by library, how many, and "warm" or "cold".
# Says when it is ready, waits for a line, and prints nanoseconds (warm: of CPU time) of the first
# read of each page that is not in its page table, less those of the second, and how many there are.
TOUCH = """
import array, ctypes, importlib, json, os, random, sys, time
importlib.import_module(sys.argv[1])
wanted = json.load(open(sys.argv[3]))
bases = {}
for line in open("/proc/self/maps"):
    path = line.split(maxsplit=5)[5:]
    if path and path[0].startswith(sys.argv[2]):
        name = os.path.relpath(path[0].strip(), sys.argv[2])
        bases.setdefault(name, int(line.split("-")[0], 16))
pagemap = open("/proc/self/pagemap", "rb", buffering=0)
def absent(at):
    word = array.array("Q")
    word.frombytes(os.pread(pagemap.fileno(), 8, at // 4096 * 8))
    return not word[0] >> 62
pages = [bases[name] + at for name, places in wanted.items() if name in bases for at in places]
pages = [at for at in pages if absent(at)]
random.Random(0).shuffle(pages)
pages = [ctypes.c_ubyte.from_address(at) for at in pages[:int(sys.argv[4])]]
clock = {"warm": time.process_time_ns, "cold": time.perf_counter_ns}[sys.argv[5]]
def read():
    begin = clock()
    for page in pages: page.value
    return clock() - begin
print("ready", flush=True)
sys.stdin.readline()
first = read()
print((first - read()) / max(len(pages), 1), len(pages), flush=True)
"""


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGIN:4.0f} s: {text}", flush=True)


class Stack:
    """The folder with what parts made, and the words of the command line."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.folder: Path = arguments.to.resolve()
        self.logs: Path = (arguments.logs or self.folder / "logs").resolve()
        self.logs.mkdir(parents=True, exist_ok=True)
        self.original, self.slim = self.folder / "original", self.folder / "slim"
        self.spares = self.folder / "slim-spares"
        self.suite = self.folder / "suite"

    def call(self, name: str, *words: str | Path, check: bool = True) -> str:
        """Run the command of the product, or pytest; its output goes to a log."""
        with (self.logs / f"{name}.log").open("w") as log:
            done = subprocess.run(
                [sys.executable, "-m", *words], cwd=self.suite, stdout=log, stderr=log
            )
        text = (self.logs / f"{name}.log").read_text()
        say(f"{name}: status {done.returncode}")
        if check and done.returncode:
            sys.exit(text[-2000:])
        return text

    def copy(self, target: Path) -> bool:
        """Copy the packages; False: that was done before."""
        done = target.with_suffix(".copied")
        if done.exists():
            return False
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        site = Path(sysconfig.get_path("purelib"))
        found = [path for name in self.arguments.packages for path in site.glob(f"{name}*")]
        subprocess.run(["cp", "-a", "--reflink=auto", *found, target], check=True)
        # As pip leaves them; else each import compiles its modules where bytecode isn't written.
        subprocess.run([sys.executable, "-m", "compileall", "-qq", "-j0", target], check=False)
        done.touch()
        return True

    def prepare(self) -> Path:
        """Trace, lock, and slim a copy with the default holes; the run."""
        run: Path = self.suite / ".negativa" / "latest"
        if not run.exists():
            shutil.rmtree(self.suite, ignore_errors=True)
            shutil.copytree(self.arguments.suite, self.suite)
            traced = ["pytest", "-q", "--negativa", "--negativa-cpu"]
            if self.arguments.arch:
                cpu = ["pytest_negativa", "trace", "--cpu", "--"]
                traced = [*cpu, sys.executable, "-m", "pytest", "-q"]
            self.call("trace", *traced, check=False)
        if not (self.suite / "negativa.lock").exists():
            self.call("lock", "pytest_negativa", "lock", "--unproved")
        self.copy(self.original)
        self.slim_copy(self.slim)
        return run.resolve()

    def slim_copy(self, target: Path, *more: str) -> None:
        done = target.with_suffix(".slimmed")
        if done.exists():
            return
        target.with_suffix(".copied").unlink(missing_ok=True)
        self.copy(target)
        arch = self.arguments.arch
        how = ["--arch", arch] if arch else ["--never-loaded"]
        words = ["--lock", str(self.suite / "negativa.lock"), *how]
        spares = target.with_name(f"{target.name}-spares")
        text = self.call(
            f"slim-{target.name}", "pytest_negativa", "slim", *words, "--spare", spares,
            *more, "--yes", target, check=False,
        )  # fmt: skip
        print(*text.splitlines()[-6:], sep="\n")
        done.touch()

    def start(
        self, script: str, tree: Path, *words: str, loading: str = "LAZY"
    ) -> subprocess.Popen[str]:
        # Each of many processes has few cores.
        environ = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        environ["CUDA_MODULE_LOADING"] = loading
        return subprocess.Popen(
            [sys.executable, "-c", script, self.arguments.module, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def libraries(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*.so*")):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                if file.read(4) == b"\x7fELF":
                    yield path


# ---- Parts; each returns rows of the table ----


def part_sizes(stack: Stack) -> Iterator[tuple[str, str]]:
    run = stack.prepare()
    yield from sizes("2,500 holes", stack.original, stack.slim, run)
    every = stack.folder / "all-holes"
    stack.slim_copy(every, "--spare-holes", "1000000")
    yield from sizes("all holes", stack.original, every, run)


def sizes(title: str, site: Path, copy: Path, run: Path) -> Iterator[tuple[str, str]]:
    usage = {one.sha256: one for one in require_usage(run_at(run.resolve())).libraries}
    before, after, gpu_before, gpu_after, count = 0, 0, 0, 0, 0
    stays: Counter[tuple[str, str]] = Counter()
    for path in libraries(site):
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
        count += len(holes)
        was, now = path.stat().st_size, slim.stat().st_size
        before, after = before + was, after + now
        if any("fatbin" in section.name for section in elf.sections):
            gpu_before, gpu_after = gpu_before + was, gpu_after + now
        unneeded = () if one is None else union((*minus(one.watched, one.touched), *one.unread))
        for section in elf.sections:
            here = list(minus([(section.offset, section.offset + section.size)], gone))
            short = size(intersection(here, unneeded))
            reason = "not traced" if one is None else "used, or may not leave"
            stays[section.name, reason] += size(here) - short
            stays[section.name, "not used, but in no hole"] += short
    print(f"What stays with {title}, by section and reason:")
    for (name, reason), left in stays.most_common(16):
        print(f"    {left / 1e6:8.1f} MB {name:20} {reason}")
    yield f"MB, {title}", f"{before / 1e6:,.0f} -> {after / 1e6:,.0f} with {count:,} holes"
    yield f"MB with GPU code, {title}", f"{gpu_before / 1e6:,.0f} -> {gpu_after / 1e6:,.0f}"


def part_import(stack: Stack) -> Iterator[tuple[str, str]]:
    stack.prepare()

    def once(tree: Path) -> list[float]:
        process = stack.start(IMPORT, tree)
        found = [float(word) for word in line_of(process).split()]
        process.communicate("\n")
        return found

    def pairs(count: int, *, cold: bool) -> Iterator[tuple[list[float], list[float]]]:
        for turn in range(count):
            found = {}
            for tree in (stack.original, stack.slim)[:: -1 if turn % 2 else 1]:
                if cold:
                    drop(tree, stack.spares)
                found[tree] = once(tree)
            yield found[stack.original], found[stack.slim]

    list(pairs(1, cold=False))
    for name, count in (("warm", stack.arguments.pairs), ("cold", COLD_PAIRS)):
        rows = list(pairs(count, cold=name == "cold"))
        for column, of in enumerate(("clock", "CPU time")):
            ratios = sorted(slim[column] / before[column] for before, slim in rows)
            times = [statistics.median(row[column] for row in side) for side in zip(*rows)]  # noqa: B905
            yield (
                f"import, {name}, {of}",
                f"{times[0]:.3f} -> {times[1]:.3f} s; ratio {statistics.median(ratios):.3f} "
                f"({ratios[0]:.3f} to {ratios[-1]:.3f}, {count} pairs)",
            )
        if name == "cold":
            drop(stack.original, stack.slim, stack.spares)
            once(stack.original)
            once(stack.slim)
            before, slim, spares = map(cached, (stack.original, stack.slim, stack.spares))
            yield (
                "import, cold, MB in the page cache",
                f"{before:,.0f} -> {slim:,.0f}, spares {spares:,.0f}",
            )
        read = [statistics.median(row[2] for row in side) / 1e6 for side in zip(*rows)]  # noqa: B905
        yield f"import, {name}, MB read from disk", f"{read[0]:,.0f} -> {read[1]:,.0f}"


def part_memory(stack: Stack) -> Iterator[tuple[str, str]]:
    stack.prepare()
    for count in stack.arguments.processes:
        found = [memory([stack.start(IMPORT, tree) for _ in range(count)])
                 for tree in (stack.original, stack.slim)]  # fmt: skip
        (rss, pss, fork, maps), (slim_rss, slim_pss, slim_fork, slim_maps) = found
        yield (
            f"MB of each of {count} processes",
            f"RSS {rss:,.0f} -> {slim_rss:,.0f}, PSS {pss:,.0f} -> {slim_pss:,.0f}",
        )
        if count == 1:
            yield "mappings", f"{maps:,.0f} -> {slim_maps:,.0f}"
            yield "fork, exit and wait", f"{fork * 1e3:.1f} -> {slim_fork * 1e3:.1f} ms"


def memory(workers: Sequence[subprocess.Popen[str]]) -> list[float]:
    """MB of RSS and of PSS, seconds of a fork, and mappings of a process, on average."""
    rows = []
    for worker, line in zip(workers, [line_of(worker) for worker in workers], strict=True):
        text = Path(f"/proc/{worker.pid}/smaps_rollup").read_text()
        known = dict(row.split()[:2] for row in text.splitlines()[1:])
        *_, fork, maps = (float(word) for word in line.split())
        rows.append((int(known["Rss:"]) / 1e3, int(known["Pss:"]) / 1e3, fork, maps))
    for worker in workers:
        worker.communicate("\n")
    return [statistics.mean(column) for column in zip(*rows, strict=True)]


def part_touch(stack: Stack) -> Iterator[tuple[str, str]]:
    stack.prepare()
    places: dict[str, list[int]] = {}
    for path in libraries(stack.slim):
        if (note := note_of(path)) is not None:
            windows = (range(-(-h.start // WINDOW) * WINDOW, h.end, WINDOW) for h in note.holes)
            places[str(path.relative_to(stack.slim))] = [at for ats in windows for at in ats]
    table = stack.folder / "places.json"
    table.write_text(json.dumps(places))
    for name, most, turns in (("warm", MOST_PAGES, 5), ("cold", MOST_COLD_PAGES, COLD_PAIRS)):
        found: dict[Path, list[float]] = {stack.original: [], stack.slim: []}
        for _ in range(turns):
            for tree, times in found.items():
                if name == "warm":
                    warm(tree, stack.spares)
                process = stack.start(TOUCH, tree, str(tree), str(table), str(most), name)
                line_of(process)
                if name == "cold":
                    drop(tree, stack.spares)
                output, _ = process.communicate("\n")
                spent, count = (float(word) for word in output.split())
                times.append(spent / 1e3)
        before, slim = (statistics.median(times) for times in found.values())
        yield (
            f"first touch of a page, {name}",
            f"{before:.2f} -> {slim:.2f} us; ratio {slim / before:.2f} ({count:,.0f} pages, "
            f"{turns} turns)",
        )


def part_work(stack: Stack) -> Iterator[tuple[str, str]]:
    stack.prepare()
    script = Path(__file__).with_name("passes.py").read_text()
    for loading in ("LAZY", "EAGER"):
        found: dict[Path, list[list[float]]] = {stack.original: [], stack.slim: []}
        for turn in range(1 + WORK_PAIRS):
            for tree in list(found)[:: -1 if turn % 2 else 1]:
                output, _ = stack.start(script, tree, loading=loading).communicate()
                # In the first turn, compilers fill their caches.
                if turn:
                    found[tree].append([float(word) for word in output.split()])
        for column, of in enumerate(("first pass", "later passes", "later passes, CPU time")):
            before, slim = ([row[column] for row in rows] for rows in found.values())
            ratios = sorted(b / a for a, b in zip(before, slim, strict=True))
            yield (
                f"{of}, {loading.lower()}",
                f"{statistics.median(before) * 1e3:.2f} -> {statistics.median(slim) * 1e3:.2f} ms; "
                f"ratio {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}, "
                f"{WORK_PAIRS} pairs)",
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("suite", type=Path)
    parser.add_argument("--to", type=Path, required=True, help="folder for copies; it stays")
    parser.add_argument("--logs", type=Path, help="folder for the logs of commands")
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--module", default="torch")
    parser.add_argument("--packages", nargs="+", default=["torch", "nvidia"], help="name begins")
    parser.add_argument("--arch", help="slim by this arch, without a lock")
    parser.add_argument("--pairs", type=int, default=10, help="of warm imports")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 8, 64])
    arguments = parser.parse_args()
    stack = Stack(arguments)
    known = stack.folder / "table.json"
    table: dict[str, str] = json.loads(known.read_text()) if known.exists() else {}
    for part in arguments.part or PARTS:
        rows = {"sizes": part_sizes, "import": part_import, "memory": part_memory,
                "touch": part_touch, "work": part_work}[part]  # fmt: skip
        for name, text in rows(stack):
            say(f"{name}: {text}")
            table[name] = text
            known.write_text(json.dumps(table, indent=2))
    for name, text in table.items():
        print(f"{name:34} {text}")


if __name__ == "__main__":
    main()
