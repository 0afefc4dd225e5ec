"""While tests are traced for a proof, the libraries that they load are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.verified import VerifiedProject

SUITE = """
def test_use():
    use(LIB, 0)

def test_later():
    # Its report, which reads libraries, comes after the tests.
    cache, end = Path(os.environ["NEGATIVA_CACHE_DIR"]), time.monotonic() + 60
    while ROUND != "verify" and not [p for p in cache.rglob("*") if p.is_file()]:
        assert time.monotonic() < end, "nothing was read"
        time.sleep(0.1)
"""


@pytest.mark.slow
def test_maps_are_made_while_the_tests_run(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", SUITE)
    # Maps of smaller libraries are not kept.
    with (project.folder / "lib.so").open("ab") as library:
        library.write(bytes(1 << 20))
    assert "\nPROVED" in project.verify("--negativa")
