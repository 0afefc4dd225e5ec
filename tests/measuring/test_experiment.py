"""negativa measure, with libraries compiled here and programs that load them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pytest_negativa.measuring.sampler import FIRST_RESULT
from pytest_negativa.processes.redirect import copy_path, why_unsupported
from pytest_negativa.storage.schema import schema_text
from tests.support.compiling import compile_c, compile_shared, needs_compiler
from tests.support.libraries import NEGATIVA

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(why_unsupported() is not None, reason=str(why_unsupported())),
]

LARGE, SMALL = 4_000_000, 100_000
LOAD = "import ctypes, sys; value = ctypes.CDLL(sys.argv[1]).value()"


@dataclass
class Stage:
    """An original, which says 1 and is large, and its copy, which says 2 and is small."""

    folder: Path
    original: Path
    root: Path

    def measure(
        self, *arguments: str, status: int = 0, environ: Mapping[str, str] = os.environ
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(NEGATIVA), "measure", *arguments],
            cwd=self.folder, env=environ, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == status, done.stdout + done.stderr
        return done

    def measure_code(self, code: str, *options: str, status: int = 0) -> Any:
        """Load the library in Python and run code that may ask for its ``value``."""
        words = (
            "--slim-dir",
            str(self.root),
            *options,
            "--",
            sys.executable,
            "-c",
            f"{LOAD}; {code}",
        )
        return self.measure(*words, str(self.original), status=status)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    folder = tmp_path.resolve()
    original = folder / "lib" / "libvalue.so"
    root = folder / "copies"
    compile_shared("value.c", original, "-DVALUE=1", f"-DSIZE={LARGE}")
    compile_shared("value.c", Path(copy_path(root, original)), "-DVALUE=2", f"-DSIZE={SMALL}")
    (root / ".manifest.json").write_text("{}")
    return Stage(folder, original, root)


@pytest.mark.slow
def test_what_is_measured(stage: Stage) -> None:
    code = "print(value, __import__('os').environ['CUDA_MODULE_LOADING'])"

    done = stage.measure_code(code, "--runs=2", "--loading=both", "--json")

    found = json.loads(done.stdout)
    jsonschema.validate(found, json.loads(schema_text("measurement")))
    assert found["libraries"] == [str(stage.original)]
    assert found["copies_root"] == str(stage.root)
    # In turns; of two neighbouring pairs each begins with another.
    assert [(r["loading"], r["pair"], r["variant"]) for r in found["runs"]] == [
        (loading, pair, variant)
        for loading in ("lazy", "eager")
        for pair, variant in [
            (0, "slim"), (0, "original"), (1, "original"), (1, "slim"), (2, "slim"),
            (2, "original"),
        ]
    ]  # fmt: skip
    assert [r["warm_up"] for r in found["runs"]] == [True, True, False, False, False, False] * 2
    assert {(r["variant"], r["copies"], r["status"]) for r in found["runs"]} == {
        ("original", 0, 0), ("slim", 1, 0),
    }  # fmt: skip
    assert found["original"]["apparent_bytes"] == stage.original.stat().st_size > LARGE
    assert SMALL < found["slim"]["apparent_bytes"] < LARGE
    (folder,) = (stage.folder / ".negativa" / "measure").iterdir()
    assert json.loads((folder / "measurement.json").read_bytes()) == found
    # Each run had the library and the way of loading that it was to have.
    said = {path.name: path.read_text() for path in folder.glob("*.log")}
    assert said["lazy-1-original.log"] == "1 LAZY\n"
    assert said["eager-2-slim.log"] == "2 EAGER\n"
    assert len(said) == 12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runs", "chance"),
    [
        (1, "1 pair equal variants would stay apart by chance always"),
        (2, "2 pairs equal variants would stay apart by chance in 1 of 3 figures"),
    ],
)
def test_how_far_to_trust_it(stage: Stage, runs: int, chance: str) -> None:
    assert chance in stage.measure_code("pass", f"--runs={runs}", "--loading=lazy").stdout


@pytest.mark.slow
def test_what_is_shown(stage: Stage) -> None:
    # Long enough for its memory to be looked at.
    code = "import time; time.sleep(.5); data = b'1' * 1_000_000"
    done = stage.measure_code(code, "--runs=1", "--loading=eager")
    shown = done.stdout
    assert "original against slim, 1 library, 1 pair of runs in turns after one" in shown
    assert "CUDA_MODULE_LOADING=EAGER, medians with " in shown
    assert "\nwall time " in shown and "\npeak RSS, all processes " in shown
    assert "\ntar, zstd level 3 " in shown
    folder = shown.rstrip().rpartition("Files in ")[2]
    assert (Path(folder) / "measurement.json").is_file()
    assert "negativa: eager-warm-up-slim: " in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not FIRST_RESULT.is_file(), reason="the library was not built")
def test_figures_of_a_gpu(stage: Stage) -> None:
    """On a driver and an NVML that stand in; a GPU's own figures take a GPU."""
    pytest.importorskip("pynvml")
    driver = compile_shared("libcuda.c", stage.folder / "driver" / "libcuda.so.1")
    compile_shared("libnvidia-ml.c", driver.with_name("libnvidia-ml.so.1"))
    program = compile_c("program.c", stage.folder / "program")
    code = (
        f"{LOAD}; import subprocess, time; "
        f"subprocess.run([{str(program)!r}, 'lookup', 'launch', 'wait'], check=True); "
        "time.sleep(.2)"
    )
    arguments = ("--runs=2", "--loading=lazy", "--", sys.executable, "-c", code)
    environ = {**os.environ, "LD_LIBRARY_PATH": str(driver.parent)}

    done = stage.measure(
        "--slim-dir", str(stage.root), *arguments, str(stage.original), environ=environ
    )

    (path,) = (stage.folder / ".negativa").rglob("measurement.json")
    found = json.loads(path.read_bytes())
    assert found["devices"] == ["first", "second"]
    for run in found["runs"]:
        assert 0 < run["first_result_s"] < run["wall_s"] - 0.2
        assert run["energy_mj"] > 0
        assert run["gpu_process_bytes"] is None
        assert run["gpu_device_bytes"] == 0
    for figure in ("first GPU result", "peak GPU memory, devices", "energy of the GPUs"):
        assert f"\n{figure} " in done.stdout
    assert "NVML shows no process of the command" in done.stdout


@pytest.mark.slow
def test_memory_of_the_library_shows(stage: Stage) -> None:
    # The padding lies in writable data: what is not there can't be made resident.
    code = (
        "import time; p = ctypes.CDLL(sys.argv[1]); s = 4_000_000 if value == 1 else 100_000; "
        "ctypes.memset(ctypes.addressof(ctypes.c_char.in_dll(p, 'padding')), 7, s); time.sleep(.3)"
    )
    found = json.loads(stage.measure_code(code, "--runs=3", "--loading=lazy", "--json").stdout)
    (result,) = found["results"]
    rss = {c["figure"]: c for c in result["comparisons"]}["peak_rss_bytes"]
    saved = rss["original"]["median"] - rss["slim"]["median"]
    assert LARGE - SMALL - 1_000_000 < saved < LARGE + 1_000_000


@pytest.mark.slow
def test_cold_runs_begin_without_the_page_cache(stage: Stage) -> None:
    found = json.loads(stage.measure_code("pass", "--runs=1", "--cold", "--json").stdout)
    assert found["cold"] is True
    assert all(run["cached_bytes"] for run in found["runs"])
    warm = json.loads(stage.measure_code("pass", "--runs=1", "--json").stdout)
    assert [run["cached_bytes"] is not None for run in warm["runs"]] == [True, True, False, False]


@pytest.mark.slow
def test_runs_that_end_differently_are_an_error(stage: Stage) -> None:
    code = "print('line'); sys.exit(0 if value == 1 else 5)"
    done = stage.measure_code(code, "--loading=lazy", status=1)
    assert done.stdout == ""
    assert (
        "negativa: error: lazy loading: exit status 5 in lazy-warm-up-slim, 0 in "
        "lazy-warm-up-original: runs that end differently can't be compared; output of the latter "
        "in "
    ) in done.stderr
    assert done.stderr.endswith("  line\n")
    assert not list((stage.folder / ".negativa").rglob("measurement.json"))


@pytest.mark.slow
def test_one_way_of_loading_fails(stage: Stage) -> None:
    eager = "__import__('os').environ['CUDA_MODULE_LOADING'] == 'EAGER'"
    code = f"sys.exit(5 if value == 2 and {eager} else 0)"

    done = stage.measure_code(code, "--runs=1", "--loading=both", status=1)

    assert "CUDA_MODULE_LOADING=LAZY, medians with " in done.stdout
    assert "CUDA_MODULE_LOADING=EAGER: no comparison\n" in done.stdout
    assert "negativa: error: eager loading: exit status 5 in eager-warm-up-slim" in done.stderr
    (path,) = (stage.folder / ".negativa").rglob("measurement.json")
    lazy, eager_result = json.loads(path.read_bytes())["results"]
    assert (lazy["status"], lazy["failure"]) == (0, None)
    assert eager_result["status"] is None and not eager_result["comparisons"]


@pytest.mark.slow
def test_a_command_that_fails_alike_is_measured_and_said(stage: Stage) -> None:
    shown = stage.measure_code("sys.exit(3)", "--runs=1").stdout
    assert "runs ended with exit status 3; output in " in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("true",), "no process of the command loaded any of the 1 copies in "),
        (("no-such-program",), "no-such-program: not found, or not an executable file"),
    ],
)
def test_commands_that_measure_nothing(stage: Stage, words: tuple[str, ...], problem: str) -> None:
    done = stage.measure("--slim-dir", str(stage.root), "--", *words, status=1)
    assert f"negativa: error: {'' if 'no-such' in problem else 'lazy-warm-up-slim: '}{problem}" in (
        done.stderr
    )


@pytest.mark.slow
def test_an_original_that_is_loaded_all_the_same(stage: Stage) -> None:
    # Another namespace: the loader asks nobody which file to take.
    code = "ctypes.CDLL(None).dlmopen(ctypes.c_long(-1), sys.argv[1].encode(), 2)"
    done = stage.measure_code(code, "--runs=1", status=1)
    assert f"loaded the original {stage.original} (as " in done.stderr
    assert done.stderr.endswith("though there is a copy: the run measures nothing\n")


@pytest.mark.slow
def test_a_command_that_breaks_before_it_loads_anything(stage: Stage) -> None:
    done = stage.measure_code("syntax error", status=1)
    assert "the run measures nothing; exit status 1, output in " in done.stderr
    assert done.stderr.endswith("  SyntaxError: invalid syntax\n")


@pytest.mark.slow
def test_folders_without_copies(stage: Stage, tmp_path: Path) -> None:
    done = stage.measure("--", "true", status=2)
    assert "reconstructed: no slim libraries here; make some with pytest --negativa" in done.stderr
    empty = tmp_path / "empty"
    empty.mkdir()
    done = stage.measure("--slim-dir", str(empty), "--", "true", status=2)
    assert "empty: no copies of libraries here; make some with negativa reconstruct" in done.stderr
    stage.original.unlink()
    done = stage.measure("--slim-dir", str(stage.root), "--", "true", status=2)
    assert f"the copy of {stage.original}, which does not exist" in done.stderr
