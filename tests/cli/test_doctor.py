"""doctor: one page on the machine, with a line for each obstacle to tracing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.compiling import compile_shared, needs_compiler
from tests.support.sessions import unmeasured_environ

# As much of cupti-python as tracing needs. STANDIN_CUPTI_TAKEN: another tool holds CUPTI.
# STANDIN_CUPTI_LACKS: it finds no library, and raises what cupti-python 13 does.
CUPTI = """
import os


class cuptiError(Exception):
    status = 39


class SubscriberParams:
    ptr, old_subscriber_name = 0, "another tool"


def subscribe_v2(*_):
    if "STANDIN_CUPTI_TAKEN" in os.environ:
        raise cuptiError
    if "STANDIN_CUPTI_LACKS" in os.environ:
        raise RuntimeError("CUDA driver is not found")
    return 1


def enable_callback(*_): ...
def unsubscribe(*_): ...
"""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder with a stand-in of the driver, and one of cupti-python."""
    compile_shared("driver.c", tmp_path / "libcuda.so.1")
    (tmp_path / "cupti").mkdir()
    (tmp_path / "cupti" / "cupti.py").write_text(CUPTI)
    return tmp_path


def doctor(folder: Path, *words: str, status: int, **environ: str) -> str:
    added = {"LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(folder), **environ}
    done = subprocess.run(
        [sys.executable, "-m", "pytest_negativa", "doctor", *words],
        cwd=folder,
        env=unmeasured_environ() | added,
        capture_output=True,
        text=True,
        check=False,
    )
    following = "negativa inspect" if status else "pytest --negativa"
    next_line = "" if words else f"Next: {following}\n"
    assert (done.returncode, done.stderr) == (status, next_line)
    return done.stdout


@needs_compiler
def test_a_machine_that_can_trace(machine: Path) -> None:
    page = doctor(machine, status=0, CUDA_VISIBLE_DEVICES="0")
    assert page.endswith("\n\nGPU code can be traced here\n")
    for line in (
        r"Python: 3\.\d+\.\d+.*, /",
        r"system: Linux-.*glibc",
        r"pytest: \d",
        "CUDA_VISIBLE_DEVICES: 0",
        "CUPTI: works, ",
        r"GPU: Stand-in, compute capability 9\.0",
        r"driver: .*, CUDA 13\.0",
        "loading: lazy",
        "proofs: (work .LD_AUDIT.|do not work: )",
        rf"runs: {machine}/\.negativa, writable",
    ):
        assert re.search(f"^{line}", page, re.MULTILINE), line
    assert not (machine / ".negativa").exists()


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("environ", "obstacle"),
    [
        ({"STANDIN_CUPTI_TAKEN": "1"}, 'CUPTI serves one tool at a time and is taken by "another'),
        ({"STANDIN_CUPTI_LACKS": "1"}, "CUPTI refuses to work here: CUDA driver is not found"),
        ({"STANDIN_NO_DEVICE": "1"}, "no GPU works here (cuInit gave error 100): run where"),
        ({"CUDA_MODULE_LOADING": "EAGER"}, "all code would count as used: unset CUDA_MODULE"),
    ],
)
def test_an_obstacle_has_a_line(machine: Path, environ: dict[str, str], obstacle: str) -> None:
    page = doctor(machine, status=1, **environ)
    _, _, obstacles = page.partition("GPU code cannot be traced here\n")
    assert obstacle in obstacles
    assert obstacles.count("\n") == 1


def test_a_machine_without_anything(tmp_path: Path) -> None:
    """Where a session replays a trace, the page has both lines, and the rest all the same."""
    nothing = {"PYTHONPATH": "", "CUDA_VISIBLE_DEVICES": "-1"}
    page = doctor(tmp_path, status=1, **nothing)
    assert "\n- no GPU works here (" in page or "\n- cupti-python can't be imported" in page

    facts = json.loads(doctor(tmp_path, "--json", status=1, **nothing))["rows"]
    obstacles = [fact["obstacle"] for fact in facts if fact["obstacle"]]
    assert page.endswith("".join(f"\n- {obstacle}" for obstacle in obstacles) + "\n")
    assert [fact["value"] for fact in facts if fact["name"] == "CUDA_VISIBLE_DEVICES"] == ["-1"]


@pytest.mark.parametrize("width", [40, 80])
def test_the_page_fits_a_terminal(tmp_path: Path, width: int) -> None:
    """All but long words, such as paths, which can be copied."""
    folder = tmp_path / "-".join(["a-folder-with-a-long-name"] * 4)
    folder.mkdir()
    page = doctor(folder, status=1, PYTHONPATH="", COLUMNS=str(width))
    assert f"{folder / '.negativa'}," in page and sys.executable in page
    lines = page.partition("\n\n")[0].split("\n")
    assert all(len(line) <= width or " " not in line.strip() for line in lines)
