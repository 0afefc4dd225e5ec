"""Reports for other tools, letter by letter; and the limits of what is shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from pytest_negativa.models.analysis import ReportContents
from pytest_negativa.models.coverage import KernelCoverage, LibraryCoverage
from pytest_negativa.models.settings import Report, ReportFormat, Reports
from pytest_negativa.reporting.coverage import render_missing
from pytest_negativa.reporting.coverage_files import group_by_file, render_cobertura, render_lcov
from pytest_negativa.reporting.formats import render_to_files, render_to_screen
from pytest_negativa.reporting.github import render_annotations
from pytest_negativa.reporting.markdown import render_markdown
from pytest_negativa.reporting.terminal import render_report
from pytest_negativa.reporting.text import cut_middle
from tests.support.reports import OURS, report, row, runtime
from tests.support.usages import usage_of

OPTIONS = Reports(formats=(), top=20)


def test_lcov(tmp_path: Path) -> None:
    files = group_by_file([OURS], tmp_path)
    index = tmp_path / "kernels.libours.so.txt"
    assert render_lcov(files) == (
        f"TN:\nSF:{index}\nFN:1,hidden\nFNDA:0,hidden\nFNF:1\nFNH:0\nDA:1,0\nLF:1\nLH:0\n"
        "end_of_record\n"
        "TN:\nSF:src/a.cu\nFN:7,scale(float*, float)\nFN:12,void multiply<16>()\n"
        "FN:12,void multiply<32>()\nFNDA:1,scale(float*, float)\nFNDA:1,void multiply<16>()\n"
        "FNDA:0,void multiply<32>()\nFNF:3\nFNH:2\nDA:7,1\nDA:12,1\nLF:2\nLH:2\nend_of_record\n"
        "TN:\nSF:src/b.cu\nFN:3,blur\nFNDA:0,blur\nFNF:1\nFNH:0\nDA:3,0\nLF:1\nLH:0\n"
        "end_of_record\n"
    )
    assert files[0].index_text == "hidden\n"
    assert [file.index_file for file in files] == [index, None, None]


def test_libraries_of_one_name_have_an_index_each(tmp_path: Path) -> None:
    kernels = (KernelCoverage(name="k", runs=()),)
    two = [LibraryCoverage(path=f"/{n}/liba.so", kernels=kernels) for n in "ab"]
    paths = [Path(file.path).name for file in group_by_file(two, tmp_path)]
    assert paths == ["kernels.liba.so.txt", "kernels.liba.so1.txt"]


def test_an_index_lies_in_the_runs_folder(tmp_path: Path) -> None:
    run = tmp_path / "a run\n"
    contents = ReportContents(
        replace(report(row(), coverage=(OURS,)), directory=str(run)), (), usage_of()
    )
    wanted = Report(format=ReportFormat.LCOV, path=str(tmp_path / "own.lcov"))
    index, lcov = render_to_files(contents, replace(OPTIONS, formats=(wanted,)))
    assert (index[0], lcov[0]) == (run / "kernels.libours.so.txt", tmp_path / "own.lcov")
    assert index[1] == b"hidden\n"
    assert f"SF:{tmp_path}/a run\\n/kernels.libours.so.txt\n".encode() in lcov[1]


def test_cobertura(tmp_path: Path) -> None:
    kernels = (OURS.kernels[0], OURS.kernels[3])
    one = LibraryCoverage(path=OURS.path, kernels=kernels)
    shown = render_cobertura(group_by_file([one], tmp_path), 5).decode()
    expected = """\
<?xml version='1.0' encoding='utf-8'?>
<coverage line-rate="0.5" branch-rate="1" lines-covered="1" lines-valid="2" branches-covered="0" branches-valid="0" complexity="0" version="1" timestamp="5">
  <sources>
    <source>.</source>
  </sources>
  <packages>
    <package name="libours.so" line-rate="0.5" branch-rate="1" complexity="0">
      <classes>
        <class name="a.cu" filename="src/a.cu" line-rate="1" branch-rate="1" complexity="0">
          <methods>
            <method name="scale(float*, float)" signature="" line-rate="1" branch-rate="1">
              <lines>
                <line number="7" hits="1" branch="false" />
              </lines>
            </method>
          </methods>
          <lines>
            <line number="7" hits="1" branch="false" />
          </lines>
        </class>
        <class name="b.cu" filename="src/b.cu" line-rate="0" branch-rate="1" complexity="0">
          <methods>
            <method name="blur" signature="" line-rate="0" branch-rate="1">
              <lines>
                <line number="3" hits="0" branch="false" />
              </lines>
            </method>
          </methods>
          <lines>
            <line number="3" hits="0" branch="false" />
          </lines>
        </class>
      </classes>
    </package>
  </packages>
</coverage>
"""  # noqa: E501
    assert shown == expected


def test_annotations() -> None:
    one = report(row(), crossed=("max: 100%",), not_covered=("a gap",), coverage=(OURS,))
    assert list(render_annotations(one)) == [
        "::error title=GPU code%3A threshold crossed::max: 100%25",
        "::warning title=GPU code not traced::a gap",
        "::warning title=1 unused kernel::hidden of libours.so: no test used this kernel",
        "::warning file=src/a.cu,line=12,title=1 unused kernel::"
        "void multiply<32>() of libours.so: no test used this kernel",
        "::warning file=src/b.cu,line=3,title=1 unused kernel::"
        "blur of libours.so: no test used this kernel",
        "::notice title=GPU code::1.6 kB of 1.8 kB GPU code (94.3%25) in 1 library is unused "
        "on NVIDIA H200 (9.0).",
    ]


def test_github_shows_ten_warnings() -> None:
    kernels = tuple(
        KernelCoverage(name=f"k{n:02}", runs=(), file="a.cu", line=n) for n in range(1, 13)
    )
    one = report(row(), coverage=(LibraryCoverage(path="/a.so", kernels=kernels),))
    warnings = [line for line in render_annotations(one) if line.startswith("::warning")]
    assert len(warnings) == 10
    assert warnings[-1].endswith("::3 more places have kernels that no test used")


def test_missing() -> None:
    assert list(render_missing([OURS], OPTIONS)) == [
        "libours.so: 2 of 5 kernels looked up (40.0%)\n"
        "  without line information\n"
        "        hidden\n"
        "  src/a.cu\n"
        "    12  void multiply<32>()\n"
        "  src/b.cu\n"
        "     3  blur"
    ]
    [some] = render_missing([OURS], Reports(formats=(), top=1))
    assert some.endswith("  hidden\n    and 2 more")
    assert "so there is no kernel coverage" in "".join(render_missing([], OPTIONS))


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_the_terminal_report_fits(width: int) -> None:
    long = "libcudnn_engines_runtime_compiled_and_more.so.9.10.2"
    sentence = "the trace of a process has no end, so what it may have used of the library is kept"
    one = report(
        row(long, notes=(sentence,), used_kernels=1, unused_kernels=("_Z5scalePff" + "x" * 300,)),
        row(),
        replay=f"No GPU: {sentence}",
        warnings=(sentence,),
        not_covered=(sentence,),
        runtime=(runtime(*("k" * 10 + str(n) for n in range(6))),),
        coverage=(OURS,),
    )
    shown = "\n\n".join([*render_report(one, OPTIONS, width), *render_missing([OURS], OPTIONS, 40)])
    # Words stay whole.
    assert max(map(len, shown.splitlines())) <= max(width, len(f"  {long}:"))
    header = next(line for line in shown.splitlines() if line.startswith("library  "))
    assert ("elements" in header) == (width >= 200)
    assert "unused" in header
    if width == 80:
        assert "kernels" in header and "used" in header
        assert "libcudnn_engi" in shown and "so.9.10.2" in shown


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (0, "abcdefghij"),
        (10, "abcdefghij"),
        (9, "abc...hij"),
        (8, "abc...ij"),
        (4, "a..."),
        (3, "abc"),
    ],
)
def test_names_are_cut_in_the_middle(width: int, shown: str) -> None:
    assert cut_middle("abcdefghij", width) == shown


def test_the_places_of_the_files_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    contents = ReportContents(report(row()), (), usage_of())

    def shown(*paths: str) -> list[str]:
        wanted = tuple(Report(format=ReportFormat.JSON, path=path) for path in paths)
        return list(render_to_screen(contents, replace(OPTIONS, formats=wanted)))

    own = f"{tmp_path}/.negativa/report.json"
    assert shown(own, "/a\n.json", own) == ["Reports: .negativa/report.json, /a\\n.json"]
    assert shown() == shown(own, "-") == shown("/dev/stdout") == []
    nothing = replace(contents.report, gpu_used=False)
    assert not any(
        "Reports" in line
        for line in render_to_screen(
            ReportContents(nothing, (), usage_of()),
            replace(OPTIONS, formats=(Report(format=ReportFormat.JSON, path=own),)),
        )
    )


def test_markdown_has_kernel_coverage() -> None:
    shown = render_markdown(report(row(), coverage=(OURS,)))
    assert shown.partition("## Kernel coverage\n\n")[2] == (
        "| library | source file or namespace | kernels | looked up | |\n"
        "| --- | --- | ---: | ---: | ---: |\n"
        "| `libours.so` |  | 1 | 0 | 0.0% |\n"
        "| `libours.so` | `src/a.cu` | 3 | 2 | 66.7% |\n"
        "| `libours.so` | `src/b.cu` | 1 | 0 | 0.0% |\n"
    )


def test_missing_kernels_are_listed_once() -> None:
    one = report(row(used_kernels=1, unused_kernels=("blur",)), coverage=(OURS,))
    one = replace(one, coverage=(replace(OURS, path=one.libraries[0].path),))
    both = tuple(
        Report(format=wanted, path=None)
        for wanted in (ReportFormat.TERMINAL, ReportFormat.TERMINAL_MISSING)
    )
    assert "Unused kernels of" in "".join(render_report(one, OPTIONS))
    assert "Unused kernels of" not in "".join(render_report(one, replace(OPTIONS, formats=both)))
