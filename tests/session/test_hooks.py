"""The four hooks, each with an effect that can be seen in the result."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.faults import PlantedFault
from tests.support.libraries import BIN
from tests.support.sessions import (
    HEADLINE,
    KERNELS,
    LOADED,
    NOT_LOADED,
    Project,
    import_path,
    used_kernels,
)

# Writes what the H200's driver was asked for, and notes what the session asks of it.
DETECTOR = """
from pathlib import Path

import pytest
from msgspec.structs import replace
from pytest_negativa.tracing.trace_files import TraceWriter
from pytest_negativa.tracing.replay import Recording, ReplayDetector


class OwnDetector(ReplayDetector):
    def pause(self, reason):
        self.warn("gap", f"off: {reason}", incomplete=True)

    def resume(self):
        self.warn("resumed", "on again")

    def set_context(self, context):
        super().set_context(context)
        with open("contexts.txt", "a") as file:
            file.write(f"{context.phase.value} {context.nodeid} {context.detail}\\n")


def pytest_negativa_register_detector(settings, path, header):
    assert settings.enabled and header.role.value in ("solo", "worker", "controller")
    writer = TraceWriter(path, replace(header, detector="own 1.0"))
    return OwnDetector(writer, Recording(Path("recorded")))
"""

SUITE = """
import pytest


@pytest.fixture(scope="module")
def shared():
    pass


@pytest.fixture
def own():
    pass


def test_a(shared, own):
    pass
"""


def with_plugin(project: Project, text: str) -> Project:
    project.write("plugin_under_test.py", text)
    project.environ["PYTHONPATH"] = import_path(project.folder)
    project.environ["PYTEST_ADDOPTS"] += " -p plugin_under_test"
    return project


def test_own_detector_where_there_is_no_gpu(project: Project) -> None:
    (project.folder / "negativa.yaml").unlink()
    project.write("test_a.py", SUITE)

    done = with_plugin(project, DETECTOR).pytest("-q", "--negativa")

    assert HEADLINE in done.stdout
    # Not a replay as far as the plugin knows.
    assert "No GPU" not in done.stdout
    usage = project.latest("usage.json")
    assert used_kernels(usage) == set(KERNELS)
    assert [p["header"]["detector"] for p in usage["processes"]] == ["own 1.0"]
    contexts = (project.folder / "contexts.txt").read_text().splitlines()
    assert contexts == [
        "import None None",
        "collection None None",
        "session None None",
        "setup test_a.py::test_a None",
        "fixture test_a.py shared",
        "setup test_a.py::test_a None",
        "session None None",
        "call test_a.py::test_a None",
        "session None None",
        "teardown test_a.py::test_a None",
        "session None None",
        "session None pytest_sessionfinish",
        "session None pytest_terminal_summary",
        "session None pytest_sessionfinish",
        "session None None",
        "session None pytest_unconfigure",
        "session None None",
        "session None after the session",
    ]


@pytest.mark.slow
def test_own_detector_in_workers(project: Project) -> None:
    (project.folder / "negativa.yaml").unlink()
    project.write("test_a.py", SUITE)
    done = with_plugin(project, DETECTOR).pytest("-q", "--negativa", "-n2")
    assert HEADLINE in done.stdout
    headers = [p["header"] for p in project.latest("usage.json")["processes"]]
    assert sorted((h["detector"], h.get("worker", "")) for h in headers) == [
        ("own 1.0", ""), ("own 1.0", "gw0"), ("own 1.0", "gw1"),
    ]  # fmt: skip


def test_own_detector_that_fails(project: Project) -> None:
    project.write("test_a.py", SUITE)
    with_plugin(
        project, "def pytest_negativa_register_detector():\n    raise ValueError('no luck')\n"
    )
    done = project.pytest("-q", "--negativa")
    assert "1 passed" in done.stdout
    assert (
        "negativa: nothing was traced: the detector of a plugin failed: ValueError: no luck"
        in done.stdout
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("@pytest.mark.negativa_off(reason='profiles itself')\ndef test_a():\n    pass\n",
         "profiles itself"),
        ("@pytest.mark.negativa_off('says so')\ndef test_a():\n    pass\n", "says so"),
        ("@pytest.mark.negativa_off\ndef test_a():\n    pass\n", "marked negativa_off"),
        ("def test_a(negativa_off):\n    pass\n",
         "the fixture negativa_off of test_a.py::test_a"),
    ],
)  # fmt: skip
def test_marker_and_fixture_release_the_detector(project: Project, text: str, reason: str) -> None:
    project.write("test_a.py", f"import pytest\n\n\n{text}")

    done = with_plugin(project, DETECTOR).pytest("-q", "--negativa", "--strict-markers")

    assert f"off: {reason}\n" in done.stdout
    usage = project.latest("usage.json")
    assert [lack["text"] for lack in usage["incomplete"]] == [f"off: {reason}"]
    assert "on again" in {w["text"] for w in usage["warnings"]}
    assert {d[3] for d in project.plan()} == {"incomplete"}


def test_added_libraries(project: Project) -> None:
    """A library that no process had loaded: nothing of it is used."""
    project.write("test_a.py", SUITE)
    with_plugin(
        project,
        "def pytest_negativa_libraries(config, settings, usage):\n"
        "    assert len(usage.libraries) == 1\n"
        f"    return [{str(BIN)!r} + '/libmultiarch.so']\n",
    )

    done = project.pytest("-q", "--negativa")

    assert "in 2 libraries is unused" in done.stdout
    rows = {Path(r["path"]).name: r for r in project.latest("report.json")["libraries"]}
    assert rows["libquickstart.so"]["used_kernels"] == 4
    assert (rows["libmultiarch.so"]["elements"], rows["libmultiarch.so"]["kept"]) == (21, [])
    assert not any(d[2] for d in project.plan("libmultiarch.so"))


@pytest.mark.slow
@pytest.mark.planted_fault(
    "A hook of conftest.py keeps code, and negativa locate plans the run again without the hook.",
    says="for the hook pytest_negativa_keep_element. Commands call no hooks",
)
def test_veto(project: Project, fault: PlantedFault) -> None:
    """Asked for elements and for bare frames, and only for those that nothing else keeps."""
    project.write("test_a.py", SUITE)
    with_plugin(
        project,
        f"""
def pytest_negativa_libraries():
    return [{str(BIN)!r} + "/libframes.so"]


def pytest_negativa_keep_element(settings, library, element):
    names = {{kernel.name for kernel in library.kernels_of(element.content)}}
    assert "vector_add" not in names, "it is kept anyhow"
    if "image_blur" in names or "scale" in names:
        return f"ours, {{type(element).__name__}}"
""",
    )

    project.pytest("-q", "--negativa")

    kept = {tuple(d[:2]): d[3:] for d in project.plan() if d[2]}
    assert set(kept) == {*LOADED, NOT_LOADED}
    assert kept[NOT_LOADED] == ["hook", "ours, Element"]
    frames = project.plan("libframes.so")
    assert len(frames) == 3
    reasons = [d[3:] for d in frames if d[2]]
    assert reasons and all(reason == ["hook", "ours, Element"] for reason in reasons)
    # The one for sm_80 is of no use here, and its names are not read.
    assert ["wrong-arch", None] in [d[3:] for d in frames]

    fault.check(project.negativa("locate").stderr)
    assert not any(d[3] == "hook" for d in project.plan())


@pytest.mark.slow
def test_added_report(project: Project) -> None:
    project.write("test_a.py", SUITE)
    with_plugin(
        project,
        "from pathlib import Path\n\n\n"
        "def pytest_negativa_report(config, settings, report):\n"
        "    Path('own.txt').write_text(f'{report.unused_bytes} of {report.code_bytes}')\n"
        "    return 'first line\\nsecond line'\n",
    )

    done = project.pytest("-q", "--negativa")

    assert (project.folder / "own.txt").read_text() == "60216 of 67200"
    assert "\nfirst line\nsecond line\nNext: " in done.stdout

    # Also where there is nothing to tabulate.
    (project.folder / "own.txt").unlink()
    project.pytest("-q", "--negativa", "--negativa-include-library=libother.so")
    assert (project.folder / "own.txt").read_text() == "0 of 0"


@pytest.mark.slow
@pytest.mark.parametrize("hook", ["libraries", "keep_element", "report"])
def test_a_hook_that_fails_takes_no_result_with_it(project: Project, hook: str) -> None:
    project.write("test_a.py", SUITE)
    with_plugin(project, f"def pytest_negativa_{hook}():\n    raise KeyError('what')\n")

    done = project.pytest("-q", "--negativa", status=1)

    assert "1 passed" in done.stdout
    assert "negativa: no report: KeyError: 'what' (a fault in" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr and "INTERNALERROR" not in done.stdout


def test_the_error_of_a_hook_does_not_reach_the_terminal_raw(project: Project) -> None:
    project.write("test_a.py", SUITE)
    body = "raise OSError('no\\x1b[2Jsuch')"
    with_plugin(project, f"def pytest_negativa_report():\n    {body}\n")

    done = project.pytest("-q", "--negativa", status=1)

    assert "negativa: no report: OSError: no\\x1b[2Jsuch (a fault in" in done.stdout
    assert "\x1b[2J" not in done.stdout + done.stderr
