"""Sessions whose tests compile GPU code at run time, or find it in a compiler's cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.libraries import BIN
from tests.support.verified import VerifiedProject

pytestmark = pytest.mark.slow

SUITE = """
from standin_gpu import load_code
import hashlib
CODE = Path(os.environ["CODE"])

def test_library():
    use(LIB)

def test_triton():
    load_code((CODE / "kernels.sm_90.cubin").read_bytes(), b"triton_kernel")

def test_cupy():
    cubin = (CODE / "kernels.sm_90a.cubin").read_bytes()
    cache = Path(os.environ["CUPY_CACHE_DIR"])
    cache.mkdir()
    (cache / "0f.cubin").write_bytes(hashlib.sha1(cubin).hexdigest().encode() + cubin)
    load_code(cubin, b"cupy_kernel")

def test_nvrtc():
    load_code((CODE / "kernels.sm_80.cubin").read_bytes(), b"nvrtc_kernel")

def test_ptx():
    load_code((CODE / "kernels.ptx").read_bytes(), b"ptx_kernel")
"""


def test_from_the_session_to_the_manifest(tmp_path: Path) -> None:
    project = VerifiedProject(tmp_path / "project", SUITE)
    cached = tmp_path / "triton" / "HASH" / "triton_kernel.cubin"
    cached.parent.mkdir(parents=True)
    cached.write_bytes((BIN / "kernels.sm_90.cubin").read_bytes())
    cupy = tmp_path / "cupy"
    project.environ |= {
        "CODE": str(BIN),
        "TRITON_CACHE_DIR": str(cached.parents[1]),
        "CUPY_CACHE_DIR": str(cupy),
    }
    # What lay in the cache before is no fault, nor is a library.
    project.pytest("-q", "--negativa", "--negativa-no-jit", "-k", "library or triton")
    done = project.pytest("-q", "--negativa", "--negativa-no-jit", status=1)
    first = "the tests compiled 3 kernels, the first in test_a.py::test_cupy (call)"
    assert first in done.stdout and "From caches of compilers: 1 kernel (trit" in done.stdout

    rows = json.loads(project.negativa("report", "json:-").stdout)["runtime"]
    told = [(r["kernels"], r["first"], r["is_new"], r["compiler"], r["file"]) for r in rows]
    test = "test_a.py::test_{} (call)".format
    assert told == [
        (["triton_kernel"], test("triton"), False, "Triton", str(cached)),
        (["cupy_kernel"], test("cupy"), True, "CuPy", str(cupy / "0f.cubin")),
        (["nvrtc_kernel"], test("nvrtc"), True, None, None),
        (["ptx_kernel"], test("ptx"), True, "CUDA driver", None),
    ]
    assert [r["seconds"] for r in rows] == sorted(r["seconds"] for r in rows)
    assert "no_jit: the tests" in project.negativa("report", "--no-jit", status=1).stderr
