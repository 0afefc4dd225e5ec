"""How often slim opens a library, beside the program that certifies it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.compacting import needs_compiler
from tests.support.made_site import Made

pytestmark = needs_compiler

_SLIM = """
import sys
from pathlib import Path
from pytest_negativa.arch import ComputeCapability
from pytest_negativa.slimming.request import SlimOptions, SlimRequest
from pytest_negativa.slimming.slim import slim_trees
from pytest_negativa.slimming.spares import SpareTarget

folder, library, spares = sys.argv[1:]
opened = []
sys.addaudithook(lambda event, args: opened.append(args[0]) if event == "open" else None)
options = SlimOptions(spare=SpareTarget(Path(spares)) if spares else None)
devices = (ComputeCapability(7, 5),)
report = slim_trees(SlimRequest(paths=(Path(folder),), devices=devices, options=options))
print([row.status.value for row in report.rows if row.path == library])
print(opened.count(str(Path(folder, library))))
"""


@pytest.mark.parametrize(
    ("has_spare", "count"),
    [
        # For its facts, and for the work.
        (False, 2),
        # All are planned before the first is cut, and the holes of the result are counted.
        (True, 4),
    ],
)
def test_a_library_is_opened_once_for_each_step(
    site: Made, tmp_path: Path, has_spare: bool, count: int
) -> None:
    spares = str(tmp_path / "spares") if has_spare else ""
    library = site.one.resolve().relative_to(site.folder.resolve()).as_posix()
    command = [sys.executable, "-c", _SLIM, str(site.folder.resolve()), library, spares]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["['slimmed']", str(count)]
