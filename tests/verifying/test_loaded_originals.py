"""Originals under another path than their own, mapped while the tests run on the copies."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from pytest_negativa.models.trace import LibraryUsage, TracedLibrary
from pytest_negativa.rewriting.reconstruct import reconstruct
from pytest_negativa.tracing.libraries import identify_library
from pytest_negativa.verifying.used_originals import loaded_originals
from tests.support.faults import PlantedFault
from tests.support.libraries import MULTIARCH
from tests.support.reconstructing import planned_of
from tests.support.usages import image_use, usage_of
from tests.support.verified import VerifiedProject

NAMED = "process 7 (/usr/bin/python3)"


def found(
    original: Path, *mapped: TracedLibrary, used: bool = False
) -> tuple[dict[str, str], str | None]:
    """What the traces of rounds tell, in which a process had files mapped."""
    images = (image_use(),) if used else ()
    uses = (LibraryUsage(library=file, images=images, processes=(0,)) for file in mapped)
    return loaded_originals(
        usage_of(*uses), reconstruct([planned_of(original)], original.parent / "copies")
    )


def test_an_original_is_known_by_its_content(tmp_path: Path) -> None:
    original = Path(shutil.copy(MULTIARCH, tmp_path / "lib.so"))
    made = reconstruct([planned_of(original)], tmp_path / "copies").libraries[0]
    ours = identify_library(made.copy)
    # The copy of the reconstruction has size and build id of the original.
    assert (ours.size, ours.build_id) == (made.library.size, made.library.build_id)
    of_ours = identify_library(shutil.copy(made.copy, f"{tmp_path}/of-ours.so"))
    other = replace(identify_library(str(original)), path="/x.so", size=1)
    assert found(original, ours, of_ours, other) == ({}, None)

    path = str(original)
    itself = identify_library(path)
    assert found(original, itself)[0] == {path: f"{NAMED} had the original mapped"}
    copy = identify_library(shutil.copy(path, f"{tmp_path}/copy.so"))
    expected = f"{NAMED} had {copy.path}, a copy of the original, mapped"
    assert found(original, copy)[0] == {path: expected}
    Path(copy.path).unlink()
    assert "is gone and may have been" in found(original, copy)[0][path]


@pytest.mark.planted_fault(
    "While the tests run on the copies, a process loads GPU code from a file without a name.",
    says="process 7 (/usr/bin/python3) loaded GPU code from /memfd:x, which was gone",
)
def test_a_file_that_nothing_identifies(tmp_path: Path, fault: PlantedFault) -> None:
    original = Path(shutil.copy(MULTIARCH, tmp_path / "lib.so"))
    nameless = TracedLibrary(path="/memfd:x")
    assert found(original, nameless)[1] is None
    fault.check(str(found(original, nameless, used=True)[1]))


@pytest.mark.slow
@pytest.mark.planted_fault(
    "A test copies a library, uses the copy and removes it, so it never runs on our copy.",
    says="/gone.so, which has changed or is gone and may have been a copy of the original, mapped",
)
def test_a_test_that_copies_a_library(tmp_path: Path, fault: PlantedFault) -> None:
    project = VerifiedProject(
        tmp_path / "project",
        """
import shutil

def test_use():
    use(LIB, 0)

def test_copy(tmp_path):
    copy = Path(shutil.copy(LIB, tmp_path / "gone.so"))
    use(copy, 1)
    copy.unlink()
""",
    )
    project.write("negativa.yaml", "verify: {opened_originals: '*'}\n")
    project.trace()
    plan = project.latest("plan/lib.so.json")
    names = [kernel[0] for kernel in plan["used_kernels"]]
    assert names == ["_ZN8matrices8multiplyILi16EEEvPKfS2_Pfiii", "vector_add"]
    project.verify(status=1)
    status, detail = project.statuses()["lib.so"]
    assert status == "not proved"
    fault.check(str(detail))
    done = project.negativa("lock", "--unproved", "-o", "lock")
    assert "left out" not in done.stdout


@pytest.mark.slow
def test_two_paths_of_one_library_are_proved_and_locked_as_one(tmp_path: Path) -> None:
    project = VerifiedProject(
        tmp_path / "project",
        """
HERE = Path(__file__).parent

def test_each():
    for number, name in enumerate(("lib.so", "other.so")):
        use(HERE / name, number)
""",
    )
    library = project.folder / "lib.so"
    shutil.copy(library, project.folder / "other.so")
    project.trace()
    plans = [project.plan(name) for name in ("lib.so", "other.so")]
    assert plans[0] == plans[1]
    assert sum(reason == "loaded" for *_, reason, _detail in plans[0]) == 2
    assert "\nPROVED" in project.verify()
    assert {status for status, _ in project.statuses().values()} == {"proved"}
    assert "1 library," in project.negativa("lock", "-o", "lock").stdout
