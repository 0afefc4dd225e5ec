"""Builds ``Usage`` records for tests of what follows the trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from pytest_negativa.models.library import LibraryMap
from pytest_negativa.models.trace import (
    Context,
    Device,
    FirstUse,
    ImageForm,
    ImageUse,
    LaunchRow,
    LibraryUsage,
    Phase,
    TracedLibrary,
    Usage,
    UsageProcess,
    UsageWarning,
)
from tests.support.traces import header

# It began after all files were written.
PROCESS = UsageProcess(header=header(7, start_ns=1 << 62), trace="t.jsonl", ended=True)
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
        kernels=dict.fromkeys(kernels, _FIRST),
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
            replace(
                image_use(kernels),
                offset=offset,
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
        run_ids=("run",),
        devices=tuple(map(device, devices)),
        libraries=libraries,
        memory_images=tuple(
            replace(image_use(kernels), sha256=sha256, size=size)
            for sha256, (size, kernels) in (memory or {}).items()
        ),
        compiled=(),
        contexts=(TEST,),
        processes=(PROCESS,),
        launches={},
        ranges=(),
        warnings=(),
        incomplete=tuple(incomplete),
    )


class Launched(NamedTuple):
    """Launches of a kernel in a context, as a trace has them."""

    name: str
    context: int
    launches: int
    gpu_ns: int | None = None
    ranges: tuple[str, ...] = ()


def with_launches(usage: Usage, *launches: Launched) -> Usage:
    """The usage of a run that counted launches."""
    ranges = sorted({one.ranges for one in launches if one.ranges})
    by_name: defaultdict[str, list[LaunchRow]] = defaultdict(list)
    for name, context, count, gpu_ns, around in launches:
        number = ranges.index(around) if around else None
        by_name[name].append(LaunchRow(context, count, gpu_ns, number))
    rows = {name: tuple(found) for name, found in by_name.items()}
    return replace(usage, launches=rows, ranges=tuple(ranges))
