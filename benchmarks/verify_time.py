"""Cost of a proof: suites of a minute on the stand-in for a GPU, plain, traced, and proved.

The suites are thirty tests of two seconds, and a hundred small ones: alone, with three tests that
fail at random, half of the time, and with ten more that always fail. Each row gives the wall time
of the whole command, its ratio to that of plain pytest, the CPU time of all its processes, and the
verdict. With a folder, the rows are those of its suite, on this machine's GPU.

Run: python -m benchmarks.verify_time [SUITE_FOLDER] [--workers 0,4] [--times 1] [--more 1]
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.verified import VerifiedProject

_SLEEPING = """
@pytest.mark.parametrize("number", range({count}))
def test_sleeps(number):
    use(LIB, number % 3)
    time.sleep({seconds})
"""
_FLAKY = """
import random

@pytest.mark.parametrize("number", range(3))
def test_flaky(number):
    use(LIB, 0)
    time.sleep({seconds})
    assert random.random() < 0.5
"""
_FAILING = """
@pytest.mark.parametrize("number", range(10))
def test_fails(number):
    use(LIB, 0)
    time.sleep({seconds})
    assert False
"""
_MORE = {"none flaky": "", "3 flaky": _FLAKY, "3 flaky, 10 fail": _FLAKY + _FAILING}
# Tests, and seconds of each.
_SUITES = ((30, 2.0), (100, 0.01))
_COMMANDS = {
    "plain": (),
    "traced": ("--negativa",),
    "traced and proved": ("--negativa", "--negativa-verify"),
}


@dataclass(frozen=True)
class _Suite:
    name: str
    folder: Path
    environ: Mapping[str, str]


def _stand_ins(folder: Path, more: int) -> Iterator[_Suite]:
    for tests, seconds in _SUITES:
        count = more * tests
        for words, others in _MORE.items():
            text = (_SLEEPING + others).format(count=count, seconds=seconds)
            project = VerifiedProject(folder / f"{count}-{len(others)}", text)
            yield _Suite(f"{count} of {seconds:g} s, {words}", project.folder, project.environ)


def _run(suite: _Suite, words: tuple[str, ...]) -> tuple[float, float, str]:
    """Wall time and CPU time, in seconds, and the verdict."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *words],
        cwd=suite.folder,
        env=suite.environ,
        capture_output=True,
        text=True,
        check=False,
    )
    wall = time.monotonic() - begin
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{suite.name} {words}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    verdicts = [line for line in done.stdout.splitlines() if "PROVED:" in line]
    return wall, cpu, verdicts[-1].partition(":")[0] if verdicts else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", type=Path, nargs="?")
    parser.add_argument("--workers", default="0,4")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--more", type=int, default=1, help="times as many tests, for workers")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        given: Path | None = arguments.suite
        suites = [*_stand_ins(Path(name), arguments.more)]
        if given is not None:
            suites = [_Suite(given.name, given, {**os.environ, "NEGATIVA_DIR": f"{name}/runs"})]
        print(f"{'suite':32} {'-n':>3} {'command':18} {'wall':>8} {'ratio':>6} {'CPU':>8}  verdict")
        for suite in suites:
            for workers in arguments.workers.split(","):
                spread = ("-n", workers) if int(workers) else ()
                plain = 0.0
                for label, words in _COMMANDS.items():
                    found = [_run(suite, (*words, *spread)) for _ in range(arguments.times)]
                    walls, cpus, verdicts = zip(*found, strict=True)
                    wall, cpu = statistics.median(walls), statistics.median(cpus)
                    plain = plain or wall
                    print(
                        f"{suite.name:32} {workers:>3} {label:18} {wall:6.1f} s {wall / plain:6.2f}"
                        f" {cpu:6.1f} s  {', '.join(sorted({*verdicts}))}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
