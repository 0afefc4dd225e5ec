"""Globs on libraries, kernels and tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_negativa.models.settings import (
    Libraries,
)
from pytest_negativa.settings.globs import (
    GlobSet,
    LibraryNames,
    first_glob,
    is_selected,
    matches,
    matches_library,
    unmatched_globs,
)
from pytest_negativa.settings.resolve import load_settings

TORCH = LibraryNames(
    path="/venv/lib/python3.11/site-packages/torch/lib/libtorch_cuda.so",
    soname="libtorch_cuda.so.2",
    distribution="torch",
)
CUBLAS = LibraryNames(
    path="/v/nvidia/cublas/lib/libcublas.so.12", distribution="nvidia_cuBLAS.cu12"
)


@pytest.mark.parametrize(
    ("glob", "library", "expected"),
    [
        ("libtorch_cuda.so", TORCH, True),
        ("libtorch_cuda.so.2", TORCH, True),
        ("libtorch_*", TORCH, True),
        ("torch_cuda", TORCH, False),
        ("LibTorch_cuda.so", TORCH, False),
        ("libtorch_cuda.s?", TORCH, True),
        ("libtorch_cuda.s?", CUBLAS, False),
        ("torch/lib/*", TORCH, True),
        ("*/torch/*", TORCH, True),
        ("orch/lib/*", TORCH, False),
        ("/venv/*.so", TORCH, True),
        ("/lib/*.so", TORCH, False),
        ("torch", TORCH, False),
        ("dist:torch", TORCH, True),
        ("dist: Torch", TORCH, True),
        ("dist:tor", TORCH, False),
        ("dist:t*", TORCH, True),
        ("dist:nvidia-cublas-cu12", CUBLAS, True),
        ("dist:nvidia_*", CUBLAS, True),
        ("dist:*", LibraryNames(path="/a/b.so"), False),
        ("b.so", LibraryNames(path="/a/b.so"), True),
    ],
)
def test_library_globs(glob: str, library: LibraryNames, expected: bool) -> None:
    assert matches_library(glob, library) is expected


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ((), (), True),
        (("dist:torch",), (), True),
        (("libother.so", "dist:torch"), (), True),
        (("libother.so",), (), False),
        ((), ("libtorch_*",), False),
        (("dist:torch",), ("libtorch_*",), False),
        (("dist:torch",), ("libother.so",), True),
    ],
)
def test_selection(include: tuple[str, ...], exclude: tuple[str, ...], expected: bool) -> None:
    assert is_selected(Libraries(include=include, exclude=exclude), TORCH) is expected


def test_the_first_glob_that_matches_a_library() -> None:
    assert first_glob((), TORCH) is None
    assert first_glob(("libcublas.so", "dist:torch", "libtorch*"), TORCH) == "dist:torch"


@given(
    globs=st.lists(st.text(alphabet="ab[]*?\n|", max_size=4), max_size=4),
    names=st.lists(st.text(alphabet="ab[]\n|", max_size=4), min_size=1, max_size=2),
)
def test_a_set_is_its_globs_one_by_one(globs: list[str], names: list[str]) -> None:
    hits = [glob for glob in globs if any(matches(glob, name) for name in names)]
    found = GlobSet(globs)
    assert found.match(*names) == (hits[0] if hits else None)
    assert found.matched == set(hits)


def test_brackets_of_signatures_and_parameters_are_no_classes() -> None:
    assert matches("void f(float (&)[3])*", "void f(float (&)[3]) [clone .1]")
    assert not matches("test_a[xy]", "test_ax")


def test_globs_without_a_match_are_named_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "negativa.yaml"
    path.write_text("keep:\n  kernels:\n    - gemm_*\n    - ours::scal_rows*\n    - zzz\n")
    found = load_settings({}, {}, root=tmp_path)
    globs = GlobSet(found.keep.kernels)
    for name in ("gemm_nt(float*)", "void ours::scale_rows<float>(float*, int)", "other"):
        globs.match(name)
    assert unmatched_globs(found, "keep.kernels", globs.matched) == (
        f"{path}:3:5: keep.kernels: 'ours::scal_rows*' matches no kernel of this run",
        f"{path}:3:5: keep.kernels: 'zzz' matches no kernel of this run",
    )
    assert unmatched_globs(found, "keep.kernels", found.keep.kernels) == ()


@pytest.mark.parametrize(
    ("glob", "nearest"),
    [
        ("libtorch_cud.so", "libtorch_cuda.so.2"),
        ("torch", "dist:torch"),
        ("dist:troch", "dist:torch"),
        ("*", None),
    ],
)
def test_the_nearest_library_is_suggested(tmp_path: Path, glob: str, nearest: str | None) -> None:
    flags = {"libraries.include": [glob]}
    found = load_settings(flags, {}, root=tmp_path)
    candidates = ["libtorch_cuda.so.2", "dist:torch", "dist:numpy"]
    (warning,) = unmatched_globs(found, "libraries.include", (), candidates)
    # A library without GPU code may have been loaded all the same.
    what = "library or file with GPU code of this run"
    start = f"--negativa-include-library: libraries.include: {glob!r} matches no {what}"
    assert warning.startswith(start)
    if nearest is None:
        assert warning == start
    else:
        assert warning == f"{start}; did you mean {nearest}?"
