"""The HTML report without a browser: its columns, its packed data, its policy."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from pytest_negativa.analysis.analyze import analyze
from pytest_negativa.analysis.report import build_report
from pytest_negativa.models.analysis import ReportContents
from pytest_negativa.models.coverage import KernelCoverage, LibraryCoverage
from pytest_negativa.models.outcomes import Outcome, TestResult
from pytest_negativa.models.pages import (
    HostLibrary,
    HostUsage,
)
from pytest_negativa.models.report import ProofRow
from pytest_negativa.models.spans import Span
from pytest_negativa.models.trace import Context, Device, Phase, Usage
from pytest_negativa.reporting.html.pack import COLUMNS, Page, pack
from pytest_negativa.reporting.html.page import build_page
from pytest_negativa.reporting.html.render import render_html
from tests.support.analyses import settings, used
from tests.support.libraries import QUICKSTART_LIBRARY
from tests.support.pages import unpacked
from tests.support.usages import TEST, Launched, with_launches

MULTIPLY = "void matrices::multiply<32>(float const*, float const*, float*, int, int, int)"
HOSTILE = "</script><img src=x onerror=alert(1)>"


def contents_of(folder: Path, usage: Usage, **changes: Any) -> ReportContents:
    options = settings(folder)
    analysis = analyze(usage, options)
    report = build_report(analysis, options, run_id="run", directory="run", files=())
    return ReportContents(replace(report, **changes), analysis.libraries, analysis.usage)


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> ReportContents:
    """The quickstart's library: a test used a kernel in each of the first two regions."""
    usage = used(QUICKSTART_LIBRARY, regions=(0, 1))
    return contents_of(tmp_path_factory.mktemp("page"), usage)


def column(page: Page, table: str, name: str) -> tuple[int, ...]:
    return tuple(row[COLUMNS[table].index(name)] for row in page.tables[table])


def texts(page: Page, indices: Sequence[int]) -> list[str | None]:
    return [None if index < 0 else page.texts[index] for index in indices]


def test_elements_add_up_to_the_report(contents: ReportContents) -> None:
    page = build_page(contents)
    sizes: Counter[str | None] = Counter()
    for reason, size in zip(
        texts(page, column(page, "elements", "reason")),
        column(page, "elements", "size"),
        strict=True,
    ):
        sizes[reason] += size
    (row,) = contents.report.libraries
    assert sizes == {part.reason: part.bytes for part in (*row.kept, *row.unused)}
    (library,) = contents.libraries
    assert list(column(page, "elements", "start")) == [d.start for d in library.plan.decisions]
    assert set(texts(page, column(page, "elements", "arch"))) == {
        f"sm_{arch}" for arch in (75, 80, 86, 90, 100, 120)
    }
    assert set(column(page, "elements", "region")) == {0, 1, 2, 3}


def test_kernels_name_their_test_and_element(contents: ReportContents) -> None:
    page = build_page(contents)
    (library,) = contents.libraries
    assert len(page.tables["kernels"]) == 13
    mangled = {name for name in texts(page, column(page, "kernels", "mangled")) if name}
    assert mangled == {use.name for use in library.plan.used_kernels}
    assert "void matrices::multiply<16>(float const*, float const*, float*, int, int, int)" in (
        texts(page, column(page, "kernels", "name"))
    )
    kept = {d.start for d in library.plan.decisions if d.kept}
    starts = column(page, "elements", "start")
    firsts = column(page, "kernels", "first")
    assert set(firsts) == {0, -1}
    for first, element in zip(firsts, column(page, "kernels", "element"), strict=True):
        assert first == -1 or starts[element] in kept
    assert texts(page, column(page, "tests", "name")) == [TEST.nodeid]
    assert not page.tables["launches"]


def test_an_element_has_the_name_of_its_largest_kernel(
    contents: ReportContents, tmp_path: Path
) -> None:
    """Elements for other GPUs, whose kernels nothing reads, are of the same source file."""
    page = build_page(contents)
    names: dict[int, set[str | None]] = {}
    shown = texts(page, column(page, "elements", "name"))
    for region, name in zip(column(page, "elements", "region"), shown, strict=True):
        names.setdefault(region, set()).add(name)
    assert names == {
        0: {"vector_dot"},
        1: {MULTIPLY},
        2: {"statistics_variance"},
        3: {"image_blur"},
    }


def test_an_own_kernel_has_its_source(contents: ReportContents) -> None:
    (library,) = contents.libraries
    name = library.plan.used_kernels[0].name
    run = KernelCoverage(name=name, runs=(), file="src/vectors.cu", line=7)
    covered = LibraryCoverage(path=library.plan.library.path, kernels=(run,))
    own = (replace_fields(library, coverage=covered),)
    page = build_page(replace_fields(contents, libraries=own))
    assert page.facts["own"] == [0]
    lines = zip(column(page, "kernels", "file"), column(page, "kernels", "line"), strict=True)
    ((file, line),) = ((file, line) for file, line in lines if line)
    assert (page.texts[file], line) == ("src/vectors.cu", 7)
    other = replace_fields(library, coverage=None)
    page = build_page(replace_fields(contents, libraries=(other,)))
    assert page.facts["own"] == []
    assert set(column(page, "kernels", "file")) == {-1}


def test_facts_are_those_of_the_run(contents: ReportContents) -> None:
    usage = contents.usage
    (process,) = usage.processes
    header = replace(
        process.header, root="/project", argv=("/venv/bin/pytest", "-k", "a b"),
        start_ns=1_795_226_732_320_796_968,
    )  # fmt: skip
    device = Device(
        name="NVIDIA H200", compute_capability="9.0", uuid="GPU-1", cuda_version=13000,
        driver_version="580.159.04",
    )  # fmt: skip
    usage = replace(usage, processes=(replace(process, header=header),), devices=(device,))
    (row,) = contents.report.libraries
    rows = (replace(row, distribution="torch", version="2.11.0"),)
    report = replace(contents.report, libraries=rows, devices=("NVIDIA H200 (9.0)",))
    page = build_page(replace_fields(contents, report=report, usage=usage))
    assert dict(page.facts["facts"]) == {
        "Project": "project",
        "Date": "2026-11-21 02:05 UTC",
        "Command": "pytest -k 'a b'",
        "GPU": "NVIDIA H200 (9.0)",
        "Driver": "580.159.04, CUDA 13.0",
        "Analysed": "torch 2.11.0",
    }


def test_a_verdict_is_a_sentence(contents: ReportContents) -> None:
    proof = ProofRow(proved=False, reasons=("a test failed",), proved_bytes=0, copies="compacted")
    page = build_page(replace_fields(contents, report=replace(contents.report, proof=proof)))
    assert page.facts["proof"] == "Not proved: a test failed."
    assert unpacked(pack(page))["proof"] == page.facts["proof"]
    assert build_page(contents).facts["proof"] is None


def test_cpu_code_is_by_library(contents: ReportContents) -> None:
    traced = HostLibrary(
        sha256="0", size=9000, build_id=None, paths=("/lib/liba.so", "/b/liba.so"),
        watched=(Span(0, 8192),), touched=(Span(4096, 8192),),
    )  # fmt: skip
    host = HostUsage(
        processors=(), processes={"run": 1},
        libraries=(traced, replace(traced, unwatched="it is a main program")),
        incomplete=("a log is lost",),
    )  # fmt: skip
    page = build_page(replace_fields(contents, host=host))
    assert texts(page, column(page, "host", "path")) == ["/lib/liba.so"]
    assert (column(page, "host", "watched"), column(page, "host", "touched")) == ((8192,), (4096,))
    assert page.facts["hostIncomplete"] == ("a log is lost",)
    assert page.facts["hostProof"] is None
    page = build_page(replace_fields(contents, host=host, host_proof="Proved."))
    assert page.facts["hostProof"] == "Proved."
    assert not build_page(contents).tables["host"]


def test_names_stand_once(contents: ReportContents) -> None:
    """The report's rows repeat none of the columns."""
    page = build_page(contents)
    report = msgspec.json.encode(page.facts["report"])
    assert len(page.texts) == len(set(page.texts))
    assert not [
        text
        for text in texts(page, column(page, "kernels", "mangled"))
        if str(text).encode() in report
    ]


def test_tests_have_outcomes_and_launches(contents: ReportContents, tmp_path: Path) -> None:
    usage = used(QUICKSTART_LIBRARY, regions=(0,))
    name = next(iter(usage.libraries[0].images[0].kernels))
    other = Context(phase=Phase.SETUP, nodeid="tests/test_a.py::test_other")
    usage = with_launches(
        replace(usage, contexts=(*usage.contexts, other)),
        Launched(name, context=0, launches=2, gpu_ns=900),
        Launched(name, context=0, launches=1, gpu_ns=50, ranges=("outer", "inner")),
        Launched(name, context=1, launches=4),
        Launched("compiled at run time", context=1, launches=5),
    )
    found = contents_of(tmp_path, usage)
    results = (TestResult(nodeid="tests/test_a.py::test_b", outcome=Outcome.PASSED, duration=1.25),)
    page = build_page(
        ReportContents(found.report, found.libraries, found.usage, results, (found.report,) * 2)
    )
    assert texts(page, column(page, "tests", "name")) == [TEST.nodeid, other.nodeid]
    assert texts(page, column(page, "tests", "outcome")) == ["passed", None]
    assert column(page, "tests", "milliseconds") == (1250, 0)
    assert (column(page, "tests", "launches"), column(page, "tests", "nanoseconds")) == (
        (3, 9),
        (950, 0),
    )
    assert (
        texts(
            page,
            tuple(
                column(page, "kernels", "mangled")[k] for k in column(page, "launches", "kernel")
            ),
        )
        == [name] * 3
    )
    assert (column(page, "launches", "test"), column(page, "launches", "times")) == (
        (0, 0, 1),
        (2, 1, 4),
    )
    assert column(page, "launches", "nanoseconds") == (900, 50, 0)
    assert texts(page, column(page, "launches", "ranges")) == [None, "outer > inner", None]
    few = build_page(ReportContents(found.report, found.libraries, found.usage), most_launches=2)
    assert (column(few, "launches", "times"), column(few, "launches", "nanoseconds")) == (
        (3, 4),
        (950, 0),
    )
    assert (
        few.facts["leftOutRanges"]
        and set(column(few, "launches", "ranges")) == {-1}
        and not page.facts["leftOutRanges"]
    )
    assert column(page, "history", "unused_bytes") == (found.report.unused_bytes,) * 2


def test_packed_data_comes_back(contents: ReportContents) -> None:
    page = build_page(contents)
    page = Page(
        page.facts,
        {**page.tables, "history": [(n, n, n) for n in (1 << 52, 0, 7)]},
        (*page.texts, "grün", "grünes", "", "\n\x00\U0001f600", HOSTILE),
    )
    found = unpacked(pack(page))
    assert tuple(found["texts"]) == page.texts
    for name, fields in COLUMNS.items():
        for field, (packed, values) in zip(fields, found["tables"][name], strict=True):
            assert (packed, tuple(values)) == (field, column(page, name, field))
    assert found["report"]["libraries"][0]["path"] == contents.report.libraries[0].path


def test_the_policy_allows_the_own_script_alone(contents: ReportContents) -> None:
    page = render_html(contents).decode()
    policy = html.unescape(re.findall(r'Content-Security-Policy" content="([^"]*)"', page)[0])
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert directives[directive] == f"'sha256-{digest}'"
    assert directives["default-src"] == "'none'"
    assert set(directives) == {
        "default-src",
        "script-src",
        "style-src",
        "img-src",
        "base-uri",
        "form-action",
    }
    assert not re.search(r"""(src|href)=["']?(https?:|//)""", page)


@pytest.mark.parametrize("name", [HOSTILE, "{{data}}", "<!--<script>"])
def test_names_are_text(contents: ReportContents, name: str) -> None:
    """Text of the report is escaped, or inside the packed data."""
    report = replace(contents.report, devices=(name,), warnings=(name,), run_id=name)
    page = render_html(ReportContents(report, (), contents.usage)).decode()
    assert name in html.unescape(page)
    assert (name in page) == (name == "{{data}}")
    assert page.count("</script>") == 2
