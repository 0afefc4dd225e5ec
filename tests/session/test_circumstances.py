"""What is noted of how a session was started."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path

import pytest

from pytest_negativa.processes.open_watch import OpenWatch
from pytest_negativa.session.circumstances import circumstances_of, modules_below

ADDS = """
from pathlib import Path

def pytest_addoption(parser):
    parser.addoption("--device", default=Path("cpu"), type=Path)
"""


def test_paths_values_and_pytests_configuration(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(ADDS)
    pytester.makeini("[pytest]\n")
    config = pytester.parseconfigure("--device=cuda")
    known = circumstances_of(config, {"KEY": "secret", "OTHER": "b"}, ["test_a.py"])
    assert known.options["device"] == repr(Path("cuda"))
    assert set(known.files) == {"conftest.py", "tox.ini"}
    assert {name: len(digest) for name, digest in known.variables.items()} == {"KEY": 4, "OTHER": 4}
    pytester.makeini("[pytest]\nmarkers = a\n")
    assert circumstances_of(config, {"KEY": "x"}, []).files != known.files


def test_an_extension_module_is_known_by_its_time_and_not_opened(
    pytester: pytest.Pytester,
) -> None:
    config = pytester.parseconfigure()
    module = pytester.path / "ours.abi3.so"
    module.write_bytes(b"one")
    with OpenWatch([str(module)]) as watch:
        known = circumstances_of(config, {}, [module.name])
        os.utime(module, ns=(0, 0))
        assert circumstances_of(config, {}, [module.name]).files != known.files
    assert set(known.files) == {module.name}
    assert watch.opens.times == {}


def test_modules_of_the_project_and_no_installed_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lazy:
        def __getattr__(self, name: str) -> object:
            raise AssertionError(name)

    for name in ("site-packages", "src"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"from_{name[:4]}.py").touch()
        monkeypatch.syspath_prepend(tmp_path / name)
        monkeypatch.setitem(sys.modules, f"from_{name[:4]}", import_module(f"from_{name[:4]}"))
    monkeypatch.setitem(sys.modules, "lazy", Lazy())
    assert modules_below(tmp_path) == ["src/from_src.py"]
