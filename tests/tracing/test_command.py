"""Where CUPTI is found, and what a command is started with."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from pytest_negativa.errors import NegativaError, StoreError
from pytest_negativa.storage.runs import Run
from pytest_negativa.tracing import command as running
from pytest_negativa.tracing.children import injection_library
from pytest_negativa.tracing.command import CommandNotFound, find_cupti, run_traced

ROOT = Path("/project")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / ".negativa" / "run")


def place(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_cupti_of_the_first_package_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert find_cupti(["", str(tmp_path / "a")]) is None
    toolkit = place(tmp_path / "cuda" / "extras/CUPTI/lib64/libcupti.so")
    assert find_cupti([str(tmp_path / "a")]) == str(toolkit)
    twelve = place(tmp_path / "a" / "nvidia/cuda_cupti/lib/libcupti.so.12")
    assert find_cupti([str(tmp_path / "a")]) == str(twelve)
    thirteen = place(tmp_path / "a" / "nvidia/cu13/lib/libcupti.so.13")
    assert find_cupti(["", str(tmp_path / "none"), str(tmp_path / "a")]) == str(thirteen)


def test_what_the_command_inherits(run: Run, tmp_path: Path) -> None:
    code = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))"
    target = tmp_path / "environ.json"
    assert run_traced([sys.executable, "-c", code, str(target)], run, ROOT) == 0
    environ = json.loads(target.read_text())
    assert environ["CUDA_INJECTION64_PATH"] == str(injection_library())
    assert environ["NEGATIVA_TRACE_DIR"] == str(run.trace_dir)
    assert environ["NEGATIVA_RUN_ID"] == "run"
    assert environ["NEGATIVA_ROOT"] == str(ROOT)
    assert environ["NEGATIVA_LACKS"].startswith("negativa-")
    assert run.trace_dir.is_dir()
    assert "CUDA_INJECTION64_PATH" not in os.environ


@pytest.mark.parametrize(("code", "status"), [("exit 0", 0), ("exit 5", 5), ("kill -TERM $$", 143)])
def test_status(run: Run, code: str, status: int) -> None:
    assert run_traced(["sh", "-c", code], run, ROOT) == status


def test_commands_that_cannot_be_started(run: Run, tmp_path: Path) -> None:
    with pytest.raises(CommandNotFound, match="no-such-program: not found"):
        run_traced(["no-such-program"], run, ROOT)
    assert not run.folder.exists()
    script = tmp_path / "empty"
    script.write_bytes(b"\x7fELF")
    script.chmod(0o755)
    with pytest.raises(NegativaError, match="empty: cannot be started: Exec format error"):
        run_traced([str(script)], run, ROOT)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be created"):
        run_traced(["true"], Run(tmp_path / "file" / "run"), ROOT)


def test_without_the_native_library(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "injection_library", lambda: None)
    with pytest.raises(NegativaError, match="install a C compiler"):
        run_traced(["true"], run, ROOT)
