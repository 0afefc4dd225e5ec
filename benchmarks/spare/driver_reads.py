"""Does the driver read GPU containers so that a page fault can bring them back?

Needs one GPU, PyTorch with its NVIDIA wheels, gcc, nvcc, and this package with its C parts. Takes
less than 9 minutes on 16 cores. Answers:

1. images.c: each kind of image, each call, unreadable pages: errors, faults, in which threads.
2. A library of nvcc's in four forms, cut with its containers: the kernel's result, lazy and eager.
3. PyTorch and NVIDIA's libraries, cut without and with host code: results, misses by library and
   kind of page, times, mappings, threads that block SIGSEGV, who holds its handler.

Everything is cut completely, with nothing kept: the worst case. Without a GPU it runs what it can
on the CPU.

Run: python benchmarks/spare/driver_reads.py PYTHON [--arch sm_90] [--to FOLDER]

PYTHON is the interpreter that imports torch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from pytest_negativa.errors import NegativaError
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.models.library import Scope
from pytest_negativa.rewriting.compact.cut import Cut, CutOptions, cut_library
from pytest_negativa.rewriting.compact.original_tables import Range
from pytest_negativa.rewriting.compact.records import CannotCompactError
from pytest_negativa.spare.misses import LOG_SUFFIX, read_misses
from pytest_negativa.spare.note import PAGE_SIZE

HERE = Path(__file__).parent
BEGIN = time.monotonic()
FORMS = {
    "plain": ["-fatbin", "--no-compress"],
    "lz4": ["-fatbin", "--compress-mode=speed"],
    "zstd": ["-fatbin", "--compress-mode=size"],
    "cubin": ["-cubin"],
}
# Seconds for all, so that one call on a machine that is lent gets its answers.
LIMIT = 510
# Smaller libraries have little to lose.
SMALLEST = 4 << 20


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGIN:6.1f} s  {text}", flush=True)


def run(
    command: list[str], seconds: float, environ: Mapping[str, str] | None = None
) -> tuple[str, str, str]:
    """Output, errors, and how it ended."""
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **(environ or {})},
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as e:
        output = e.stdout.decode() if isinstance(e.stdout, bytes) else e.stdout or ""
        return output, "", f"no end within {seconds:.0f} s"
    return done.stdout, done.stderr, "" if done.returncode == 0 else f"status {done.returncode}"


# ---- Cutting ----


def containers(path: Path) -> list[Range]:
    """The regions of GPU code."""
    found = read_library(path, Scope(headers_only=True))
    return [(region.span.start, region.span.end) for region in found.iter_regions()]


def cut(path: Path, target: Path, kinds: str) -> tuple[Cut | None, list[Range], str]:
    """Cut ``host`` code, ``gpu`` code or both; see main for the rest."""
    regions = containers(path) if "gpu" in kinds else []
    everything = [(0, path.stat().st_size)]
    try:
        # Without host code, all that is no container is needed.
        needed = [] if "host" in kinds else list(_between(regions, path.stat().st_size))
        done = cut_library(path, target, target.parent, needed, CutOptions(min_hole=4096), regions)
    except (CannotCompactError, NegativaError) as e:
        return None, everything, str(e)
    return done, regions, ""


def _between(ranges: list[Range], size: int) -> Iterator[Range]:
    position = 0
    for start, end in sorted(ranges):
        yield position, start
        position = max(position, end)
    yield position, size


def misses(logs: Path, regions: Mapping[str, list[Range]]) -> dict[str, tuple[int, int]]:
    """By library: pages of containers and other pages that came back."""
    found = {}
    for path in logs.glob(f"*{LOG_SUFFIX}"):
        log = read_misses(path)
        pages = [page * PAGE_SIZE for page, miss in log.pages.items() if miss.times]
        own = regions.get(log.name, [])
        inside = sum(any(start < p + PAGE_SIZE and p < end for start, end in own) for p in pages)
        if pages:
            found[log.name] = inside, len(pages) - inside
    return found


# ---- 1 and 2: what nvcc makes ----


def small_libraries(folder: Path, arch: str) -> None:
    compute = arch.replace("sm_", "compute_")
    forms = {
        **{name: [f"-arch={arch}", *flags] for name, flags in FORMS.items()},
        "ptx": [f"-arch={compute}", "-ptx"],
        "ptx in a fatbin": [f"-arch={compute}", f"-code={compute}", "-fatbin"],
    }
    files = []
    for name, flags in forms.items():
        file = folder / name.replace(" ", "-")
        subprocess.run(["nvcc", *flags, "-o", file, HERE / "kernels.cu"], check=True)
        files.append(str(file))
    images = folder / "images"
    source = str(HERE / "images.c")
    subprocess.run(["gcc", "-std=gnu11", "-O1", "-o", images, source, "-ldl"], check=True)
    for loading in ("LAZY", "EAGER"):
        output, errors, end = run([str(images), *files], 60, {"CUDA_MODULE_LOADING": loading})
        say(f"images, {loading}: {end or 'done'} {errors.strip()}")
        print(output, end="")
    script = "import ctypes, sys; print('%08x' % (ctypes.CDLL(sys.argv[1]).run() & 0xffffffff))"
    for name, flags in forms.items():
        if name in ("cubin", "ptx"):
            continue
        library = folder / f"lib{name.split()[0]}.so"
        kept = [flag for flag in flags if flag != "-fatbin"]
        command = ["nvcc", *kept, "-DLIBRARY", "-shared", "-Xcompiler", "-fPIC", "-o", str(library)]
        subprocess.run([*command, str(HERE / "kernels.cu")], check=True)
        target = folder / "cut" / library.name
        target.parent.mkdir(exist_ok=True)
        done, regions, reason = cut(library, target, "gpu")
        if done is None:
            say(f"{library.name}: {reason}")
            continue
        for loading in ("LAZY", "EAGER"):
            logs = folder / f"logs-{name.split()[0]}-{loading}"
            logs.mkdir()
            environ = {"CUDA_MODULE_LOADING": loading, "NEGATIVA_SPARE_LOG": str(logs)}
            results = []
            for path in (library, target):
                output, errors, end = run([sys.executable, "-c", script, str(path)], 60, environ)
                results.append(output.strip() or end + errors[-200:])
            brought = misses(logs, {library.name: regions}).get(library.name, (0, 0))
            say(
                f"{library.name:14} {loading:5} original {results[0]}, cut {results[1]}, "
                f"{done.removed:,} bytes gone, container pages back {brought[0]}"
            )


# ---- 3: PyTorch ----


def big_libraries(folder: Path, python: str) -> None:
    script = "import torch, pathlib; print(pathlib.Path(torch.__file__).parent.parent)"
    output, errors, end = run([python, "-c", script], 120)
    if end:
        say(f"{python} imports no torch: {errors[-300:]}")
        return
    site = Path(output.strip())
    originals = [
        path
        for path in site.rglob("*.so*")
        if path.is_file() and not path.is_symlink() and path.stat().st_size > SMALLEST
    ]
    passes = {"original": site}
    regions: dict[str, dict[str, list[Range]]] = {"original": {}}
    for kinds in ("gpu", "gpu+host"):
        tree = folder / f"site-{kinds}"
        # A tree of links; what is cut replaces its link.
        subprocess.run(["cp", "-as", f"{site}/.", tree], check=True)
        targets = [tree / path.relative_to(site) for path in originals]
        with ProcessPoolExecutor() as pool:
            rows = list(pool.map(cut, originals, targets, [kinds] * len(originals)))
        done = [row[0] for row in rows if row[0] is not None]
        before, after = sum(c.size_before for c in done), sum(c.size_after for c in done)
        say(
            f"{kinds}: {len(done)} libraries cut, {before / 1e6:,.0f} -> {after / 1e6:,.0f} MB, "
            f"{sum(c.holes for c in done):,} holes"
        )
        for path, (cut_, _, reason) in zip(originals, rows, strict=True):
            if cut_ is None and "nothing to remove" not in reason:
                say(f"  {path.name} stays: {reason}")
        passes[kinds] = tree
        regions[kinds] = {path.name: row[1] for path, row in zip(originals, rows, strict=True)}
    wanted: dict[str, dict[str, object]] = {}
    for loading in ("LAZY", "EAGER"):
        for name, tree in passes.items():
            left = LIMIT - (time.monotonic() - BEGIN)
            if left < 20:
                say(f"{name:9} {loading:5} not run: the time is over")
                continue
            logs = folder / f"logs-{name}-{loading}"
            logs.mkdir()
            words = [python, str(HERE / "torch_pass.py")]
            if name != "gpu":
                words.append("more")
            environ = {
                "PYTHONPATH": str(tree),
                "CUDA_MODULE_LOADING": loading,
                "NEGATIVA_SPARE_LOG": str(logs),
            }
            output, errors, end = run(words, min(150, left), environ)
            try:
                facts = json.loads(output.splitlines()[-1])
            except (IndexError, ValueError):
                say(f"{name:9} {loading:5} FAILED: {end} {errors[-400:]}")
                continue
            results = facts.pop("results")
            times = facts.pop("times")
            wanted.setdefault(loading, results)
            # From the original's operations that ended; a pass without `more` has fewer.
            differ = {k: v for k, v in results.items() if wanted[loading].get(k, v) != v}
            say(f"{name:9} {loading:5} {json.dumps(facts)} {end}")
            say(f"    results {f'DIFFER: {differ}' if differ else 'as the original'}")
            say(f"    seconds {json.dumps(times)}")
            for library, (gpu, host) in sorted(misses(logs, regions[name]).items()):
                say(f"    {library:40} container pages back {gpu:6}, others {host:6}")
            if end and errors.strip():
                say(f"    {errors.strip()[-400:]}")
    output, _, _ = run(["sh", "-c", "dmesg 2>&1 | grep -i xid | tail -5"], 10)
    say(f"Xid in dmesg: {output.strip() or 'none, or not readable'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("python")
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--to", type=Path, help="folder on a file system with 10 GB left")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.to) as scratch:
        small_libraries(Path(scratch), arguments.arch)
        big_libraries(Path(scratch), arguments.python)


if __name__ == "__main__":
    main()
