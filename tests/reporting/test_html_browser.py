"""The HTML report in Chromium: pages, tables, the map, hostile names, keys, accessibility."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pytest_negativa.analysis.analyze import analyze
from pytest_negativa.analysis.report import build_report
from pytest_negativa.models.analysis import ReportContents
from pytest_negativa.models.coverage import KernelCoverage, LibraryCoverage
from pytest_negativa.models.outcomes import Outcome, TestResult
from pytest_negativa.models.pages import HostLibrary, HostUsage
from pytest_negativa.models.plan import KernelUse
from pytest_negativa.models.report import ProofRow
from pytest_negativa.models.spans import Span
from pytest_negativa.models.trace import Context, Phase
from pytest_negativa.reporting.html.render import render_html
from tests.support.analyses import settings, used
from tests.support.code_files import planned_files
from tests.support.libraries import QUICKSTART_LIBRARY
from tests.support.usages import Launched, with_launches

webdriver = pytest.importorskip("selenium.webdriver")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver"),
]

HOSTILE = "</script><img src=x onerror=window.hacked=1>"
MULTIPLY = "void matrices::multiply<16>(float const*, float const*, float*, int, int, int)"
MANY = 20_000
PAGES = (
    "", "libraries", "elements", "kernels?q=mul", "tests", "library/0", "element/3", "kernel/0",
    "template/0", "test/0", "map/0/sm_90", "nowhere/7",
)  # fmt: skip


class Page:
    """The report in a window of Chromium."""

    def __init__(self, driver: Any, address: str) -> None:
        self.driver = driver
        self.address = address

    def open(self, route: str = "", *, width: int = 1280, dark: bool = False) -> None:
        """Load the page anew, and wait until it is drawn."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [theme]})
        self.driver.get("about:blank")
        self.driver.get(f"{self.address}#/{route}")
        self.wait("performance.getEntriesByName('interactive').length")

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def wait(self, condition: str) -> None:
        """Wait until an expression is true; pytest's own limit ends a wait in vain."""
        self.driver.execute_async_script(
            "const done = arguments[0];"
            f"(function again() {{ if ({condition}) done(); else setTimeout(again, 20); }})()"
        )

    def press(self, *keys: str) -> None:
        webdriver.ActionChains(self.driver).send_keys(*keys).perform()

    @property
    def hash(self) -> str:
        return str(self.run("return location.hash"))

    def rows(self) -> list[str]:
        """The first cells of the first table."""
        found: list[str] = self.run(
            "return [...document.querySelector('tbody').querySelectorAll('tr:not(.gap)')]"
            ".map((row) => row.cells[0].textContent)"
        )
        return found

    def search(self, text: str) -> None:
        self.run(
            "const input = document.querySelector('input[type=search]');"
            "input.value = arguments[0]; input.dispatchEvent(new Event('input'))",
            text,
        )
        self.wait("!document.querySelector('output').textContent.startsWith('…')")

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> ReportContents:
    """The quickstart's library with hostile names, launches, many kernels and three saved runs."""
    folder = tmp_path_factory.mktemp("contents")
    options = settings(folder)
    usage = used(QUICKSTART_LIBRARY, regions=(0, 1))
    analysis = analyze(usage, options)
    (library,) = analysis.libraries
    hostile_test = Context(phase=Phase.CALL, nodeid=f"tests/test_a.py::test[{HOSTILE}]")
    uses = (*library.plan.used_kernels, KernelUse(HOSTILE, hostile_test))
    many = tuple(f"kernel_{number:05}" for number in range(MANY))
    plan = replace(
        library.plan,
        used_kernels=uses,
        unused_kernels=(*library.plan.unused_kernels, *many),
        library=replace(library.plan.library, path=f"/opt/{HOSTILE}/libquickstart.so"),
        notes=(HOSTILE,),
    )
    files = planned_files({"k/a.cubin": 400}, {f"{HOSTILE}.cubin": 600}, distribution=HOSTILE)
    analysis = replace_fields(analysis, libraries=(replace_fields(library, plan=plan), files))
    report = build_report(analysis, options, run_id=HOSTILE, directory="run", files=())
    report = replace(report, warnings=(HOSTILE,), crossed=(HOSTILE,), not_covered=(HOSTILE,) * 4)
    usage = with_launches(
        replace(usage, contexts=(*usage.contexts, hostile_test)),
        *(Launched(use.name, context=1, launches=3) for use in uses),
        Launched(HOSTILE, context=0, launches=1_990, gpu_ns=4_000_000),
        Launched(HOSTILE, context=0, launches=10, gpu_ns=1_500, ranges=("outer", HOSTILE)),
    )
    nodeids = ("tests/test_a.py::test_b", str(hostile_test.nodeid), "tests/test_a.py::test_idle")
    tests = (
        *(TestResult(nodeid=n, outcome=Outcome.PASSED, duration=0.5) for n in nodeids),
        TestResult(nodeid="tests/test_a.py::test_skipped", outcome=Outcome.SKIPPED, duration=0),
    )
    history = tuple(
        replace(report, run_id=f"2026112{n}T010101Z-00000{n}", libraries=report.libraries[: n or 1])
        for n in range(3)
    )
    host = HostUsage(
        processors=(),
        processes={"run": 1},
        libraries=(
            HostLibrary(
                sha256="0",
                size=9000,
                build_id=None,
                paths=(f"/opt/{HOSTILE}",),
                watched=(Span(0, 8192),),
                touched=(Span(4096, 8192),),
            ),
        ),
        incomplete=(HOSTILE,),
    )
    return ReportContents(report, analysis.libraries, usage, tests, history, host)


@pytest.fixture(scope="module")
def page(contents: ReportContents, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("browser")
    file = folder / "report.html"
    file.write_bytes(render_html(contents))
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage"):
        options.add_argument(f"--{argument}")
    options.add_argument(f"--user-data-dir={folder / 'profile'}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # Chromium writes below its home.
    service = webdriver.ChromeService(DRIVER, env={**os.environ, "HOME": str(folder)})
    driver = webdriver.Chrome(options=options, service=service)
    driver.set_script_timeout(60)
    # A window without a screen never has the focus, and sends no events of it.
    driver.execute_cdp_cmd("Emulation.setFocusEmulationEnabled", {"enabled": True})
    try:
        yield Page(driver, file.as_uri())
    finally:
        driver.quit()


def another(page: Page, contents: ReportContents, folder: Path) -> Page:
    """Another report in the same window."""
    file = folder / "report.html"
    file.write_bytes(render_html(contents))
    return Page(page.driver, file.as_uri())


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("dark", [False, True])
def test_each_page_is_sound(page: Page, width: int, dark: bool) -> None:
    page.open(width=width, dark=dark)
    for route in PAGES:
        page.run("location.hash = arguments[0]", f"#/{route}")
        page.wait("document.querySelector('h1')")
        assert page.run("return document.documentElement.scrollWidth") <= width, route
        assert page.run("return document.images.length + document.scripts.length") == 2, route
    background = page.run("return getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(16, 21, 28)" if dark else "rgb(246, 247, 249)")
    assert page.run("return performance.getEntriesByType('resource').length") == 0
    assert page.run("return window.hacked") is None
    assert page.errors() == []


def test_all_tabs_are_in_sight(page: Page) -> None:
    for width, rows in ((1280, 1), (390, 1), (320, 2)):
        page.open(width=width)
        boxes = page.run(
            "return [...document.querySelectorAll('nav a')]"
            ".map((tab) => tab.getBoundingClientRect()).map((box) => [box.right, box.top])"
        )
        assert max(right for right, _ in boxes) <= width
        assert len({top for _, top in boxes}) == rows


def test_the_state_is_shown_in_words(page: Page) -> None:
    shown = (
        "return [...document.querySelectorAll('tbody tr:not(.gap)')].map((row) => [...row.cells]"
        ".filter((cell) => cell.offsetWidth).map((cell) => cell.textContent)[1])"
    )
    page.open("elements", width=390)
    assert set(page.run(shown)) == {"used", "not used", "for other GPUs"}
    page.open("kernels?q=mul", width=390)
    page.wait("!document.querySelector('output').textContent.startsWith('…')")
    assert "not used" in page.run(shown)
    page.open("elements")
    assert "State" in page.run("return document.querySelector('thead').innerText")


def test_no_header_is_cut(page: Page, contents: ReportContents, tmp_path: Path) -> None:
    """Each column has room for its title, and for the mark of the order."""
    report = replace(contents.report, replay="No GPU: replaying")
    usage = replace(contents.usage, launches={})
    lookups = another(page, replace_fields(contents, report=report, usage=usage), tmp_path)
    cut = (
        "return [...document.querySelectorAll('th button')].filter((button) => {"
        "if (button.offsetWidth) button.click();"
        "return button.scrollWidth > button.clientWidth }).map((button) => button.textContent)"
    )
    for one in (page, lookups):
        for route in ("libraries", "elements", "kernels", "tests"):
            one.open(route)
            assert one.run(cut) == [], route


def test_long_names_keep_their_ends(page: Page, contents: ReportContents, tmp_path: Path) -> None:
    """Kernels of a family have names that differ at the end."""
    library, _ = contents.libraries
    names = tuple(f"gemm_{'x' * 200}_{number}_of_the_family" for number in range(3))
    plan = replace(library.plan, unused_kernels=names)
    many = another(
        page,
        replace_fields(contents, libraries=(replace_fields(library, plan=plan),)),
        tmp_path,
    )
    many.open("kernels?q=family")
    assert set(many.rows()) == set(names)
    ends = many.run(
        "return [...document.querySelectorAll('tbody td:first-child')].map((cell) => {"
        "const [head, tail] = cell.querySelector('.cut').children;"
        "return [tail.getBoundingClientRect().right <= cell.getBoundingClientRect().right,"
        "tail.scrollWidth <= tail.clientWidth, head.scrollWidth > head.clientWidth] })"
    )
    assert ends == [[True, True, True]] * 3


def test_the_page_of_a_library_names_it_once(page: Page) -> None:
    heads = "return [...document.querySelectorAll('th')].map((head) => head.textContent)"
    page.open("library/0")
    assert "Library" not in page.run(heads)
    page.open("test/0")
    assert "Library" in page.run(heads)


@pytest.mark.parametrize(
    ("name", "short", "template"),
    [
        ("kernel_1", "kernel_1", "kernel_1"),
        (MULTIPLY, "multiply<16>", "matrices::multiply"),
        (
            "void at::native::(anonymous namespace)::apply<4, at::native::Add<float>, "
            "std::array<char*, 3ul> >(int, at::native::Add<float>)",
            "apply<4, Add<float>, array<char*, 3ul> >",
            "at::native::apply",
        ),
        (
            "std::enable_if<!(false), void>::type cublas::reduce<float>(float*)",
            "reduce<float>",
            "cublas::reduce",
        ),
        # As the C++ runtime leaves it.
        ("_ZN7cutlass7Kernel2INS_4gemm4SizeILi1EEEEEvT_", "Kernel2<…>", "cutlass::Kernel2"),
        ("_ZN6images4blurEPf", "blur", "images::blur"),
        # Names of elements without kernels.
        ("region 96", "region 96", "region 96"),
        ("src/two words.cu", "src/two words.cu", "src/two words.cu"),
    ],
)
def test_kernels_have_short_names(page: Page, name: str, short: str, template: str) -> None:
    page.open()
    assert page.run("return shortName(arguments[0])", name) == short
    assert page.run("return templateOf(arguments[0])", name) == template


def test_own_kernels_that_no_test_ran_are_listed(
    page: Page, contents: ReportContents, tmp_path: Path
) -> None:
    library, files = contents.libraries
    plan = replace(library.plan, unused_kernels=("vector_clamp", "vector_dot"))
    kernels = [
        KernelCoverage(name=name, runs=(), file="src/vectors.cu", line=7)
        for name in plan.unused_kernels
    ]
    covered = LibraryCoverage(path=library.plan.library.path, kernels=tuple(kernels))
    own = (replace_fields(library, plan=plan, coverage=covered), files)
    project = another(page, replace_fields(contents, libraries=own), tmp_path)
    project.open()
    text = project.run("return document.querySelector('.coverage').textContent")
    assert "src/vectors.cu0 of 2" in text
    assert "Untested kernels: 2" in text
    assert "src/vectors.cu:7" in text
    installed = (replace_fields(library, coverage=None), files)
    other = another(page, replace_fields(contents, libraries=installed), tmp_path)
    other.open()
    assert other.run("return document.querySelector('.coverage')") is None


def test_a_run_has_its_verdict_and_the_next_command(
    page: Page, contents: ReportContents, tmp_path: Path
) -> None:
    page.open()
    first = "return document.querySelector('.first').textContent"
    assert "Not verified yet" in page.run(first)
    proof = ProofRow(
        proved=True, reasons=(), proved_bytes=60_000, copies="compacted",
        evidence="3 tests, 2 of them on the GPU, on NVIDIA H200",
    )  # fmt: skip
    report = replace(contents.report, proof=proof)
    proved = replace_fields(contents, report=report, next_command="negativa lock")
    other = another(page, proved, tmp_path)
    other.open()
    text = other.run(first)
    assert text.startswith("Proved the tests end as before without 60.0 kB of GPU code")
    assert "on compacted copies. Evidence: 3 tests, 2 of them on the GPU, on NVIDIA H200." in text
    assert other.run("return document.querySelector('.command code').textContent") == (
        "negativa lock"
    )
    assert "Libraries now" in text and "Once slimmed" in text


@pytest.mark.parametrize("dark", [False, True])
def test_states_differ_in_luminance(page: Page, dark: bool) -> None:
    """WCAG 2.2, 1.4.11: 3 to 1 between used, unused and for other GPUs, without their colours."""
    page.open(dark=dark)
    found = page.run(
        "const style = getComputedStyle(document.documentElement);"
        "return ['used', 'idle', 'alien'].map((id) => style.getPropertyValue(`--${id}`).trim())"
    )
    levels = sorted(map(luminance, found))
    ratios = [(b + 0.05) / (a + 0.05) for a, b in itertools.pairwise(levels)]
    assert min(ratios) >= 3, ratios


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2.2) of ``#rrggbb``."""
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_growth_within_a_day_has_times(
    page: Page, contents: ReportContents, tmp_path: Path
) -> None:
    axis = "return [...document.querySelectorAll('svg[aria-label*=\"saved runs\"] > text')]"
    axis += ".slice(-2).map((text) => text.textContent)"
    page.open()
    assert page.run(axis) == ["2026-11-20", "2026-11-22"]
    ids = ("20261121T010203Z-000000", "20261121T010401Z-000001")
    history = tuple(
        replace(contents.report, run_id=run_id, libraries=contents.report.libraries[:number])
        for number, run_id in enumerate(ids)
    )
    of_a_day = another(page, replace_fields(contents, history=history), tmp_path)
    of_a_day.open()
    assert of_a_day.run(axis) == ["01:02:03", "01:04:01"]
    text = of_a_day.run("return document.body.textContent")
    assert "All runs are of 2026-11-21; times are in UTC." in text


def test_the_theme_can_be_chosen(page: Page) -> None:
    page.open()
    page.run("document.getElementById('theme').click()")
    assert page.run("return document.documentElement.dataset.theme") == "dark"
    page.open("kernels")
    assert page.run("return document.documentElement.dataset.theme") == "dark"
    page.run("localStorage.clear()")


def test_hostile_names_are_shown_as_text(page: Page) -> None:
    for route in ("", "library/0", "kernels?q=onerror", "kernels?state=used", "tests"):
        page.open(route)
        page.wait("document.querySelector('tbody tr, canvas')")
        assert HOSTILE in page.run("return document.getElementById('main').textContent"), route
    # Nothing but the policy would stop an event handler that came into the document.
    assert page.run("return document.querySelectorAll('main img, main script').length") == 0
    assert page.run("return window.hacked") is None
    assert page.errors() == []


def test_the_policy_forbids_what_comes_in(page: Page) -> None:
    page.open()
    page.run("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=window.hacked=1>')")
    page.run("fetch('data:,x').catch(() => { window.refused = true })")
    page.wait("window.refused")
    assert page.run("return window.hacked") is None
    assert any("Content Security Policy" in error for error in page.errors())


def test_a_table_searches_filters_and_sorts(page: Page) -> None:
    page.open("kernels")
    total = MANY + 13  # Two kernels are of one template.
    assert page.run("return document.querySelector('output').textContent") == f"{total:,}"
    # The rows in sight alone are in the document.
    assert len(page.rows()) < 100
    page.search("MULTIPLY float")
    assert page.rows() == ["multiply<…>"]
    page.run("document.querySelector('tbody a').click()")
    page.wait("document.querySelector('tbody')?.textContent.includes('multiply<32>')")
    assert page.hash.startswith("#/template/")
    assert page.rows() == ["multiply<32>", "multiply<16>"]
    whole = (
        "return [...document.querySelectorAll('tbody td:first-child')].map((cell) => cell.title)"
    )
    assert page.run(whole) == [MULTIPLY.replace("16", "32"), MULTIPLY]
    page.open("kernels")
    page.search("multiply nothing")
    assert page.rows() == ["Nothing matches."]
    page.search("kernel_")
    page.run("document.querySelectorAll('th button')[0].click()")
    page.wait("document.querySelector('th').ariaSort")
    assert page.rows()[:2] == ["kernel_00000", "kernel_00001"]
    page.run("document.querySelectorAll('th button')[0].click()")
    assert page.run("return document.querySelector('th').ariaSort") == "descending"
    assert page.rows()[:2] == ["kernel_19999", "kernel_19998"]
    # The address leads there again.
    assert page.hash == "#/kernels?q=kernel_&sort=-name"
    page.open(page.hash[2:])
    page.wait("!document.querySelector('output').textContent.startsWith('…')")
    assert page.rows()[0] == "kernel_19999"
    page.search("")
    page.run(
        "const select = document.querySelector('select'); select.value = 'used';"
        "select.dispatchEvent(new Event('change'))"
    )
    page.wait("document.querySelector('output').textContent.startsWith('3 of')")
    assert HOSTILE in page.rows()


def test_a_table_works_with_keys_alone(page: Page) -> None:
    page.open("kernels?sort=name&q=kernel_")
    page.wait("document.querySelector('tbody a')")
    page.press("/")
    assert page.run("return document.activeElement.type") == "search"
    page.run("document.querySelector('tbody a').focus()")
    for _ in range(60):
        page.press("\ue015")  # arrow down
    assert page.run("return document.activeElement.textContent") == "kernel_00060"
    page.press("\ue007")  # enter
    page.wait("document.querySelector('h1').textContent === 'kernel_00060'")


def test_kernels_and_tests_lead_to_each_other(page: Page) -> None:
    page.open("kernels?q=onerror")
    page.wait("document.querySelector('tbody a')")
    page.run("document.querySelector('tbody a').click()")
    page.wait(f"document.querySelector('h1').textContent === {HOSTILE!r}")
    assert "2 tests launched this kernel" in page.run("return document.body.textContent")
    # The test with the most launches is the first.
    assert page.rows() == ["tests/test_a.py::test_b", f"tests/test_a.py::test[{HOSTILE}]"]
    page.run("document.querySelectorAll('tbody a')[1].click()")
    page.wait("document.querySelector('h1').textContent.startsWith('tests/')")
    assert len(page.rows()) == 3
    assert HOSTILE in page.rows()
    page.driver.back()
    page.wait(f"document.querySelector('h1').textContent === {HOSTILE!r}")


def test_skipped_tests_used_nothing(page: Page) -> None:
    page.open()
    assert "was not used by these 3 tests" in page.run("return document.body.textContent")
    page.open("tests?q=test_skipped")
    page.wait("document.querySelector('tbody a')")
    page.run("document.querySelector('tbody a').click()")
    page.wait("document.querySelector('h1').textContent.endsWith('test_skipped')")
    lead = page.run("return document.querySelector('.lead').textContent")
    assert lead == "It was skipped, so it used no GPU code."


def test_a_combined_run_has_no_outcomes(
    page: Page, contents: ReportContents, tmp_path: Path
) -> None:
    other = another(page, replace_fields(contents, tests=()), tmp_path)
    other.open()
    title = other.run("return document.querySelector('h1').textContent")
    assert title.endswith("was not used by the tests")


def test_a_replayed_trace_is_of_another_session(
    page: Page, contents: ReportContents, tmp_path: Path
) -> None:
    """The tests that are skipped without a GPU used code when the trace was recorded."""
    report = replace(contents.report, replay="No GPU: replaying")
    replayed = another(page, replace_fields(contents, report=report), tmp_path)
    replayed.open()
    assert "was not used by the tests" in replayed.run("return document.body.textContent")
    replayed.open("tests?q=test_b")
    replayed.wait("document.querySelector('tbody a')")
    assert "Outcome here" in replayed.run("return document.querySelector('thead').textContent")
    replayed.run("document.querySelector('tbody a').click()")
    replayed.wait("document.querySelector('h1').textContent.endsWith('test_b')")
    lead = replayed.run("return document.querySelector('.lead').textContent")
    assert lead.endswith(" when the trace was recorded.")


def test_a_test_shows_its_ranges(page: Page) -> None:
    page.open("tests?q=test_b")
    page.wait("document.querySelector('tbody a')")
    assert "4.0 ms" in page.run("return document.querySelector('tbody').textContent")
    page.run("document.querySelector('tbody a').click()")
    page.wait("document.querySelector('details')")
    summaries = page.run(
        "return [...document.querySelectorAll('summary')].map((s) => s.textContent)"
    )
    assert summaries == [
        "Outside of ranges 1,990 launches, 4.0 ms",
        f"outer > {HOSTILE} 10 launches, 1.5 us",
    ]
    page.run("document.querySelectorAll('summary')[1].click()")
    page.run("document.querySelectorAll('details')[1].querySelector('a').click()")
    page.wait(f"document.querySelector('h1').textContent === {HOSTILE!r}")
    # Both ranges together.
    assert page.run("return document.querySelector('tbody tr').textContent").endswith("2,0004.0 ms")


def test_tests_are_compared_by_kernels(
    page: Page, contents: ReportContents, tmp_path: Path
) -> None:
    first, second, *_ = (use.name for use in contents.libraries[0].plan.used_kernels)
    idle = Context(phase=Phase.CALL, nodeid="tests/test_a.py::test_idle")
    usage = with_launches(
        replace(contents.usage, contexts=(*contents.usage.contexts, idle)),
        *(Launched(name, context=1, launches=1) for name in (first, second, HOSTILE)),
        Launched(HOSTILE, context=0, launches=1),
        Launched(first, context=len(contents.usage.contexts), launches=1),
    )
    page.open()
    kernel_maps = "return document.querySelectorAll('svg[aria-label*=\"by the kernels\"]').length"
    assert page.run(kernel_maps) == 0  # Two tests are one pair.
    page = another(page, replace_fields(contents, usage=usage), tmp_path)
    page.open()
    kernels = page.run(
        "return [...document.querySelectorAll('svg[aria-label*=\"by the kernels\"] title')]"
        ".map((title) => title.textContent)"
    )
    names = [f"tests/test_a.py::test[{HOSTILE}]", "tests/test_a.py::test_b"]
    assert f"{names[0]} and {names[1]}: 33% of their kernels in common" in kernels
    # Three names of rows and of columns, and nine cells: both halves are the same.
    assert len(kernels) == 3 + 3 + 9


def test_many_tests_are_compared_by_module(
    page: Page, contents: ReportContents, tmp_path: Path
) -> None:
    kernels = [use.name for use in contents.libraries[0].plan.used_kernels][:2]
    many = tuple(Context(phase=Phase.CALL, nodeid=f"m{n:02}.py::test") for n in range(90))
    usage = with_launches(
        replace(contents.usage, contexts=many),
        *(Launched(kernels[n % 2], context=n, launches=1) for n in range(90)),
    )
    large = another(page, replace_fields(contents, usage=usage), tmp_path)
    large.open()
    text = large.run("return document.body.textContent")
    assert "Tests are grouped by module. 26 modules come later by name and are left out." in text
    assert not large.errors()


def test_the_map_drills_down_with_keys(page: Page) -> None:
    page.open()
    page.run("document.querySelector('canvas').focus()")
    announced = page.run("return document.getElementById('live').textContent")
    assert "67.2 kB in 28 elements" in announced
    page.press("\ue007")
    assert page.hash == "#/map/0"
    page.press("\ue007")
    assert page.hash.startswith("#/map/0/sm_")
    page.press("\ue014")  # arrow right
    page.press("\ue00c")  # escape
    assert page.hash == "#/map/0"
    page.press("\ue007", "\ue007", "\ue007")  # group, region, element
    page.wait("document.querySelector('dl')?.textContent.includes('Architecture')")
    assert page.hash.startswith("#/element/")
    assert page.errors() == []


def test_print_has_the_rows(page: Page) -> None:
    page.open("kernels")
    page.run("dispatchEvent(new Event('beforeprint'))")
    assert len(page.rows()) == 201
    assert page.rows()[-1] == f"and {MANY + 13 - 200:,} more"
    page.run("dispatchEvent(new Event('afterprint'))")
    assert len(page.rows()) < 100


def test_print_has_closed_lists(page: Page) -> None:
    page.open("test/0")
    page.wait("document.querySelector('details')")
    closed = "return document.querySelectorAll('details:not([open])').length"
    before = page.run(closed)
    page.run("dispatchEvent(new Event('beforeprint'))")
    assert (before > 0, page.run(closed)) == (True, 0)
    page.run("dispatchEvent(new Event('afterprint'))")
    assert page.run(closed) == before


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing(page: Page, width: int, dark: bool) -> None:
    axe = os.environ.get("AXE_JS")
    if axe is None:
        pytest.skip("needs $AXE_JS, the path of axe-core's axe.min.js")
    page.open(width=width, dark=dark)
    page.run(Path(axe).read_text())
    for route in PAGES:
        page.run("location.hash = arguments[0]", f"#/{route}")
        page.wait("document.querySelector('h1')")
        found = page.driver.execute_async_script(
            "const done = arguments[0]; axe.run().then((result) => done(result.violations.map("
            "(one) => [one.id, one.impact, one.nodes[0].html])))"
        )
        assert found == [], route
