"""``negativa explain``: whether code that slimming removed can be the cause of a CUDA error.

The errors were observed on an H200. If an element is gone, the look-up of its kernel fails with "no
kernel image is available" (209) or "invalid device function" (98). So does the look-up of a kernel
that was removed from a cubin that stays. Overwritten code that runs all the same gives an illegal
instruction or a similar error. Libraries report these errors in words of their own.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pytest_negativa.errors import NegativaError
from pytest_negativa.gpucode.slimmed import is_slimmed
from pytest_negativa.gpucode.source import read_fact
from pytest_negativa.installed.sites import SITE_NAMES
from pytest_negativa.models.file_kinds import CODE_SUFFIXES
from pytest_negativa.models.sizes import format_bytes
from pytest_negativa.models.slimming import SlimManifest, SlimmedFile
from pytest_negativa.reporting.text import printable
from pytest_negativa.reporting.units import and_more, format_items
from pytest_negativa.rewriting.compact.rebuild import read_note
from pytest_negativa.slimming.manifest import load_manifest
from pytest_negativa.slimming.spares import problem_of
from pytest_negativa.slimming.tree import MANIFEST_NAME, scan_folder
from pytest_negativa.tracing.mappings import parse_maps

_WORDS = re.compile(r"""[^\s/'":,;()]+""")
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


_VERDICTS = (
    (
        _MISSING,
        "A kernel gives this error if its code was removed, or if the code that stayed is for "
        "another GPU.",
    ),
    (
        _OVERWRITTEN,
        "A kernel can give this error if its code was removed from within a cubin (kernel "
        "granularity); other causes are as likely.",
    ),
    (_LIBRARY, "A library can give this error if one of its kernels can't be loaded."),
)


class Loss(NamedTuple):
    """A slimmed library and its loss; without an entry if no manifest that can be read lists it."""

    path: str
    entry: SlimmedFile | None

    @property
    def removed(self) -> int:
        """Bytes of GPU code that are known to be gone."""
        return 0 if self.entry is None else self.entry.gpu_code_removed

    @property
    def has_spare(self) -> bool:
        """Whether removed code comes back."""
        if self.entry is not None:
            return self.entry.spare is not None
        return read_fact(self.path, read_note) is not None


def slimmed_in(folders: Iterable[Path]) -> tuple[Loss, ...]:
    """Find the slimmed libraries of folders; those that lost most come first.

    A folder may lie above or below the one that was slimmed, so manifests in each folder, above it
    and below it count. Without a manifest, the files tell.

    Raises:
        NegativaError: a folder or manifest can't be read.
    """
    walked = [_walk(folder) for folder in {f.resolve() for f in folders}]
    manifests = [(root, load_manifest(root)) for roots, _ in walked for root in roots]
    return _slimmed(manifests, {path for _, here in walked for path in here})


def loaded_slimmed() -> tuple[Loss, ...]:
    """Find the slimmed libraries that this process has loaded."""
    loaded = {one.file.path for one in parse_maps(_MAPPINGS.read_bytes())}
    manifests = []
    for root in _with_manifest({folder for path in loaded for folder in Path(path).parents}):
        # "negativa slim check" reports a damaged manifest.
        with contextlib.suppress(NegativaError):
            manifests.append((root, load_manifest(root)))
    return _slimmed(manifests, loaded)


def _slimmed(
    manifests: Iterable[tuple[Path, SlimManifest]], paths: Collection[str]
) -> tuple[Loss, ...]:
    """The slimmed ones of these files. A library counts once, even if it has several names."""
    entries = [(root, one) for root, known in manifests for one in known.slimmed.values()]
    # Of two manifests, the greater loss counts.
    entries.sort(key=lambda found: found[1].gpu_code_removed)
    listed = {os.path.join(root, name): one for root, one in entries for name in one.names}
    losses = {path: Loss(path, one) for path, one in listed.items()}
    found = {
        id(listed[path]) if path in listed else path: losses.get(path, Loss(path, None))
        for path in sorted(paths, reverse=True)
        # Not every file: opening a device may have an effect.
        if path in listed or (".so" in os.path.basename(path) and is_slimmed(path))  # noqa: PTH119
    }
    return tuple(sorted(found.values(), key=lambda one: (-one.removed, one.path)))


def _walk(folder: Path) -> tuple[list[Path], list[str]]:
    """The folders here, above and below that have a manifest, and all files."""
    groups = scan_folder(folder).groups
    files = [os.path.join(folder, name) for group in groups for name in group.names]
    below = map(Path, sorted(set(map(os.path.dirname, files))))
    return _with_manifest((folder, *folder.parents, *below)), files


def _with_manifest(folders: Iterable[Path]) -> list[Path]:
    # os.path: a parent folder that may not be entered is no error.
    return [f for f in dict.fromkeys(folders) if os.path.isfile(f / MANIFEST_NAME)]  # noqa: PTH113


def explain_error(error: str, slimmed: Sequence[Loss], folders: Sequence[Path] = ()) -> str:
    """Explain what an error may have to do with slimmed libraries, and what to do.

    Args:
        error: its text; if empty, the text lists the libraries alone.
        slimmed: the slimmed libraries.
        folders: where they were searched; if empty, in what this process has loaded.
    """
    return "\n".join(_removed_file(error, folders) or _lines(error, slimmed, folders))


def _lines(error: str, slimmed: Sequence[Loss], folders: Sequence[Path]) -> Iterator[str]:
    verdict = next((verdict for pattern, verdict in _VERDICTS if pattern.search(error)), None)
    if not slimmed:
        yield from _nothing_slimmed(folders, unrelated=bool(error) and verdict is None)
        return
    with_spare = [library for library in slimmed if library.has_spare]
    yield from _spares(with_spare)
    slimmed = [library for library in slimmed if library not in with_spare]
    if not slimmed:
        return
    # Without an entry, nothing tells what it lost.
    lacking = [library for library in slimmed if library.entry is None or library.removed]
    if not lacking:
        yield (
            f"{format_items(len(slimmed), 'library was', 'libraries were')} slimmed here, and none "
            "has lost GPU code: slimming is not the cause."
        )
    elif error and verdict is None:
        here = format_items(len(lacking), "slimmed library", "slimmed libraries")
        yield (
            f"Removed GPU code is not known to cause this error ({here} here; ask without an error "
            "to list them)."
        )
    else:
        if error:
            yield str(verdict)
        # If a library without any code is loaded, none of its kernels can be.
        yield from _libraries(
            sorted(lacking, key=lambda one: not (one.entry and one.entry.never_loaded))
        )
        yield from _remedies(lacking, folders)


def _removed_file(error: str, folders: Sequence[Path]) -> tuple[str, ...] | None:
    """Lines about a removed file of GPU code that an error names; None if it names none."""
    if not any(suffix in error for suffix in CODE_SUFFIXES):
        return None
    # Those of this process's packages.
    sites = (f for f in map(Path, sys.path) if f.name in SITE_NAMES and f.is_dir())
    asked = dict.fromkeys(f.resolve() for f in folders or sites)
    roots = dict.fromkeys(root for folder in asked for root in _walk(folder)[0])
    # An error may be a log, and thousands of files may be gone: each is read once.
    words = set(_WORDS.findall(error))
    for root in roots:
        for name, entry in load_manifest(root).slimmed.items():
            is_named = entry.is_removed and name.rpartition("/")[2] in words
            if is_named and not os.path.lexists(root / name):
                back = f"{_undo(root)}, or " if entry.original is not None else ""
                return (
                    f"{root / name} was removed by negativa slim (by {entry.source}).",
                    f"To get it back: {back}install its distribution again.",
                    "To keep it: a test that opens it, or keep.libraries, and prove and lock "
                    "again; with --arch, name the arch of this GPU, too.",
                )
    return None


def _undo(*folders: Path) -> str:
    return shlex.join(["negativa", "slim", "undo", *map(str, folders)])


def _remedies(lacking: Sequence[Loss], folders: Sequence[Path]) -> Iterator[str]:
    yield (
        f"To make sure, run the program on the originals: use {_undo(*folders)} if they were "
        "kept, or an installation that isn't slimmed."
    )
    yield (
        "To keep more after --arch: put the originals back and slim them for the GPU of the "
        "program, too (nvidia-smi --query-gpu=compute_cap --format=csv tells which). --keep-ptx "
        "keeps code for later GPUs."
    )
    yield (
        "To keep more after --lock: trace the failing program there (pytest --negativa with a test "
        "of it, or negativa debloat -- COMMAND), combine that with the run of the lock (negativa "
        "combine RUN RUN), verify, run negativa lock, and slim the originals again. Or set "
        "keep.kernels, keep.libraries or keep.archs in negativa.yaml."
    )


def _spares(libraries: Sequence[Loss]) -> Iterator[str]:
    problems = {one.path: problem_of(Path(one.path)) for one in libraries}
    wrong = [f"{path}: {problem[1]}" for path, problem in problems.items() if problem is not None]
    if count := len(problems) - len(wrong):
        yield (
            f"{format_items(count, 'library has a spare', 'libraries have spares')} here: "
            "removed code comes back when it is used, so slimming these is not the cause."
        )
    if wrong:
        yield (
            f"{format_items(len(wrong), 'library', 'libraries')} can't get removed code back from "
            "spares here. No process can load a library without its spare."
        )
        yield from (f"  {printable(line)}" for line in wrong)


def _nothing_slimmed(folders: Sequence[Path], *, unrelated: bool) -> Iterator[str]:
    if folders:
        yield f"Nothing was slimmed in {', '.join(printable(str(f.absolute())) for f in folders)}."
        yield (
            "If the program runs in another environment, name it: negativa explain ERROR PATH. "
            "If not, slimming is not the cause."
        )
    else:
        elsewhere = "" if unrelated else " If the error came from another process, ask there."
        yield (
            "No library that this process has loaded was slimmed, so slimming is not the cause."
            f"{elsewhere}"
        )


def _libraries(named: Sequence[Loss]) -> Iterator[str]:
    is_sure = all(library.entry is not None for library in named)
    has, have = ("has", "have") if is_sure else ("may have", "may have")
    yield f"{format_items(len(named), f'library {has}', f'libraries {have}')} lost GPU code here:"
    for one in named[:_MAX_ROWS]:
        loss = format_bytes(one.removed)
        if one.entry is None:
            loss = "its manifest is gone or can't be read, so what it lost is not known"
        elif one.entry.never_loaded:
            loss += ", all of it: the proved run never loaded the library"
        yield f"  {printable(one.path)}: {loss}"
    yield from and_more(len(named), _MAX_ROWS, "  and {} more")
    for source in dict.fromkeys(s.entry.source for s in named if s.entry is not None):
        yield f"The code that stayed follows {printable(source)}."
