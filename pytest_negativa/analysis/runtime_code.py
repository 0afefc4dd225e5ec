"""Code compiled at run time (NVRTC, Triton, the driver), or out of a compiler's cache.

A compiler that keeps its results in files writes one before it loads the code. So the age of the
file that holds a module says whether the run compiled it or found it there. What the driver makes
of PTX, and what lies in no known file, counts as compiled. The driver has a cache, too
(``CUDA_CACHE_PATH``), which can't be read.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pytest_negativa.arch import ComputeCapability, ElementKind
from pytest_negativa.models.file_kinds import ELF_MAGIC
from pytest_negativa.models.plan import LocatedLibrary, UseMark
from pytest_negativa.models.report import RuntimeCode
from pytest_negativa.models.trace import FirstUse, ImageForm, ImageUse, LibraryUsage, Usage
from pytest_negativa.storage.system import read_head, read_regular

_DRIVER = "CUDA driver"


class _CacheFile(NamedTuple):
    """A cubin in a cache; ``mtime_ns`` is that of the file."""

    compiler: str
    path: str
    mtime_ns: int


def find_runtime_code(
    usage: Usage, libraries: Iterable[LocatedLibrary], known: Collection[str]
) -> tuple[RuntimeCode, ...]:
    """The modules that a run had from a compiler or from a compiler's cache, in their order.

    Args:
        usage: of the run.
        libraries: those with GPU code.
        known: SHA-256 of images that lie in libraries, or in files of packages.
    """
    return tuple(sorted(_Finder(usage).find(libraries, known), key=lambda one: one.seconds))


def cache_folders(environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """Compilers, each with a folder in which it keeps cubins as files.

    Sources: ``default_cache_dir`` in PyTorch's torch/_inductor/runtime/cache_dir_utils.py,
    ``cache_knobs`` in Triton's python/triton/knobs.py, cupy/cuda/_compiler_cache.py.
    """
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 (Path's raises if there is no home)
    if (inductor := environ.get("TORCHINDUCTOR_CACHE_DIR")) is not None:
        yield "PyTorch", Path(inductor)
    else:
        # The rest of the name is the user's.
        for folder in Path(tempfile.gettempdir()).glob("torchinductor_*"):
            yield "PyTorch", folder
    triton = Path(environ.get("TRITON_HOME", home)) / ".triton" / "cache"
    yield "Triton", Path(environ.get("TRITON_CACHE_DIR") or triton)
    yield "CuPy", Path(environ.get("CUPY_CACHE_DIR", home / ".cupy" / "kernel_cache"))


class _Finder:
    def __init__(self, usage: Usage) -> None:
        self._usage = usage
        self._folders = tuple(cache_folders(os.environ))
        # By run: a combined one has several.
        self._starts: dict[str, int] = {}
        for header in (process.header for process in usage.processes):
            start = self._starts.get(header.run_id, header.start_ns)
            self._starts[header.run_id] = min(start, header.start_ns)

    def find(
        self, libraries: Iterable[LocatedLibrary], known: Collection[str]
    ) -> Iterator[RuntimeCode]:
        for library in libraries:
            if marks := self._compiled_regions(library):
                yield self._row(marks, _DRIVER, library.library_map.library.path)
        for used in self._usage.libraries:
            yield from self._in_file(used)
        for image in self._usage.compiled:
            # The inputs of the driver's linker have no kernels of their own.
            if image.kernels or not all(call.startswith("cuLink") for call in image.calls):
                yield self._row([image], _DRIVER)
        images = [image for image in self._usage.memory_images if image.sha256 not in known]
        sizes = {image.size for image in images}
        cached = _find_cached(self._folders, sizes) if images else {}
        for image in images:
            if (file := cached.get(image.sha256)) is None:
                yield self._row([image])
            else:
                is_new = file.mtime_ns > self._session_start(image.first)
                yield self._row([image], file.compiler, file.path, is_new=is_new)

    def _compiled_regions(self, library: LocatedLibrary) -> list[UseMark]:
        """The uses of regions in which a device found PTX alone. Without kernels it waits."""
        fitting = library.library_map.loaded_starts(
            ComputeCapability.parse(d.compute_capability) for d in self._usage.devices
        )
        starts = {
            region.span.start
            for region in library.library_map.iter_regions()
            for element in region.elements
            if element.kind is ElementKind.PTX and element.payload.start in fitting
        }
        return [m for start, m in library.uses.items() if start in starts and m.kernels]

    def _session_start(self, first: FirstUse) -> int:
        """When the session of a use began, ns since the epoch."""
        return self._starts[self._usage.processes[first.process].header.run_id]

    def _in_file(self, used: LibraryUsage) -> Iterator[RuntimeCode]:
        """Code that a program had compiled into a file, and loaded from there by name."""
        path = used.library.path
        text = [image for image in used.images if image.form is ImageForm.PTX]
        if text:
            yield self._row(text, _DRIVER, path)
        others = [image for image in used.images if image.form is not ImageForm.PTX]
        if not others:
            return
        within = (name for name, folder in self._folders if Path(path).is_relative_to(folder))
        compiler = next(within, None)
        is_new = (used.library.mtime_ns or 0) > self._session_start(others[0].first)
        if is_new or compiler:
            yield self._row(others, compiler, path, is_new=is_new)

    def _row(
        self,
        uses: Sequence[ImageUse | UseMark],
        compiler: str | None = None,
        path: str | None = None,
        *,
        is_new: bool = True,
    ) -> RuntimeCode:
        first = min((use.first for use in uses), key=lambda one: one.time_ns)
        return RuntimeCode(
            kernels=tuple(sorted({name for use in uses for name in use.kernels})),
            first=str(self._usage.context_of(first)),
            seconds=max(0, first.time_ns - self._session_start(first)) / 1e9,
            is_new=is_new,
            compiler=compiler,
            file=path,
        )


def _find_cached(
    folders: Iterable[tuple[str, Path]], sizes: Collection[int]
) -> dict[str, _CacheFile]:
    """Cubins of these sizes in the caches of compilers, by SHA-256.

    Triton's files are cubins. Before the cubin, CuPy's have its SHA-1 in hex (``_encode_cubin``),
    and may have names of kernels.
    """
    found: dict[str, _CacheFile] = {}
    for compiler, root in folders:
        for folder, _, names in os.walk(root):
            for path in (os.path.join(folder, n) for n in names if n.endswith(".cubin")):
                with contextlib.suppress(OSError):  # Processes clear caches.
                    head = read_head(path)
                    start = head.find(ELF_MAGIC)
                    status = os.stat(path)  # noqa: PTH116 (there are thousands)
                    if start < 0 or status.st_size - start not in sizes:
                        continue
                    sha256 = hashlib.sha256(read_regular(path)[start:]).hexdigest()
                    found.setdefault(sha256, _CacheFile(compiler, path, status.st_mtime_ns))
    return found
