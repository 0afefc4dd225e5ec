"""The suite that is traced and proved. FAULT goes wrong on copies alone."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from oracle_gpu import launch, load, on_copy, use, whole  # type: ignore[import-not-found]

LIB = Path(__file__).parent / "libapp.so"
WORDS = os.environ.get("FAULT", "")
FAULT = WORDS if WORDS and on_copy(LIB) else ""
HIDDEN = os.environ.get("HIDDEN")
CHILD = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"

if FAULT == "import":
    raise RuntimeError("a module that can't be imported")


@pytest.fixture(scope="module")
def model() -> None:
    use(LIB, 2, "statistics_weighted_sum")
    launch("statistics_weighted_sum")


@pytest.mark.fast
@pytest.mark.parametrize("n", [1, 2])
def test_add(n: int) -> None:
    use(LIB, 0, "vector_add")
    launch("vector_add", "vector_add")


@pytest.mark.whole
class TestMatrices:
    def test_multiply(self, model: None) -> None:
        names = "vector_add", "_ZN8matrices8multiplyILi16EEEvPKfS2_Pfiii"
        use(LIB, 1, names[1])
        launch(*names, within=("forward", "matmul"))

    def test_chain(self) -> None:
        if FAULT == "fallback":
            return
        use(LIB, 4, "calls_chain")
        use(LIB, 5, "calls_chain")
        launch("calls_chain")


def test_fault() -> None:
    if HIDDEN and not whole(LIB, int(HIDDEN)):
        # What a driver needs and no trace shows.
        raise RuntimeError(f"no kernel image is available in region {HIDDEN}")
    if FAULT == "swallowed":
        with contextlib.suppress(RuntimeError):
            use(LIB, 3, "image_blur")
    if FAULT == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if FAULT == "exit":
        os._exit(0)
    if FAULT == "skip":
        pytest.skip("not now")
    if FAULT == "copied":
        # By content, it is the original, and no copy.
        load(Path(shutil.copy(os.environ["ORIGINAL"], LIB.with_name("other.so"))))
    if FAULT == "child":
        environ = {"PATH": os.environ["PATH"]}
        subprocess.run([sys.executable, "-c", CHILD, LIB], env=environ, check=True)
    assert FAULT != "fail"


if FAULT == "new":

    def test_new() -> None:
        pass


@pytest.mark.xfail(strict=False)
def test_xfail() -> None:
    assert FAULT == "xpass"


@pytest.mark.skip(reason="always")
def test_skip() -> None:
    pass
