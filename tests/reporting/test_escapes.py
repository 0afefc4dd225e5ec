"""Hostile names: each format shows them, and none acts on them."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from pytest_negativa.models.coverage import KernelCoverage, KernelRun, LibraryCoverage
from pytest_negativa.models.report import RunReport
from pytest_negativa.models.settings import Reports
from pytest_negativa.reporting.coverage import render_missing
from pytest_negativa.reporting.coverage_files import group_by_file, render_cobertura, render_lcov
from pytest_negativa.reporting.github import render_annotations
from pytest_negativa.reporting.markdown import render_markdown
from pytest_negativa.reporting.terminal import render_report
from pytest_negativa.reporting.text import escape_markdown, markdown_code, printable, wrap
from tests.support.reports import report, row, runtime

HOSTILE = (
    "\x1b[2J\x1b]0;t\x07",  # clears the screen, sets the title
    "a\r\n::error::b",
    "::error::broken",
    "  ::stop-commands::x",
    "x##[group]y",
    "<script>alert(1)</script>&amp;",
    "]]><!--",
    "`a`|b|``",
    "[x](http://example.invalid) ![y](z)",
    "=HYPERLINK(1)",
    "\t+1",
    "@SUM(1)",
    "\u202egnp.so",  # turns the direction of text around
    "\udcff\ufffe\x00",  # what no XML can hold
    "%0A::error::x",
    "a,b:c",
    '"quoted"',
)


def coverage(name: str) -> LibraryCoverage:
    kernels = (
        KernelCoverage(name=name, runs=(), file=name, line=3),
        KernelCoverage(name=name, runs=(KernelRun(name, 1),)),
    )
    return LibraryCoverage(path=f"/lib/{name}", kernels=kernels)


def everything(name: str) -> RunReport:
    named = row(name.replace("/", ""), notes=(name,), used_kernels=1, unused_kernels=(name,))
    return report(
        named,
        devices=(name,),
        replay=name,
        runtime=(runtime(name),),
        not_covered=(name,),
        warnings=(name,),
        crossed=(name,),
        coverage=(coverage(name),),
        directory=name,
    )


@pytest.mark.parametrize("name", HOSTILE)
def test_no_format_acts_on_a_name(name: str) -> None:
    one = everything(name)
    options = Reports(formats=(), top=20)
    screen = "\n".join(
        [*render_report(one, options, 80), *render_missing(one.coverage, options, 80)]
    )
    markdown = render_markdown(one)
    annotations = list(render_annotations(one))
    files = group_by_file(one.coverage, Path("/out"))
    lcov = render_lcov(files)

    for output in (screen, markdown, lcov, *annotations):
        assert all(c.isprintable() or c in "\r\n" for c in output), output
    for line in (*screen.splitlines(), *markdown.splitlines()):
        assert not line.lstrip().startswith("::")
        assert "##[" not in line
    # The runner takes what is behind the second pair of colons as text.
    for line in annotations:
        assert re.fullmatch(r"::(error|warning|notice) [^:]*::.*", line), line
    tags = [line.partition(":")[0] for line in lcov.splitlines()]
    assert tags.count("SF") == tags.count("end_of_record") == 2
    root = ET.fromstring(render_cobertura(files, 0))
    assert printable(name) in {found.get("filename") for found in root.iter("class")}
    assert printable(name) in {found.get("name") for found in root.iter("method")}


@pytest.mark.parametrize(
    ("name", "line", "code"),
    [
        ("max_unused_percent: 3", "max_unused_percent: 3", "`max_unused_percent: 3`"),
        ("_a_ *b*", r"\_a\_ \*b\*", "`_a_ *b*`"),
        ("a|b", r"a\|b", r"`a\|b`"),
        ("`a", r"\`a", "`` `a ``"),
        ("a``b", r"a\`\`b", "```a``b```"),
        ("<b>&amp;", r"\<b\>\&amp;", "`<b>&amp;`"),
        ("@team", "@<!-- -->team", "`@team`"),
    ],
)
def test_markdown(name: str, line: str, code: str) -> None:
    assert escape_markdown(name) == line
    assert markdown_code(name) == code


def test_a_wrapped_line_begins_no_workflow_command() -> None:
    assert "\n::" not in wrap("a library is named ::error::x and no other", 20)
    assert wrap("a b", 2) == "a\nb"
    assert wrap("a b", 0) == "a b"
