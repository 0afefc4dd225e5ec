"""The library that notes the first GPU result, in real processes on a driver that stands in."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from pytest_negativa.measuring.sampler import FIRST_RESULT, FIRST_RESULT_VARIABLE
from pytest_negativa.processes.redirect import (
    REDIRECT,
    redirect_environment,
    write_table,
)
from tests.support.compiling import compile_c, compile_shared, needs_compiler

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(not FIRST_RESULT.is_file(), reason="the library was not built"),
]

OK = 0


@dataclass
class Stage:
    program: Path
    linked: dict[str, Path]
    mark: Path
    environ: dict[str, str]

    def run(self, how: str, *steps: str) -> list[int]:
        """What the driver's functions returned."""
        program = self.linked.get(how, self.program)
        done = subprocess.run(
            [str(program), how, *steps],
            env=self.environ, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return [int(line) for line in done.stdout.split()]


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    driver = compile_shared("libcuda.c", tmp_path / "driver" / "libcuda.so.1")
    flags = ("-DLINKED", str(driver))
    mark = tmp_path / "mark"
    return Stage(
        program=compile_c("program.c", tmp_path / "program"),
        linked={
            f"linked {binding}": compile_c(
                "program.c", tmp_path / f"linked-{binding}", *flags, f"-Wl,-z,{binding}"
            )
            for binding in ("lazy", "now")
        },
        mark=mark,
        environ={
            **os.environ,
            "LD_LIBRARY_PATH": str(driver.parent),
            "LD_AUDIT": str(FIRST_RESULT),
            FIRST_RESULT_VARIABLE: str(mark),
        },
    )


@pytest.mark.parametrize("how", ["dlsym", "lookup", "lookup-thread", "linked lazy", "linked now"])
def test_a_wait_after_a_launch_is_the_first_result(stage: Stage, how: str) -> None:
    before = time.monotonic_ns()
    assert stage.run(how, "launch", "wait") == [OK, OK]
    assert before < int(stage.mark.read_text("ascii")) < time.monotonic_ns()


@pytest.mark.parametrize("last", ["wait", "ask", "copy"])
def test_calls_that_tell_that_the_gpu_is_done(stage: Stage, last: str) -> None:
    assert stage.run("lookup", "launch", last) == [OK, OK]
    assert stage.mark.exists()


@pytest.mark.parametrize(
    "steps",
    [
        ("wait", "copy", "ask"),
        ("launch", "allocate"),
        ("launch", "launch"),
        ("bad-launch", "wait"),
        ("launch", "bad-wait", "ask-too-early"),
    ],
)
@pytest.mark.parametrize("how", ["dlsym", "lookup"])
def test_what_is_no_result(stage: Stage, how: str, steps: tuple[str, ...]) -> None:
    results = stage.run(how, *steps)
    assert [r == OK for r in results] == [not s.startswith(("bad", "ask-")) for s in steps]
    assert not stage.mark.exists()


def test_only_the_first_counts(stage: Stage) -> None:
    stage.run("lookup", "launch", "wait", "launch", "wait")
    first = stage.mark.read_text("ascii")
    stage.run("lookup", "launch", "wait")
    assert stage.mark.read_text("ascii") == first


@pytest.mark.skipif(not REDIRECT.is_file(), reason="the other library was not built")
def test_beside_the_library_that_redirects(stage: Stage, tmp_path: Path) -> None:
    table, logs = tmp_path / "table", tmp_path / "logs"
    logs.mkdir()
    write_table(table, tmp_path / "nowhere", ())
    environ = redirect_environment({}, table, logs)
    environ["LD_AUDIT"] = f"{FIRST_RESULT}:{environ['LD_AUDIT']}"
    stage.environ.update(environ)
    assert stage.run("lookup", "launch", "wait") == [OK, OK]
    assert stage.mark.exists()
    assert len(list(logs.iterdir())) == 1


def test_without_a_place_for_it_nothing_is_done(stage: Stage) -> None:
    del stage.environ[FIRST_RESULT_VARIABLE]
    assert stage.run("lookup", "launch", "wait") == [OK, OK]


def test_a_place_that_cannot_be_written_harms_nothing(stage: Stage) -> None:
    stage.environ[FIRST_RESULT_VARIABLE] = str(stage.mark / "nowhere")
    assert stage.run("lookup", "launch", "wait") == [OK, OK]
