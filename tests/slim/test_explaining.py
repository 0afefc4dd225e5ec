"""What a user is told about an error on slimmed libraries."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from pytest_negativa.cli import main
from pytest_negativa.explaining import explain, slimmed_in
from tests.slim.conftest import Made

NO_IMAGE = "CUDA error: no kernel image is available for execution on the device"


@pytest.fixture
def slim(site: Made) -> Made:
    """An installation whose libraries lost their code for all archs but one."""
    done = CliRunner().invoke(main, ["slim", "--archs", "sm_90", str(site.folder)])
    assert done.exit_code == 0, done.output
    assert slimmed_in([site.folder]), done.output
    return site


def test_names_library_and_who_said_what_stays(slim: Made) -> None:
    done = CliRunner().invoke(main, ["explain", NO_IMAGE, "--in", str(slim.folder)])
    assert done.exit_code == 0
    assert "a kernel gives whose code was removed" in done.output
    assert str(slim.one) in done.output
    assert "what devices of 9.0 can load" in done.output
    assert "negativa combine" in done.output


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (NO_IMAGE, "whose code was removed, or"),
        ("CUDA_ERROR_ILLEGAL_INSTRUCTION", "kernel granularity"),
        ("RuntimeError: cuFFT error: CUFFT_INTERNAL_ERROR", "can't be loaded, too"),
        ("CUDA out of memory", "not an error that removed GPU code"),
    ],
)
def test_tells_errors_apart(slim: Made, error: str, words: str) -> None:
    assert words in explain(error, slimmed_in([slim.folder]))


def test_nothing_was_slimmed(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["explain", NO_IMAGE, "--in", str(tmp_path)])
    assert "nothing that was slimmed is the cause" in done.output


def test_in_a_program_only_what_it_has_loaded(slim: Made) -> None:
    library = slim.one
    for load, expected in ((f"ctypes.CDLL({str(library)!r})", True), ("None", False)):
        code = f"import ctypes, pytest_negativa; {load}; print(pytest_negativa.why({NO_IMAGE!r}))"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert (str(library) in done.stdout) is expected
