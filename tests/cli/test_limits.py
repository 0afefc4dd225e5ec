"""The limits of commands that have a run: each just kept, and each just crossed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from pytest_negativa.cli.report import LIMITS
from pytest_negativa.settings.options import BY_NAME
from tests.support.limits import (
    REGIONS,
    crossed_limits,
    kept_limits,
    limits_in_file,
    told_limits,
    write_baseline,
)
from tests.support.verified import VerifiedProject

pytestmark = pytest.mark.slow

PROGRAM = f"""
import atexit
from standin_gpu import trace_program, use

detector = trace_program()
atexit.register(detector.stop)
use("lib.so", *{REGIONS})
"""


@pytest.fixture(scope="module")
def debloated(tmp_path_factory: pytest.TempPathFactory) -> VerifiedProject:
    project = VerifiedProject(tmp_path_factory.mktemp("limits") / "project", "")
    project.write("program.py", PROGRAM)
    project.negativa("debloat", "--", sys.executable, "program.py")
    written = project.negativa("report", "baseline:-").stdout
    write_baseline(project.folder, json.loads(written))
    return project


def test_there_is_a_case_for_each_limit() -> None:
    flags = {flag.partition("=")[0] for flag in kept_limits()}
    # tests/session/test_runtime_code.py keeps and crosses the limit on code compiled at run time.
    assert {*flags, "--no-jit"} == {f"--{BY_NAME[name].flag_name}" for name in LIMITS}


@pytest.mark.parametrize(
    ("command", "program"),
    [
        (("locate",), ()),
        (("debloat",), ("--", sys.executable, "program.py")),
        (("combine", "{run}"), ()),
        (("report",), ()),
        (("verify",), ()),
        (("verify", "--heal"), ()),
    ],
    ids=["locate", "debloat", "combine", "report", "verify", "heal"],
)
def test_a_command_with_all_limits_just_kept_and_just_crossed(
    debloated: VerifiedProject, command: Sequence[str], program: Sequence[str]
) -> None:
    latest = debloated.results / "latest"
    run = latest.resolve()
    words = [word.format(run=run) for word in command]
    done: list[Any] = []

    given = command == ("report",)
    for limits in (kept_limits(), crossed_limits()):
        text = "" if given else limits_in_file(limits)
        debloated.write("negativa.yaml", text)
        flags = limits if given else ()
        status = int(limits == crossed_limits())
        done.append(debloated.negativa(*words, *flags, *program, status=status))
    kept, crossed = done

    assert not [line for line in kept.stderr.splitlines() if not line.startswith("Next: ")]
    told = [line for line in crossed.stderr.splitlines() if not line.startswith("Next: ")]
    for text in told_limits():
        assert [line for line in told if text in line], (text, told)
    assert len(told) == len(told_limits()), told
    # A combined run can't be verified.
    latest.unlink()
    latest.symlink_to(run.name)
