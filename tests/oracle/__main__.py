"""Compares an installed pytest-negativa with what was recorded; see CONTRIBUTING.md."""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.oracle.cases import CASES, WHEEL_CASES
from tests.oracle.compare import RECORDED, differences, load, save, table
from tests.oracle.product import find_product, run_case


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.oracle", description=__doc__)
    parser.add_argument("action", choices=["check", "record", "list"])
    parser.add_argument("case", nargs="*", help="only these cases")
    parser.add_argument("--wheels", action="store_true", help="the cases of real wheels, too")
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="interpreter")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument("--all", action="store_true", help="show all differences of a case")
    arguments = parser.parse_intermixed_args(words)
    cases = {**CASES, **(WHEEL_CASES if arguments.wheels else {})}
    if unknown := set(arguments.case) - set(CASES | WHEEL_CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(sorted(cases))}")
    if arguments.case:
        cases = {name: {**CASES, **WHEEL_CASES}[name] for name in arguments.case}
    if arguments.action == "list":
        for name, case in cases.items():
            print(f"{name:12} {(case.__doc__ or '').splitlines()[0]}")
        return 0
    # Not resolved: in a virtual environment, the interpreter is a link.
    product = find_product(arguments.python.absolute())
    begin = time.monotonic()
    found: list[Any] = []

    def run(name: str) -> tuple[str, Any]:
        return name, run_case(name, cases[name], product)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        for name, noted in pool.map(run, cases):
            found += differences(name, load(name), noted)
            if arguments.action == "record":
                save(name, noted)
    if arguments.action == "record" and not arguments.case:
        for path in _forgotten():
            path.unlink()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    if found:
        print(table(found, 0 if arguments.all else 40))
    print(
        f"{len(cases)} cases, {len(found)} differences; {time.monotonic() - begin:.0f} s, "
        f"{used.ru_utime + used.ru_stime:.0f} s of CPU"
    )
    return 1 if found and arguments.action == "check" else 0


def _forgotten() -> Iterator[Path]:
    """Results of cases that are no more."""
    for path in RECORDED.glob("*.json"):
        if path.stem not in CASES | WHEEL_CASES:
            yield path


if __name__ == "__main__":
    sys.exit(main())
