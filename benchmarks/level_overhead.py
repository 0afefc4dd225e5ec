"""What each level of tracing costs: the tests of a suite, ten rounds at each level, in turns.

Each level has one pytest process, which runs all tests ``--repeat`` times a round. The processes
take turns, so one of them works at a time. Before, all run the tests once at the same time, which
loads code and is not counted: tracing_overhead.py measures starts. "operators" is level range while
emit_nvtx of torch.autograd.profiler names PyTorch's operators; it is compared with emit_nvtx alone.

Run: python benchmarks/level_overhead.py [SUITE_FOLDER] [--rounds 10] [--repeat 10]
[--levels lookup launch]
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_PYTORCH = Path(__file__).parents[1] / "examples" / "pytorch"
_LEVELS = {
    "untraced": (),
    "lookup": ("--negativa", "--negativa-level=lookup"),
    "launch": ("--negativa", "--negativa-level=launch"),
    "range": ("--negativa", "--negativa-level=range"),
    "emit_nvtx": (),
    "operators": ("--negativa", "--negativa-level=range"),
}
_WITH_OPERATORS = ("emit_nvtx", "operators")
_PLUGIN = """
import contextlib
import os
import time
from pathlib import Path

import pytest

FOLDER = Path(os.environ["ROUNDS_FOLDER"])
NUMBER, PROCESSES, ROUNDS, REPEAT = map(int, os.environ["ROUNDS"].split())
START = 0.0


def pytest_generate_tests(metafunc):
    metafunc.fixturenames.insert(0, "turn")
    metafunc.parametrize("turn", range(1 + ROUNDS * REPEAT), indirect=True, scope="session")


@pytest.fixture(scope="session")
def turn(request):
    global START
    if request.param == 0:
        yield
        (FOLDER / f"warm{NUMBER}").touch()
        return
    number, repetition = divmod(request.param - 1, REPEAT)
    place = number * PROCESSES + NUMBER
    if repetition == 0:
        while not (FOLDER / str(place)).exists() or len(list(FOLDER.glob("warm*"))) < PROCESSES:
            time.sleep(0.005)
        START = time.perf_counter()
    yield
    if repetition == REPEAT - 1:
        took = time.perf_counter() - START
        with (FOLDER / f"times{NUMBER}").open("a") as file:
            file.write(f"{took}\\n")
        (FOLDER / str(place + 1)).touch()


@pytest.fixture(autouse=True)
def operators(turn):
    named = contextlib.nullcontext()
    if os.environ["ROUNDS_LEVEL"] in ("emit_nvtx", "operators"):
        import torch

        named = torch.autograd.profiler.emit_nvtx()
    with named:
        yield
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", nargs="?", type=Path, default=_PYTORCH)
    parser.add_argument("--rounds", type=int, default=10, help="rounds of each (default: 10)")
    parser.add_argument("--repeat", type=int, default=10, help="of all tests (default: 10)")
    parser.add_argument("--levels", nargs="+", choices=_LEVELS, default=list(_LEVELS))
    parser.add_argument("--seconds", type=float, help="report the rounds until then, and stop")
    parser.add_argument("-k", default="", help="run only tests that match, as pytest's -k")
    arguments = parser.parse_args()
    levels = list(dict.fromkeys(["untraced", *arguments.levels]))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "level_rounds.py").write_text(_PLUGIN)
        started = []
        for number, level in enumerate(levels):
            environ = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([name, os.environ.get("PYTHONPATH", "")]),
                "ROUNDS_FOLDER": name,
                "ROUNDS": f"{number} {len(levels)} {arguments.rounds} {arguments.repeat}",
                "ROUNDS_LEVEL": level,
            }
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
            command += ["-p", "level_rounds", "-k", arguments.k, *_LEVELS[level]]
            if _LEVELS[level]:
                # The suite's threshold is for all of its tests.
                command += [f"--negativa-dir={folder / level}", "--negativa-min-used-kernels=0"]
            with (folder / f"{level}.txt").open("w") as output:
                started.append(
                    subprocess.Popen(
                        command,
                        cwd=arguments.suite,
                        env=environ,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        (folder / "0").touch()
        end = time.monotonic() + (arguments.seconds or math.inf)
        running = dict(zip(levels, started, strict=True))
        failed = None
        while running and failed is None and time.monotonic() < end:
            time.sleep(0.1)
            running = {level: p for level, p in running.items() if p.poll() is None}
            # The others would wait for it.
            failed = next(
                (level for level, p in zip(levels, started, strict=True) if p.returncode), None
            )
        for process in running.values():
            process.kill()
            process.wait()
        if failed is not None:
            raise SystemExit((folder / f"{failed}.txt").read_text()[-3000:])
        times = {
            level: [float(line) for line in path.read_text().split()] if path.exists() else []
            for number, level in enumerate(levels)
            for path in [folder / f"times{number}"]
        }
        rounds = min(map(len, times.values()))
        if rounds == 0:
            logs = sorted(folder.glob("*.txt"))
            tails = [f"{log.name}: {log.read_text()[-600:]}" for log in logs]
            raise SystemExit("\n".join(["no whole round in that time", *tails]))
        times = {level: found[:rounds] for level, found in times.items()}
    for level, seconds in times.items():
        named = level in _WITH_OPERATORS and "emit_nvtx" in times
        plain = times["emit_nvtx" if named else "untraced"]
        ratios = [one / other for one, other in zip(seconds, plain, strict=True)]
        print(
            f"{level:10} {statistics.median(seconds):.3f} s a round, "
            f"median of ratios {statistics.median(ratios):.3f} "
            f"(min {min(ratios):.3f}, max {max(ratios):.3f}), {len(ratios)} pairs"
        )


if __name__ == "__main__":
    main()
