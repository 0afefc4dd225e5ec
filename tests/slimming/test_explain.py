"""What a user is told about an error on slimmed libraries."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from pytest_negativa.cli.main import main
from pytest_negativa.models.slimming import SlimManifest
from pytest_negativa.slimming.explain import explain_error, slimmed_in
from pytest_negativa.slimming.tree import MANIFEST_NAME, ORIGINALS_MARK
from tests.support.made_site import Made

NO_IMAGE = "CUDA error: no kernel image is available for execution on the device"
BOTH = "2 libraries have lost GPU code here:"


@pytest.fixture
def slim(site: Made) -> Made:
    """An installation whose libraries lost their code for all archs but one."""
    done = CliRunner().invoke(main, ["slim", "--no-way-back", "--arch", "sm_90", str(site.folder)])
    assert done.exit_code == 0, done.output
    assert slimmed_in([site.folder]), done.output
    return site


def test_names_library_and_who_said_what_stays(slim: Made) -> None:
    done = CliRunner().invoke(main, ["explain", NO_IMAGE, str(slim.folder)])
    assert done.exit_code == 0
    assert "A kernel gives this error if its code was removed" in done.output
    assert str(slim.one) in done.output
    assert "what devices of 9.0 can load" in done.output
    assert "To keep more after --arch: " in done.output


def test_what_a_lock_needs(site: Made) -> None:
    done = CliRunner().invoke(
        main, ["slim", "--no-way-back", "--lock", str(site.lock_file), str(site.folder)]
    )
    assert done.exit_code == 0, done.output
    output = ask(site.folder)
    assert "negativa combine" in output


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (NO_IMAGE, "if its code was removed, or"),
        ("CUDA_ERROR_ILLEGAL_INSTRUCTION", "kernel granularity"),
        ("RuntimeError: cuFFT error: CUFFT_INTERNAL_ERROR", "one of its kernels can't be loaded"),
        ("CUDA out of memory", "not known to cause this error"),
    ],
)
def test_tells_errors_apart(slim: Made, error: str, words: str) -> None:
    assert words in explain_error(error, slimmed_in([slim.folder]))


def ask(*words: str | Path) -> str:
    done = CliRunner().invoke(main, ["explain", NO_IMAGE, *map(str, words)])
    assert done.exit_code == 0, done.output
    return done.output


def ask_in_program(library: Path) -> str:
    """What a process says that has loaded the library."""
    code = (
        f"import ctypes, pytest_negativa; ctypes.CDLL({str(library)!r}); "
        f"print(pytest_negativa.why({NO_IMAGE!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def test_an_error_that_it_does_not_know_gets_a_short_answer(slim: Made) -> None:
    text = explain_error("CUDA out of memory", slimmed_in([slim.folder]))
    assert text == (
        "Removed GPU code is not known to cause this error (2 slimmed libraries here; ask without "
        "an error to list them)."
    )
    assert explain_error("KeyError: 'x'", ()) == (
        "No library that this process has loaded was slimmed, so slimming is not the cause."
    )
    assert str(slim.one) not in text and "combine" not in text


def test_nothing_was_slimmed(tmp_path: Path) -> None:
    output = ask(tmp_path)
    assert f"Nothing was slimmed in {tmp_path}." in output
    assert "another environment" in output and "ERROR PATH" in output


def test_only_stripped(site: Made) -> None:
    words = ["slim", "--no-way-back", "--arch", "sm_90", "--strip-others", str(site.host)]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    output = ask(site.host.parent)
    assert "1 library was slimmed here, and none has lost GPU code" in output


def test_the_slimmed_folder_lies_below(slim: Made) -> None:
    output = ask(slim.folder.parent)
    assert BOTH in output and str(slim.one) in output


def test_the_slimmed_folder_lies_above(slim: Made) -> None:
    output = ask(slim.one.parent)
    assert BOTH in output and str(slim.one) in output
    assert "Nothing was slimmed" in ask(slim.host.parent)


def test_packages_of_the_interpreter_by_default(
    slim: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = (slim.folder / "gpu",)
    monkeypatch.setattr("pytest_negativa.cli.explain.active_paths", lambda: here)
    output = ask()
    assert BOTH in output and str(slim.one) in output


def test_each_library_once(slim: Made) -> None:
    for folders in ((slim.folder, slim.folder), (slim.folder.parent, slim.one.parent)):
        found = [library.path for library in slimmed_in(folders)]
        assert sorted(found) == [str(slim.one), str(slim.two)]


def test_copies_of_a_slimmed_folder_count_apart(slim: Made, tmp_path: Path) -> None:
    shutil.copytree(slim.folder, tmp_path / "copy", symlinks=True)
    found = [library.path for library in slimmed_in((slim.folder, tmp_path / "copy"))]
    assert len(found) == 4


def test_hard_links_are_one_library(site: Made) -> None:
    other = site.one.with_name("libother.so")
    other.hardlink_to(site.one)
    done = CliRunner().invoke(main, ["slim", "--no-way-back", "--arch", "sm_90", str(site.folder)])
    assert done.exit_code == 0, done.output
    found = slimmed_in([site.folder])
    assert len(found) == 2 and all(library.entry for library in found)


def test_manifest_is_gone(slim: Made) -> None:
    (slim.folder / MANIFEST_NAME).unlink()
    for output in (ask(slim.folder), ask_in_program(slim.one)):
        assert str(slim.one) in output
        assert "so what it lost is not known" in output
    assert str(slim.host) not in output


def test_what_is_gone_does_not_count(slim: Made) -> None:
    slim.one.unlink()
    assert [library.path for library in slimmed_in([slim.folder])] == [str(slim.two)]


def test_kept_originals_are_no_slimmed_libraries(slim: Made) -> None:
    (slim.one.parent / ORIGINALS_MARK).touch()
    (slim.folder / MANIFEST_NAME).unlink()
    assert slimmed_in([slim.folder]) == ()


def test_a_nearer_manifest_that_does_not_list_it(slim: Made) -> None:
    manifest = SlimManifest(slimmed={})
    (slim.one.parent / MANIFEST_NAME).write_bytes(msgspec.json.encode(manifest))
    assert "lost GPU code here" in ask_in_program(slim.one)


def test_a_program_that_has_loaded_nothing_slimmed(slim: Made) -> None:
    assert "No library that this process has loaded was slimmed" in ask_in_program(slim.host)


def test_in_a_program_only_what_it_has_loaded(slim: Made) -> None:
    library = slim.one
    for load, expected in ((f"ctypes.CDLL({str(library)!r})", True), ("None", False)):
        code = f"import ctypes, pytest_negativa; {load}; print(pytest_negativa.why({NO_IMAGE!r}))"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert (str(library) in done.stdout) is expected
