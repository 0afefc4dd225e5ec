"""Which distribution a file belongs to."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_negativa.installed.owners import Owners
from pytest_negativa.installed.sites import Site
from pytest_negativa.models.lock import Place
from tests.support.libraries import MULTIARCH
from tests.support.sites import make_wheel, pip_install


def test_installed(tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    pip_install(site, make_wheel(tmp_path, "my-code", "1.5", {"my/lib/x.so.1": MULTIARCH}))
    found = Owners().of(str(site / "my/lib/x.so.1"))
    assert found == Place("my/lib/x.so.1", "my-code", "1.5")
    (site / "my/lib/y.so").touch()
    assert Owners().of(str(site / "my/lib/y.so")) == Place("my/lib/y.so")


def test_installed_outside_of_the_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wheels of mkl and tbb install their libraries into ``lib`` of the virtual environment."""
    site = tmp_path / "lib/python3/site-packages"
    (site / "my_code-1.5.dist-info").mkdir(parents=True)
    (site / "my_code-1.5.dist-info/METADATA").write_text("Name: my-code\nVersion: 1.5\n")
    (site / "my_code-1.5.dist-info/RECORD").write_text("../../libx.so,,\n")
    library = Path(shutil.copy(MULTIARCH, tmp_path / "lib/libx.so"))
    assert Owners().of(str(library)) == Place(str(library))
    monkeypatch.syspath_prepend(site)
    assert Owners().of(str(library)) == Place(str(library), "my-code", "1.5")


def test_metadata_that_are_not_utf_8(tmp_path: Path) -> None:
    """Builders of old wheels wrote the encoding of their machine."""
    for name, summary in (("old", b"caf\xe9"), ("new", "café".encode())):
        folder = tmp_path / f"{name}-1.5.dist-info"
        folder.mkdir()
        content = f"Name: {name}\nVersion: 1.5\nSummary: ".encode() + summary
        (folder / "METADATA").write_bytes(content)
    assert [one.name for one in Site(tmp_path).installed] == ["new"]
    assert [one.name for one in Site(tmp_path).with_requirements(["old", "new"])] == ["new"]


def test_with_the_backport_of_importlib_metadata(tmp_path: Path) -> None:
    """Once imported, it finds the distributions of the whole process, and as its own class.

    Dask and OpenTelemetry import it.
    """
    site = tmp_path / "site-packages"
    pip_install(site, make_wheel(tmp_path, "my-code", "1.5", {"my/x.so": MULTIARCH}))
    (site / "interrupted-1.0.dist-info").mkdir()
    code = (
        "import sys, importlib_metadata\n"
        "from pytest_negativa.installed.owners import Owners\n"
        "print(Owners().of(sys.argv[1]).distribution)\n"
    )
    command = [sys.executable, "-c", code, str(site / "my/x.so")]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    assert found.stdout == "my-code\n"
