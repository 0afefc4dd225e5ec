"""The paper's workloads, traced, verified and measured, and its tables with our figures.

See README.md in this folder.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec.structs import replace
from paper_catalog import WORKLOADS
from paper_records import (
    BENCHMARK_FILE,
    RESULTS,
    Benchmark,
    read_benchmark,
    read_figures,
    write_json,
)
from paper_steps import WORK, Runner
from paper_tables import render

from pytest_negativa.models.measurement import Loading

_QUICK_PAIRS, _FULL_PAIRS = 2, 5
_QUICK_BUDGET_S = 540.0
_EAGER_FACTOR = 1.3
_SIZES_S = 10.0
# Eager runs first: there the paper's effects on memory and time are to be expected.
_LOADINGS = {
    "both": (Loading.EAGER, Loading.LAZY),
    "eager": (Loading.EAGER,),
    "lazy": (Loading.LAZY,),
}
_PACKAGES = ("pytest-negativa", "torch", "torchvision", "transformers", "jax", "jaxlib")


def main() -> None:
    arguments = _parse()
    if arguments.render is not None:
        _finish(arguments.render, read_benchmark(arguments.render))
        return
    if arguments.resume is not None:
        output = arguments.resume.resolve()
        benchmark = _resume(arguments, output)
    else:
        output = arguments.output or Path(tempfile.mkdtemp(prefix="negativa-paper-"))
        output = output.resolve()
        if (output / RESULTS).exists():
            raise SystemExit(f"{output}: has results already; name another folder, or see --resume")
        output.mkdir(parents=True, exist_ok=True)
        print(f"Results in {output}", file=sys.stderr)
        benchmark = _run(arguments, output)
    _finish(output, benchmark)
    if _is_left_out(benchmark):
        command = f"python benchmarks/paper --resume {shlex.quote(str(output))}"
        print(f"Some measurements were left out. Go on with: {command}", file=sys.stderr)
    if any(step.problem and step.status is not None for step in benchmark.steps):
        raise SystemExit(1)


def _parse() -> argparse.Namespace:
    names = [workload.name for workload in WORKLOADS]
    parser = argparse.ArgumentParser(prog="benchmarks/paper", description=(__doc__ or "").strip())
    parser.add_argument(
        "--only", metavar="WORKLOAD", action="append", choices=names,
        help=f"run this one, may be repeated: {', '.join(names)}",
    )  # fmt: skip
    parser.add_argument("--output", metavar="DIR", type=Path, help="default: a temporary folder")
    parser.add_argument(
        "--quick", action="store_true",
        help=f"small workloads, {_QUICK_PAIRS} pairs, and a budget of {_QUICK_BUDGET_S:.0f} s",
    )  # fmt: skip
    parser.add_argument("--pairs", type=int, help=f"pairs to measure (default: {_FULL_PAIRS})")
    parser.add_argument("--loading", choices=list(_LOADINGS), default="both")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="begin no measurement that "
                        "would likely end later")  # fmt: skip
    parser.add_argument(
        "--jobs", type=int, default=min(4, max(1, (os.cpu_count() or 1) // 4)),
        help="workloads to trace and verify at a time; measuring is done one by one",
    )  # fmt: skip
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a dry run")
    parser.add_argument("--keep", action="store_true", help="keep traces, plans and copies")
    parser.add_argument(
        "--resume", metavar="DIR", type=Path,
        help="only measure what an earlier command left out for lack of time, with its results in "
        "DIR",
    )  # fmt: skip
    parser.add_argument(
        "--render", metavar="DIR", type=Path, help="only make tables, from the results in DIR"
    )
    return parser.parse_args()


def _run(arguments: argparse.Namespace, output: Path) -> Benchmark:
    start = time.monotonic()
    quick = arguments.quick
    wanted = [w for w in WORKLOADS if not arguments.only or w.name in arguments.only]
    missing = {w.name: w.missing() for w in wanted}
    skipped = {name: reason for name, reason in missing.items() if reason is not None}
    for name, reason in skipped.items():
        print(f"{name}: skipped, {reason}", file=sys.stderr)
    runners = [
        Runner(w, output, quick=quick, device=arguments.device, together=arguments.jobs > 1)
        for w in wanted
        if w.name not in skipped
    ]
    benchmark = Benchmark(
        workloads=tuple(w.name for w in wanted),
        skipped=skipped,
        versions=_versions(),
        quick=quick,
        pairs=arguments.pairs or (_QUICK_PAIRS if quick else _FULL_PAIRS),
        seconds=0.0,
        steps=(),
    )
    try:
        with ThreadPoolExecutor(arguments.jobs) as pool:
            list(pool.map(Runner.prepare, runners))
        todo = list(_in_order(runners, _LOADINGS[arguments.loading]))
        return _measure(arguments, output, benchmark, runners, todo, start)
    finally:
        _clean(arguments, output)


def _resume(arguments: argparse.Namespace, output: Path) -> Benchmark:
    start = time.monotonic()
    benchmark = read_benchmark(output)
    runners = [
        Runner(w, output, quick=benchmark.quick, device=arguments.device, together=False)
        for w in WORKLOADS
        if w.name in benchmark.workloads and w.name not in benchmark.skipped
    ]
    left_out = {(s.workload, s.name) for s in benchmark.steps if s.is_left_out}
    for runner in runners:
        runner.steps += [
            s for s in benchmark.steps if s.workload == runner.workload.name and not s.is_left_out
        ]
    todo = [
        (runner, loading)
        for runner, loading in _in_order(runners, _LOADINGS["both"])
        if (runner.workload.name, runner.name_of(loading)) in left_out
    ]
    if todo and not (output / WORK).exists():
        raise SystemExit(f"{output}: its {WORK} folder is gone; start again with another folder")
    try:
        return _measure(arguments, output, benchmark, runners, todo, start)
    finally:
        _clean(arguments, output)


def _measure(
    arguments: argparse.Namespace,
    output: Path,
    before: Benchmark,
    runners: Sequence[Runner],
    todo: Sequence[tuple[Runner, Loading]],
    start: float,
) -> Benchmark:
    """Measure, as far as the budget goes."""
    budget = arguments.budget or (_QUICK_BUDGET_S if before.quick else float("inf"))

    def save() -> Benchmark:
        # After each step that takes long: what is known then outlives the end of this process.
        benchmark = replace(
            before,
            seconds=before.seconds + time.monotonic() - start,
            steps=tuple(step for runner in runners for step in runner.steps),
        )
        write_json(output / BENCHMARK_FILE, benchmark)
        return benchmark

    for runner, loading in todo:
        runner.leave_out(runner.name_of(loading), "the benchmark ended before")
    benchmark = save()
    for runner, loading in todo:
        runner.forget(runner.name_of(loading))
        left = budget - (time.monotonic() - start)
        needed = _estimate(runner, output, loading, before.pairs)
        if needed > left:
            reason = f"would take about {needed:.0f} s, and {max(left, 0):.0f} s are left"
            runner.leave_out(runner.name_of(loading), reason)
        else:
            runner.measure(loading, before.pairs)
        benchmark = save()
    return benchmark


def _is_left_out(benchmark: Benchmark) -> bool:
    return any(step.is_left_out for step in benchmark.steps)


def _clean(arguments: argparse.Namespace, output: Path) -> None:
    """Remove traces and copies, unless a later command needs them."""
    has_figures = (output / BENCHMARK_FILE).exists()
    if not arguments.keep and not (has_figures and _is_left_out(read_benchmark(output))):
        shutil.rmtree(output / WORK, ignore_errors=True)


def _in_order(
    runners: Sequence[Runner], loadings: Sequence[Loading]
) -> Iterator[tuple[Runner, Loading]]:
    """What to measure, by importance: time may run out.

    First one workload with all ways of loading, then the first way of loading for all.
    """
    able = [runner for runner in runners if runner.measurable]
    for loading in loadings:
        yield from ((runner, loading) for runner in able[:1])
    for loading in loadings:
        yield from ((runner, loading) for runner in able[1:])


def _estimate(runner: Runner, output: Path, loading: Loading, pairs: int) -> float:
    """Seconds that a measurement takes, by how long the workload took when verified."""
    figures = read_figures(output, runner.workload.name)
    verdicts = figures.verdicts.values() if figures is not None else ()
    one = min((r.seconds for v in verdicts for r in v.rounds), default=10.0)
    if loading is Loading.EAGER:
        one *= _EAGER_FACTOR
    # A pair warms up; and the libraries of both variants are packed, to tell what that takes.
    return one * 2 * (pairs + 1) + _SIZES_S


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _finish(output: Path, benchmark: Benchmark) -> None:
    known = [read_figures(output, name) for name in benchmark.workloads]
    text = render(benchmark, [figures for figures in known if figures is not None])
    (output / "tables.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
