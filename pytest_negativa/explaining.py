"""A CUDA error in a program that runs on slimmed libraries: can removed code be the cause?

What a removed kernel looks like was seen on an H200: an element that is gone gives "no kernel image
is available" (209) or "invalid device function" (98) where the kernel is looked up, and a kernel
that was taken out of a cubin that stays is not found either; code that is overwritten there and
reached all the same gives an illegal instruction or something like it. Libraries report both in
words of their own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_negativa.errors import NegativaError
from pytest_negativa.models.slimming import SlimmedFile
from pytest_negativa.reporting.text import printable
from pytest_negativa.reporting.units import format_bytes, format_items
from pytest_negativa.slimming.manifests import load_manifest
from pytest_negativa.slimming.tree import MANIFEST_NAME

_MAPPINGS = Path("/proc/self/maps")
_MAX_ROWS = 20

# CUDA Runtime API, cudaError, and CUDA Driver API, CUresult: the words of their messages and names.
_MISSING = re.compile(
    r"no kernel image|NoKernelImageForDevice|NO_BINARY_FOR_GPU|invalid device function"
    r"|InvalidDeviceFunction|kernel image is invalid|InvalidKernelImage|INVALID_IMAGE"
    r"|symbol not found|SymbolNotFound|CUDA_ERROR_NOT_FOUND|invalid resource handle"
    r"|\berror:? (?:98|200|209|500)\b",
    re.IGNORECASE,
)
_OVERWRITTEN = re.compile(
    r"illegal instruction|ILLEGAL_INSTRUCTION|invalid program counter|INVALID_PC"
    r"|illegal memory access|ILLEGAL_ADDRESS|unspecified launch failure|LAUNCH_FAILED"
    r"|misaligned address|hardware stack error|\berror:? (?:700|714|715|716|718|719)\b",
    re.IGNORECASE,
)
_LIBRARY = re.compile(
    r"CU(?:BLAS|SOLVER|SPARSE|RAND|FFT|DNN)(?:LT)?_(?:STATUS_)?(?:ARCH_MISMATCH|EXECUTION_FAILED\w*"
    r"|INTERNAL_ERROR\w*|NOT_SUPPORTED\w*|LAUNCH_FAILURE|EXEC_FAILED)"
    r"|CUDNN_STATUS_\w+|CUFFT_\w+",
)


@dataclass(frozen=True, slots=True)
class Slimmed:
    """A slimmed library that has lost GPU code."""

    path: str
    entry: SlimmedFile


def slimmed_in(folders: Iterable[Path]) -> tuple[Slimmed, ...]:
    """The slimmed libraries of folders, those that lost most first.

    Raises:
        NegativaError: a manifest can't be read.
    """
    found = [
        Slimmed(os.path.join(folder, name), entry)
        for folder in folders
        for name, entry in load_manifest(folder).slimmed.items()
        if entry.gpu_code_removed
    ]
    return tuple(sorted(found, key=lambda s: -s.entry.gpu_code_removed))


def loaded_slimmed() -> tuple[Slimmed, ...]:
    """The slimmed libraries that this process has loaded."""
    loaded = {
        line.split(maxsplit=5)[5]
        for line in _MAPPINGS.read_text(errors="surrogateescape").splitlines()
        if line.count("/")
    }
    folders = {f for path in loaded if (f := _manifest_folder(Path(path))) is not None}
    found: list[Slimmed] = []
    for folder in folders:
        # A damaged manifest is for "negativa slim --check" to report.
        try:
            slimmed = slimmed_in([folder])
        except NegativaError:
            continue
        found += [s for s in slimmed if any(str(folder / n) in loaded for n in s.entry.names)]
    return tuple(sorted(found, key=lambda s: -s.entry.gpu_code_removed))


def _manifest_folder(path: Path) -> Path | None:
    return next((f for f in path.parents if (f / MANIFEST_NAME).is_file()), None)


def explain(error: str, slimmed: Sequence[Slimmed]) -> str:
    """What the error may have to do with the libraries, and how to find out and mend it."""
    if not slimmed:
        return "No library here has lost GPU code: nothing that was slimmed is the cause."
    return "\n".join(_lines(error, slimmed))


def _lines(error: str, slimmed: Sequence[Slimmed]) -> Iterator[str]:
    if error:
        yield _verdict_on(error)
    named = _likely_first(error, slimmed)
    yield f"{format_items(len(named), 'library has', 'libraries have')} lost GPU code here:"
    for library in named[:_MAX_ROWS]:
        removed = format_bytes(library.entry.gpu_code_removed)
        all_of_it = ", all of it: the proved run never loaded the library"
        rest = all_of_it if library.entry.never_loaded else ""
        yield f"  {printable(library.path)}: {removed}{rest}"
    if len(named) > _MAX_ROWS:
        yield f"  and {len(named) - _MAX_ROWS} more"
    for source in dict.fromkeys(s.entry.source for s in named):
        yield f"What stayed was said by {printable(source)}."
    yield (
        "To make sure, run the same on the originals (negativa slim --undo, where they were "
        "kept, or an installation that isn't slimmed)."
    )
    yield (
        "To widen what stays: trace what failed there (pytest --negativa with a test of it, or "
        "negativa debloat -- COMMAND), unite it with the run of the lock (negativa combine RUN "
        "RUN), verify, negativa lock, and slim the originals again. Or name it in negativa.yaml: "
        "keep.kernels, keep.libraries, keep.archs."
    )


def _verdict_on(error: str) -> str:
    if _MISSING.search(error):
        return (
            "This error is what a kernel gives whose code was removed, or code for another GPU "
            "than the ones that were kept."
        )
    if _OVERWRITTEN.search(error):
        return (
            "This error can come from a kernel whose code was removed inside of a library's "
            "cubin (kernel granularity); as often it has other causes."
        )
    if _LIBRARY.search(error):
        return "A library gives such an error when one of its kernels can't be loaded, too."
    return "This is not an error that removed GPU code is known to give."


def _likely_first(error: str, slimmed: Sequence[Slimmed]) -> list[Slimmed]:
    """Libraries that the error's words name (CUBLAS_STATUS_..., libcufft) come first.

    Then those without any code: if one is loaded, none of its kernels can be.
    """
    words = error.lower().replace("_", "")

    def is_named(library: Slimmed) -> bool:
        stem = re.split(r"[.\-_]", Path(library.path).name.removeprefix("lib"))[0].lower()
        return len(stem) > 3 and stem in words

    return sorted(slimmed, key=lambda one: (not is_named(one), not one.entry.never_loaded))
