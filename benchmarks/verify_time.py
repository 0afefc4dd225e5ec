"""What verifying costs: a suite traced and then verified, and a process with the redirect.

Two measures, on a GPU with PyTorch:

- suite: the time that pytest itself reports for examples/pytorch (or another folder), traced and
  on copies that are already there, in turn;
- redirect: a Python process that imports torch and uses the GPU, with and without the redirect,
  in turn; both on the originals' own bytes, so that only the redirect differs.

Run: python benchmarks/verify_time.py [SUITE_FOLDER] [--pairs 5]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from pytest_negativa.processes.redirect import (
    copy_path,
    make_table,
    redirect_environment,
    write_table,
)
from pytest_negativa.storage.results import load_plans
from pytest_negativa.storage.runs import RunsFolder

_PROGRAM = "import torch; torch.zeros(8, device='cuda').sum().item()"


def _session(folder: Path, *flags: str) -> float:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore"]
    done = subprocess.run(
        [*command, *flags], cwd=folder, capture_output=True, text=True, check=False
    )
    found = re.search(r"passed.* in ([0-9.]+)s", done.stdout)
    if done.returncode != 0 or found is None:
        raise SystemExit(f"{flags}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return float(found[1])


def _process(environ: Mapping[str, str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", _PROGRAM], env=environ, check=True)
    return time.perf_counter() - start


def _in_turn(name: str, pairs: int, one: Callable[[], float], other: Callable[[], float]) -> None:
    before: list[float] = []
    after: list[float] = []
    for number in range(pairs):
        # Whichever comes first has the colder machine.
        for task, times in ((one, before), (other, after))[:: 1 if number % 2 else -1]:
            times.append(task())
    a, b = statistics.median(before), statistics.median(after)
    spread = f"{min(before):.2f}-{max(before):.2f} s, {min(after):.2f}-{max(after):.2f} s"
    print(f"{name}: {a:.3f} s -> {b:.3f} s, {b - a:+.3f} s, ratio {b / a:.3f}  ({spread})")


def main() -> None:
    parser = argparse.ArgumentParser()
    default = Path(__file__).parents[1] / "examples" / "pytorch"
    parser.add_argument("suite", type=Path, nargs="?", default=default)
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    suite: Path = arguments.suite

    with tempfile.TemporaryDirectory() as name:
        runs = f"--negativa-dir={name}/runs"
        _session(suite, "--negativa", "--negativa-verify", runs)  # Warm, and the copies are there.
        _in_turn(
            "suite, traced -> verified",
            arguments.pairs,
            lambda: _session(suite, "--negativa", runs),
            lambda: _session(suite, "--negativa-verify", runs),
        )
        root = Path(name, "same").resolve()
        originals = [p.library.path for p in load_plans(RunsFolder(Path(name, "runs")).find())]
        for original in originals:
            target = Path(copy_path(root, original))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(original, target)
        table = Path(name, "table")
        write_table(make_table(root, originals), table)
        Path(name, "logs").mkdir()
        redirected = {
            **os.environ,
            **redirect_environment(os.environ, table, Path(name, "logs")),
        }
        _process(redirected)
        _in_turn(
            f"process, plain -> {len(originals)} libraries redirected",
            arguments.pairs * 2,
            lambda: _process(os.environ),
            lambda: _process(redirected),
        )


if __name__ == "__main__":
    main()
