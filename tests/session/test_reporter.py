"""What a session reports and writes: exact figures for the library of fixtures/quickstart."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.sessions import (
    FIRST_USES,
    HEADLINE,
    KERNELS,
    LOADED,
    NO_GPU_LINE,
    NOT_LOADED,
    Project,
    skip_unsupported,
    used_kernels,
)

TABLE = """\
library              size    GPU code    unused    share    for other GPUs    no used kernel    elements kept    kernels used
----------------  -------  ----------  --------  -------  ----------------  ----------------  ---------------  --------------
libquickstart.so  88.7 kB     67.2 kB   60.2 kB    89.6%           57.8 kB            2.4 kB          3 of 28         4 of 13
----------------  -------  ----------  --------  -------  ----------------  ----------------  ---------------  --------------
total             88.7 kB     67.2 kB   60.2 kB    89.6%           57.8 kB            2.4 kB          3 of 28         4 of 13
"""  # noqa: E501

COVERAGE = """\
kernel coverage      kernels    looked up    share    templates    tests
-----------------  ---------  -----------  -------  -----------  -------
libquickstart.so          13            4    30.8%           12        4
- (no namespace)          10            3    30.0%           10        3
- matrices                 3            1    33.3%            2        1
"""

UNUSED = """\
Unused kernels of libquickstart.so, 9 of 13:
  void matrices::multiply<32>(float const*, float const*, float*, int, int, int)
  matrices::transpose(float const*, float*, int, int)
  image_blur
  image_flip
  image_threshold
  statistics_histogram
  statistics_variance
  vector_clamp
  vector_dot
"""

MARKDOWN = f"""\
# GPU code used by the tests

60.2 kB of 67.2 kB GPU code (89.6%) in 1 library is unused on NVIDIA H200 (9.0).

{NO_GPU_LINE}

| library | GPU code | unused | | for other GPUs | no used kernel | kernels | used |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
| `libquickstart.so` | 67.2 kB | 60.2 kB | 89.6% | 57.8 kB | 2.4 kB | 13 | 4 |

## Kernel coverage

| library | source file or namespace | kernels | looked up | |
| --- | --- | ---: | ---: | ---: |
| `libquickstart.so` |  | 10 | 3 | 30.0% |
| `libquickstart.so` | `matrices` | 3 | 1 | 33.3% |
"""


def row(folder: Path) -> dict[str, Any]:
    return {
        "path": str(folder / "quickstart" / "libquickstart.so"),
        "size": 88744,
        "code_bytes": 67200,
        "elements": 28,
        "kept": [{"reason": "loaded", "elements": 3, "bytes": 6984}],
        "unused": [
            {"reason": "no-used-kernel", "elements": 1, "bytes": 2368},
            {"reason": "wrong-arch", "elements": 24, "bytes": 57848},
        ],
        "kernels": 13,
        "used_kernels": 4,
        "first_uses": [
            [name, {"phase": "call", "nodeid": test}] for name, test in FIRST_USES.items()
        ],
        "unused_kernels": [
            "_ZN8matrices8multiplyILi32EEEvPKfS2_Pfiii",
            "_ZN8matrices9transposeEPKfPfii",
            "image_blur",
            "image_flip",
            "image_threshold",
            "statistics_histogram",
            "statistics_variance",
            "vector_clamp",
            "vector_dot",
        ],
        "notes": [],
        "trimmed": None,
        "distribution": None,
        "version": None,
        "is_files": False,
    }


def same_result(project: Project) -> None:
    """What a replay finds is the same, however the tests are spread."""
    report = project.latest("report.json")
    assert report["libraries"] == [row(project.folder)]
    assert report["not_covered"] == report["warnings"] == report["crossed"] == []
    assert [tuple(d[:2]) for d in project.plan() if d[2]] == list(LOADED)
    assert used_kernels(project.latest("usage.json")) == set(KERNELS)


def test_figures_of_quickstart(quickstart: Project) -> None:
    done = quickstart.pytest("--negativa")

    shown = done.stdout.partition("= GPU code (pytest-negativa) =")[2].partition("\n")[2]
    shown, _, last = shown.rpartition("=\n")[0].rpartition("\n")
    assert "3 passed, 9 skipped, 5 recorded" in last
    run = (quickstart.results / "latest").readlink()
    assert f"{shown}\n" == (
        f"{HEADLINE}\n{NO_GPU_LINE}\n\n{TABLE}\n{COVERAGE}\n{UNUSED}\n"
        "Reports: .negativa/report.md\n\n"
        "Next: pytest --negativa on a machine with a GPU\n"
    )
    assert done.stderr == ""
    assert [p.name for p in quickstart.runs()] == [str(run)]
    assert (quickstart.results / "report.md").read_text() == MARKDOWN
    same_result(quickstart)


def test_files_of_quickstart(quickstart: Project) -> None:
    quickstart.pytest("-q", "--negativa")

    library = str(quickstart.folder / "quickstart" / "libquickstart.so")
    report = quickstart.latest("report.json")
    assert report["format"] == 1
    assert report["devices"] == ["NVIDIA H200 (9.0)"]
    assert report["replay"] == NO_GPU_LINE
    assert quickstart.latest("trace.json") == {
        "format": 1,
        "loaded_sos": [library],
        "detected_kernels": list(KERNELS),
        "devices": ["9.0"],
        "run_ids": [report["run_id"]],
    }
    plan = quickstart.plan()
    assert {tuple(d[:2]): d[3:] for d in plan if d[3] != "wrong-arch"} == {
        LOADED[0]: ["loaded", "tests/test_vectors.py::test_add[1] (call)"],
        LOADED[1]: ["loaded", "tests/test_matrices.py::test_multiply[1-1-1] (call)"],
        LOADED[2]: ["loaded", "tests/test_statistics.py::test_sum_with_default_weights[1] (call)"],
        NOT_LOADED: ["no-used-kernel", None],
    }
    spans = quickstart.latest("spans/libquickstart.so.json")
    assert (spans["so_path"], spans["size"]) == (library, 88744)
    assert spans["build_id"] == "46a8ce413ca18294e9e43a0014c5c4c9f1de4822"
    unused = [{"start": d[0], "end": d[1], "reason": d[3]} for d in plan if not d[2]]
    assert spans["spans"] == unused
    assert len(unused) == 25 and sum(s["end"] - s["start"] for s in unused) == 60216
    library_map = quickstart.latest("map/libquickstart.so.json")
    assert [len(r["elements"]) for s in library_map["sections"] for r in s["regions"]] == [7] * 4
    [process] = quickstart.latest("usage.json")["processes"]
    assert process["ended"] is True
    assert process["header"]["role"] == "solo" and process["header"]["detector"] == "replay"
    [trace] = (quickstart.results / "latest" / "trace").glob("*.jsonl")
    assert trace.name == process["trace"]


def test_unused_kernels_inside_kept_elements(quickstart: Project) -> None:
    done = quickstart.pytest("--negativa", "--negativa-granularity=kernel")

    assert (
        "\n\nInside 3 kept elements, 8.2 kB of 12.7 kB code (64.6%, unpacked) belongs to kernels "
        "that no test used.\n\n"
    ) in done.stdout
    report = quickstart.latest("report.json")
    expected = row(quickstart.folder)
    expected["trimmed"] = {"cubins": 3, "code_bytes": 12_672, "unused_bytes": 8_192}
    assert report["libraries"] == [expected]
    # Which elements stay is not touched by it.
    assert [tuple(d[:2]) for d in quickstart.plan() if d[2]] == list(LOADED)


@pytest.mark.slow
@pytest.mark.parametrize(
    "distribution", [(), pytest.param(("--dist", "loadfile"), marks=pytest.mark.slow)]
)
def test_workers_find_the_same(quickstart: Project, distribution: tuple[str, ...]) -> None:
    done = quickstart.pytest("-q", "--negativa", "-n2", *distribution)

    assert HEADLINE in done.stdout and NO_GPU_LINE in done.stdout
    assert done.stdout.count("GPU code (pytest-negativa)") == 1
    same_result(quickstart)
    processes = quickstart.latest("usage.json")["processes"]
    roles = sorted((p["header"]["role"], p["header"].get("worker")) for p in processes)
    assert roles == [("controller", None), ("worker", "gw0"), ("worker", "gw1")]


def test_without_xdist(quickstart: Project) -> None:
    quickstart.pytest("-q", "--negativa", "-p", "no:xdist")
    same_result(quickstart)


def test_without_terminal_the_files_are_written(quickstart: Project) -> None:
    done = quickstart.pytest("--negativa", "-p", "no:terminal")
    assert done.stdout + done.stderr == ""
    assert (quickstart.results / "report.md").read_text() == MARKDOWN
    same_result(quickstart)


def test_only_the_reports_that_are_asked_for(quickstart: Project) -> None:
    (quickstart.folder / "out").mkdir()
    done = quickstart.pytest(
        "-q", "--negativa", "--negativa-report=json:out/n.json", "--negativa-report=markdown:a.md"
    )

    assert "GPU code" not in done.stdout
    assert "\nReports: out/n.json, a.md\n" in done.stdout
    written = json.loads((quickstart.folder / "out" / "n.json").read_text())
    assert written == quickstart.latest("report.json")
    assert (quickstart.folder / "a.md").read_text() == MARKDOWN
    assert not (quickstart.results / "report.md").exists()


@pytest.mark.slow
def test_a_part_of_the_recorded_tests(quickstart: Project) -> None:
    """A recording can't be cut: all of it is replayed, and that is said, by one process."""
    for workers in ((), ("-n2",)):
        done = quickstart.pytest("-q", "--negativa", *workers, "tests/test_vectors.py")
        [line] = [s for s in done.stdout.splitlines() if "did not run here" in s]
        assert re.fullmatch(
            r"  3 recorded tests did not run here: (tests/test_(matrices|statistics)\S+(, )?){3}",
            line,
        )


@pytest.mark.slow
def test_two_sessions_at_once(quickstart: Project) -> None:
    command = (sys.executable, "-m", "pytest", "-q", "--negativa")
    both = [quickstart.start(*command, *workers) for workers in ((), ("-n2",))]
    texts = ["".join(process.communicate(timeout=120)) for process in both]
    skip_unsupported("".join(texts))

    assert [process.returncode for process in both] == [0, 0], texts
    assert all(HEADLINE in text for text in texts)
    runs = quickstart.runs()
    counts = []
    for run in runs:
        usage = json.loads((run / "usage.json").read_text())
        assert usage["run_ids"] == [run.name]
        assert {p["header"]["run_id"] for p in usage["processes"]} == {run.name}
        counts.append(len(usage["processes"]))
    assert sorted(counts) == [1, 3]
    assert (quickstart.results / "latest").readlink().name in {run.name for run in runs}
    assert [path.name for path in quickstart.results.glob(".*")] == [".gitignore"]
