"""Rows, terminal and Markdown: small texts, letter by letter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pytest_negativa.models.analysis import ReportContents
from pytest_negativa.models.coverage import KernelCoverage, KernelRun, LibraryCoverage
from pytest_negativa.models.plan import TrimmedCubin
from pytest_negativa.models.report import (
    LibraryRow,
    TrimmedRow,
)
from pytest_negativa.models.settings import Report, ReportFormat, Reports
from pytest_negativa.models.spans import Span
from pytest_negativa.reporting.formats import render_to_files, render_to_screen
from pytest_negativa.reporting.markdown import render_markdown
from pytest_negativa.reporting.rows import library_row
from pytest_negativa.reporting.terminal import render_nothing, render_report
from pytest_negativa.settings.options import REPORT_FILES
from tests.support.reports import PLAN, code_files, report, row, runtime
from tests.support.usages import usage_of

COVERED = LibraryCoverage(
    path="/lib/libours.so",
    kernels=(KernelCoverage(name="a", runs=(KernelRun("test_a", None),)),),
)


def text(*rows: LibraryRow, top: int = 20, **changes: Any) -> str:
    return "\n\n".join(render_report(report(*rows, **changes), Reports(formats=(), top=top)))


def test_files_that_are_gpu_code_count_in_all_totals() -> None:
    one = report(row(), code_files())
    assert (one.code_bytes, one.unused_bytes) == (2750, 2050)
    head, table = text(row(), code_files()).split("\n\n")
    assert head.startswith(
        "2.0 kB of 2.8 kB GPU code (74.5%) in 1 library and 10 files that are GPU code is unused"
    )
    files, _, total = (line.split("  ") for line in table.splitlines()[-3:])
    assert [cell.strip() for cell in files if cell][:5] == [
        "some-kernels (files)", "1.0 kB", "1.0 kB", "400 B", "40.0%",
    ]  # fmt: skip
    assert [cell.strip() for cell in total if cell][:5] == [
        "total", "5.0 kB", "2.8 kB", "2.0 kB", "74.5%",
    ]  # fmt: skip
    assert render_markdown(one).splitlines()[2].startswith("2.0 kB of 2.8 kB GPU code (74.5%) in ")
    assert render_nothing(report(code_files())) is None


def test_terminal_with_everything_that_must_be_said() -> None:
    shown = text(
        row(notes=("all of it is kept (incomplete): why",)),
        replay="No GPU: replaying.",
        runtime=(runtime(*"abcdefg"), runtime("h", is_new=False)),
        not_covered=("worker gw0 was lost",),
        warnings=("a glob",),
        crossed=("max_gpu_code: too much",),
    )
    head, _, rest = shown.partition("\n\n")
    assert head.split("\n")[1] == "No GPU: replaying."
    assert rest.partition("\n\n")[2] == (
        "Compiled at run time: 7 kernels (a, b, c, d, e and 2 more).\n"
        "From caches of compilers: 1 kernel (h).\nnegativa report json lists them.\n\n"
        "Kept for lack of knowledge or by policy:\n"
        "  libours.so: all of it is kept (incomplete): why\n\n"
        "Not covered by the trace, so what it may have used is kept:\n  worker gw0 was lost\n\n"
        "Warnings:\n  a glob"
    )


@pytest.mark.parametrize(
    ("top", "names"),
    [
        (1, ["liba.so", "2 more", "total"]),
        (2, ["liba.so", "libb.so", "1 more", "total"]),
        (3, ["liba.so", "libb.so", "libc.so", "total"]),
        (0, ["liba.so", "libb.so", "libc.so", "total"]),
    ],
)
def test_rows_beyond_top_are_added_up(top: int, names: list[str]) -> None:
    rows = [row("liba.so"), row("libb.so", size=100), row("libc.so", kernels=1)]
    shown = text(*rows, top=top)
    lines = shown.split("\n")[3:]
    assert [line.partition("  ")[0] for line in lines if not line.startswith("-")][0:] == names
    assert "in 3 libraries" in shown
    assert lines[-1].endswith(" 9 of 2,401")


def test_no_code_at_all() -> None:
    line = "negativa: no GPU code was loaded from any library that is looked at"
    assert render_nothing(report()) == line
    # What would explain it must not be lost.
    replayed = report(replay="No GPU: replaying.", warnings=("negativa.yaml:2:4: a glob",))
    assert render_nothing(replayed) == (
        f"{line}\nNo GPU: replaying.\nWarnings:\n  negativa.yaml:2:4: a glob"
    )
    for known in ({"runtime": (runtime("k"),)}, {"not_covered": ("x",)}):
        assert render_nothing(report(**known)) is None
    assert render_nothing(report(row())) is None


def test_markdown() -> None:
    rows = (row(), row("lib|odd.so", notes=("a note",)))
    assert render_markdown(report(*rows, replay="No GPU.", warnings=("a glob",))) == (
        "# GPU code used by the tests\n\n"
        "3.3 kB of 3.5 kB GPU code (94.3%) in 2 libraries is unused on NVIDIA H200 (9.0).\n\n"
        "No GPU.\n\n"
        "| library | GPU code | unused | | for other GPUs | no used kernel | kernels | used |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        "| `libours.so` | 1.8 kB | 1.6 kB | 94.3% | 1.6 kB | 50 B | 1,200 | 3 |\n"
        "| `lib\\|odd.so` | 1.8 kB | 1.6 kB | 94.3% | 1.6 kB | 50 B | 1,200 | 3 |\n\n"
        "## Kept for lack of knowledge or by policy\n\n- lib\\|odd.so: a note\n\n"
        "## Warnings\n\n- a glob\n"
    )


def test_markdown_without_anything() -> None:
    shown = render_markdown(report(devices=(), not_covered=("x",), crossed=("y",)))
    assert "0 B of 0 B GPU code (-) in 0 libraries is unused on an unknown device." in shown
    assert shown.endswith("is kept\n\n- x\n\n## Thresholds crossed\n\n- y\n")


def test_unused_code_inside_kept_elements() -> None:
    plan = replace(
        PLAN,
        trimmed=(
            TrimmedCubin(
                start=100,
                kept=("a",),
                code_size=1000,
                unused=(Span(64, 164), Span(200, 1100)),
            ),
            TrimmedCubin(start=5000, kept=("b",), code_size=500, unused=(Span(0, 260),)),
        ),
    )
    rows = (library_row(plan), row("libother.so"))
    sentence = (
        "Inside 2 kept elements, 1.3 kB of 1.5 kB code (84.0%, unpacked) belongs to kernels that "
        "no test used."
    )

    assert rows[0].trimmed == TrimmedRow(cubins=2, code_bytes=1500, unused_bytes=1260)
    assert sentence in text(*rows).split("\n\n")
    assert f"\n\n{sentence}\n" in render_markdown(report(*rows))
    # Bytes of the file are counted as without it.
    assert report(*rows).unused_bytes == report(row(), row()).unused_bytes
    assert "Inside" not in text(row()) + render_markdown(report(row()))


def test_few_unused_kernels_are_named() -> None:
    one = row(used_kernels=1, kernels=3, unused_kernels=("_Z5scalePff", "plain"))
    shown = text(one)
    assert "Unused kernels of libours.so, 2 of 3:\n  scale(float*, float)\n  plain" in shown
    assert "Unused kernels" not in text(replace(one, used_kernels=0))


def test_names_are_safe_to_print() -> None:
    shown = text(row(), runtime=(runtime("evil\x1b[2J"),), warnings=("a\x1b]0;b",))
    assert "\x1b" not in shown


def test_a_run_without_gpu_use_is_one_line() -> None:
    """Though libraries with GPU code were loaded: importing torch is no use of a GPU."""
    line = "negativa: no GPU code was used by any process of this run"
    assert render_nothing(report(row(), gpu_used=False)) == line
    assert render_nothing(report(row(), gpu_used=False, not_covered=("a gap",))) is None
    assert render_nothing(report(row())) is None


def test_each_format_has_a_renderer() -> None:
    def options(wanted: ReportFormat, path: str | None) -> Reports:
        report = Report(format=wanted, path=path)
        return Reports(formats=(report,), top=20)

    one = ReportContents(report(row(), coverage=(COVERED,)), (), usage_of())
    on_screen = {w for w in ReportFormat if any(render_to_screen(one, options(w, None)))}
    in_files = set(ReportFormat) - on_screen
    for wanted in in_files:
        *_, (path, data) = render_to_files(one, options(wanted, "/out"))
        assert path == Path("/out")
        # The page has its names in packed data.
        assert b"libours.so" in data or wanted is ReportFormat.HTML
    assert {wanted.value for wanted in in_files} == set(REPORT_FILES)
