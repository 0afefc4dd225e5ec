"""The HTML report of a large run in Chromium: its size, when it can be used, and its keys.

Reads all libraries of a site-packages folder, such as PyTorch's with NVIDIA's, and makes up the
use: a test asks for one kernel of every so many regions. ``--times`` takes the libraries several
times under other paths. CPU times are those of the page's main thread; a busy machine stretches
the other ones.

Run: python benchmarks/html_page.py SITE_PACKAGES [--times 11]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from measuring import print_load
from selenium import webdriver

sys.path.insert(0, str(Path(__file__).parents[1]))

from pytest_negativa.analysis.analyze import analyze
from pytest_negativa.analysis.report import build_report
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.installed.libraries import find_libraries
from pytest_negativa.models.analysis import AnalyzedLibrary, ReportContents
from pytest_negativa.models.library import LibraryMap, Scope
from pytest_negativa.models.outcomes import Outcome, TestResult
from pytest_negativa.models.trace import Context, LibraryUsage, Phase
from pytest_negativa.reporting.html.render import render_html
from tests.support.analyses import settings
from tests.support.usages import Launched, library_usage, usage_of, with_launches

_TESTS = 59
_USED = 40  # Of so many regions, a test uses one.
_LOADS = 5
_SEARCHED = ("elements", "kernels")
_TYPED = "gemm_f16"

# From the key to the end of the frame that shows its effect.
_KEY = """
const [text, done] = arguments, input = document.querySelector("input[type=search]");
const channel = new MessageChannel(), start = performance.now();
channel.port1.onmessage = () => done(performance.now() - start);
input.value = text;
input.dispatchEvent(new Event("input"));
requestAnimationFrame(() => channel.port2.postMessage(0));
"""
_SEARCH_DONE = """
const done = arguments[0];
(function again() {
  if (document.querySelector("output").textContent.startsWith("…")) setTimeout(again, 5);
  else done();
})();
"""
_LOADED = """
const done = arguments[0];
(function again() {
  const [mark] = performance.getEntriesByName("interactive");
  if (mark) done(mark.startTime); else setTimeout(again, 20);
})();
"""


def _contents(site: Path, times: int, folder: Path) -> ReportContents:
    options = settings(folder)
    paths = (path for path in find_libraries(str(site)).paths if ".so" in path.name)
    uses = [_use(read_library(path, Scope(devices=("9.0",)))) for path in paths]
    names = [f"tests/test_{n % 9}.py::test_operation_{n}" for n in range(_TESTS)]
    contexts = tuple(Context(phase=Phase.CALL, nodeid=name) for name in names)
    usage = msgspec.structs.replace(usage_of(*uses), contexts=contexts)
    analysis = analyze(usage, options)
    libraries = tuple(
        _named(library, copy) for copy in range(times) for library in analysis.libraries
    )
    analysis = replace(analysis, libraries=libraries)
    kernels = sorted({one.name for library in libraries for one in library.plan.used_kernels})
    launches = (
        Launched(name, context=(number + more) % _TESTS, launches=more + 1, gpu_ns=9000)
        for number, name in enumerate(kernels)
        for more in range(5)
    )
    report = build_report(analysis, options, run_id="run", directory="run", files=())
    tests = tuple(TestResult(nodeid=n, outcome=Outcome.PASSED, duration=0.5) for n in names)
    usage = with_launches(usage, *launches)
    return ReportContents(report, libraries, usage, tests, (report,) * 3)


def _use(library_map: LibraryMap) -> LibraryUsage:
    """A kernel of the first code for this GPU in every so many regions."""
    images = {}
    for region in list(library_map.iter_regions())[::_USED]:
        for element in region.elements:
            kernels = [one.name for one in library_map.kernels_of(element.content)]
            if kernels and str(element.arch) == "sm_90":
                images[region.span.start] = kernels[:1]
                break
    return library_usage(library_map, images)


def _named(library: AnalyzedLibrary, copy: int) -> AnalyzedLibrary:
    if not copy:
        return library
    identity = library.plan.library
    path = f"/copy{copy}{identity.path}"
    plan = msgspec.structs.replace(
        library.plan, library=msgspec.structs.replace(identity, path=path)
    )
    return replace(library, plan=plan)


def _browser(folder: Path) -> Any:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage"):
        options.add_argument(f"--{argument}")
    options.add_argument(f"--user-data-dir={folder / 'profile'}")
    service = webdriver.ChromeService(
        shutil.which("chromedriver"), env={**os.environ, "HOME": str(folder)}
    )
    driver = webdriver.Chrome(options=options, service=service)
    driver.set_script_timeout(120)
    driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
    return driver


def _cpu(driver: Any) -> float:
    """CPU time of the page's main thread until now, in ms."""
    metrics = driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return 1000 * next(float(m["value"]) for m in metrics if m["name"] == "TaskDuration")


def _load(driver: Any) -> tuple[float, float]:
    """Load the page anew; the time until it can be used, and the CPU time, in ms."""
    driver.refresh()
    time = float(driver.execute_async_script(_LOADED))
    return time, _cpu(driver)  # It counts from the page's beginning.


def _keys(driver: Any) -> list[tuple[float, float]]:
    """Time and CPU time of each key of a word, until the frame that shows its effect."""
    times = []
    for length in range(1, len(_TYPED) + 1):
        before = _cpu(driver)
        time = float(driver.execute_async_script(_KEY, _TYPED[:length]))
        times.append((time, _cpu(driver) - before))
        driver.execute_async_script(_SEARCH_DONE)
    return times


def _spread(times: Sequence[tuple[float, float]]) -> str:
    texts = (
        f"{min(column):.0f} to {max(column):.0f} ms, median {statistics.median(column):.0f} ms"
        for column in zip(*times, strict=True)
    )
    return "{}; CPU time {}".format(*texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=Path, help="folder with the libraries")
    parser.add_argument("--times", type=int, default=1, help="how often to take them (default: 1)")
    parser.add_argument("--keep", type=Path, help="keep the page in this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        contents = _contents(arguments.site, arguments.times, folder)
        elements = sum(len(one.plan.decisions) for one in contents.libraries)
        kernels = sum(row.kernels for row in contents.report.libraries)
        print(f"{elements:,} elements, {kernels:,} kernels, {len(contents.libraries)} libraries")
        start = time.process_time()
        page = render_html(contents)
        print(f"page: {len(page) / 1e6:.2f} MB, made in {time.process_time() - start:.1f} s")
        file = arguments.keep or folder / "report.html"
        file.write_bytes(page)
        print_load()
        driver = _browser(folder)
        try:
            address = file.resolve().as_uri()
            driver.get(f"{address}#/")
            loads = [_load(driver) for _ in range(_LOADS)]
            print(f"can be used after {_spread(loads)} ({_LOADS} loads)")
            for table in _SEARCHED:
                driver.get(f"{address}#/{table}")
                _load(driver)
                print(f"key in the search of {table}: {_spread(_keys(driver))}")
        finally:
            driver.quit()
        print_load()


if __name__ == "__main__":
    main()
