"""Ways to a wrong proof that were written from the documentation, before any was tried."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.libraries import NEGATIVA
from tests.support.verified import VerifiedProject

FAULTS = yaml.safe_load((Path(__file__).parents[1] / "data/held_out_faults.yaml").read_text())

READ = """
def read(offset=USED[3]):
    try:
        need(LIB, offset)
    except RuntimeError:
        return False
    return True

"""
COMMANDS = "pytest -q --negativa\npytest -q --negativa-verify\n"


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(one, id=str(number), marks=getattr(pytest.mark, mark))
        for number, one in enumerate(FAULTS)
        for mark in ["slow" if "slow" in one else "nightly"]
    ],
)
def test_held_out_fault(tmp_path: Path, fault: dict[str, Any]) -> None:
    project = VerifiedProject(tmp_path / "project", READ + fault["suite"])
    for name, text in fault.get("files", {}).items():
        project.write(name, text)
    project.environ["PATH"] = f"{NEGATIVA.parent}{os.pathsep}{os.environ['PATH']}"
    done = project.start("bash", "-exc", f"exec 2>&1\n{fault.get('commands', COMMANDS)}")
    last = done.communicate()[0].rpartition("\n+ ")[2]
    is_wrong = re.search(fault.get("wrong", "\nPROVED"), last)
    assert bool(is_wrong) == fault.get("is_limit", False), last
    assert is_wrong or re.search(fault["refused"], last), last
