"""Builds ``Usage`` records for tests of what follows the trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytest_negativa.models.library import LibraryMap
from pytest_negativa.models.trace import (
    USAGE_VERSION,
    Context,
    Device,
    FirstUse,
    ImageForm,
    ImageUse,
    LibraryImage,
    LibraryUsage,
    MemoryImage,
    Phase,
    TracedLibrary,
    Usage,
    UsageWarning,
    UsedKernel,
)

TEST = Context(phase=Phase.CALL, nodeid="tests/test_a.py::test_b")
_FIRST = FirstUse(process=0, context=0, time_ns=0)


def device(capability: str = "9.0") -> Device:
    return Device(
        name="a GPU", compute_capability=capability, uuid=f"GPU-{capability}", cuda_version=13000
    )


def image_use(kernels: Sequence[str] = (), *, enumerated: bool = False) -> ImageUse:
    return ImageUse(
        form=ImageForm.FATBIN,
        calls=("cuLibraryLoadData",),
        kernels=tuple(UsedKernel(name=k, first=_FIRST) for k in kernels),
        data=(),
        enumerated_by=("cuLibraryEnumerateKernels",) if enumerated else (),
        first=_FIRST,
        processes=(0,),
    )


def library_usage(
    library_map: LibraryMap,
    images: Mapping[int, Sequence[str]],
    *,
    prelinked: Mapping[int, Sequence[int]] | None = None,
) -> LibraryUsage:
    """Use of a library: kernels by the file offset of the image that they were looked up in."""
    library = library_map.library
    return LibraryUsage(
        library=TracedLibrary(
            path=library.path,
            size=library.size,
            mtime_ns=library.mtime_ns,
            build_id=library.build_id,
        ),
        images=tuple(
            LibraryImage(
                offset=offset,
                use=image_use(kernels),
                prelinked=tuple((prelinked or {}).get(offset, ())),
            )
            for offset, kernels in images.items()
        ),
        processes=(0,),
    )


def usage_of(
    *libraries: LibraryUsage,
    devices: Sequence[str] = ("9.0",),
    memory: Mapping[str, tuple[int, Sequence[str]]] | None = None,
    incomplete: Sequence[UsageWarning] = (),
) -> Usage:
    """A usage of ``libraries``; ``memory``: size and kernels by the digest of an image."""
    return Usage(
        format_version=USAGE_VERSION,
        run_ids=("run",),
        devices=tuple(map(device, devices)),
        libraries=libraries,
        memory_images=tuple(
            MemoryImage(sha256=sha256, size=size, use=image_use(kernels))
            for sha256, (size, kernels) in (memory or {}).items()
        ),
        compiled=(),
        contexts=(TEST,),
        processes=(),
        launches=(),
        gaps=(),
        warnings=(),
        incomplete=tuple(incomplete),
    )
