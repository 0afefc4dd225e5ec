"""What NVIDIA's cuobjdump says of copies: it lists the elements that are left."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pytest_negativa.rewriting.plan_edits import overwrite
from tests.support.libraries import SHARED_OBJECTS
from tests.support.reconstructing import apply, planned_of

pytestmark = pytest.mark.real_libs


@pytest.mark.parametrize("option", ["-lelf", "-lptx"])
@pytest.mark.parametrize("library", SHARED_OBJECTS, ids=lambda path: path.stem)
def test_cuobjdump_lists_the_rest(
    library: Path, option: str, cuobjdump: Path, tmp_path: Path
) -> None:
    planned = planned_of(library)
    copy = tmp_path / library.name
    copy.write_bytes(apply(library.read_bytes(), overwrite(planned.library_map, planned.plan, 1)))

    def listed(path: Path) -> tuple[int, int]:
        done = subprocess.run([cuobjdump, "-all", option, path], capture_output=True, text=True)
        return done.returncode, done.stdout.count(" file ")

    status, count = listed(library)
    if status != 0:
        pytest.skip("cuobjdump can't read the original either")
    gone = {d.start for d in planned.plan.decisions if not d.kept and d.size}
    places = {
        e.payload.start
        for section in planned.library_map.sections
        if section.name in (".nv_fatbin", "__nv_relfatbin")
        for region in section.regions
        for e in region.elements
        if e.kind.value == ("cubin" if option == "-lelf" else "ptx")
    }
    assert listed(copy) == (0, count - len(gone & places))
