"""A ``LibraryMap`` to one of a smaller scope: what reading the library with that scope tells.

A map of everything answers narrower questions too. Without this the answer would
depend on what somebody happened to ask before: the kernels of all archs, or of one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from msgspec.structs import replace

from pytest_negativa.arch import ComputeCapability, choose_elements, cubin_runs_on
from pytest_negativa.models.library import (
    Call,
    Content,
    Cubin,
    DataSymbol,
    Frame,
    Function,
    LibraryMap,
    Ptx,
    Region,
    Scope,
    Signature,
)


def narrow_map(library_map: LibraryMap, scope: Scope) -> LibraryMap:
    """Drop from a map the contents that ``scope``, which it must cover, does not ask for.

    What proved unreadable stays so, though the smaller scope would not have noticed.
    """
    if scope == library_map.scope:
        return library_map
    if not library_map.scope.covers(scope):
        raise ValueError(f"a map of {library_map.scope} cannot be narrowed to {scope}")
    # A scope of all devices is covered by none but itself.
    devices = () if scope.headers_only else scope.capabilities or ()
    names = _Names(library_map.names)
    sections = tuple(
        replace(
            section,
            regions=tuple(_narrow_region(region, devices, names) for region in section.regions),
            frames=tuple(_narrow_frame(frame, devices, names) for frame in section.frames),
        )
        for section in library_map.sections
    )
    return replace(library_map, scope=scope, sections=sections, names=tuple(names.kept))


@dataclass(slots=True)
class _Names:
    """The names still in use, each given the next free index."""

    before: tuple[str, ...]
    kept: dict[str, int] = field(default_factory=dict)

    def index(self, index: int) -> int:
        return self.kept.setdefault(self.before[index], len(self.kept))

    def indices(self, indices: Collection[int]) -> tuple[int, ...]:
        return tuple(map(self.index, indices))


def _narrow_region(region: Region, devices: Collection[ComputeCapability], names: _Names) -> Region:
    wanted = {i for device in devices for i in choose_elements(region.elements, device)}
    return replace(
        region,
        elements=tuple(
            replace(element, content=_rename(element.content, names) if i in wanted else None)
            for i, element in enumerate(region.elements)
        ),
    )


def _narrow_frame(frame: Frame, devices: Collection[ComputeCapability], names: _Names) -> Frame:
    cubin = frame.content
    if cubin is None or not any(cubin_runs_on(frame.arch, device) for device in devices):
        return replace(frame, content=None)
    return replace(frame, content=_rename_cubin(cubin, names))


def _rename(content: Content | None, names: _Names) -> Content | None:
    if isinstance(content, Cubin):
        return _rename_cubin(content, names)
    if isinstance(content, Ptx):
        return replace(
            content,
            kernels=names.indices(content.kernels),
            device_functions=names.indices(content.device_functions),
            global_data=names.indices(content.global_data),
            constant_data=names.indices(content.constant_data),
        )
    return content


def _rename_cubin(cubin: Cubin, names: _Names) -> Cubin:
    def functions(rows: Collection[Function]) -> tuple[Function, ...]:
        return tuple(Function(names.index(r.name), r.offset_in_cubin, r.code_size) for r in rows)

    def data(rows: Collection[DataSymbol]) -> tuple[DataSymbol, ...]:
        return tuple(DataSymbol(names.index(r.name), r.size) for r in rows)

    def calls(rows: Collection[Call]) -> tuple[Call, ...]:
        return tuple(Call(names.index(r.caller), names.index(r.callee)) for r in rows)

    def signatures(rows: Collection[Signature]) -> tuple[Signature, ...]:
        return tuple(Signature(names.index(r.function), names.index(r.prototype)) for r in rows)

    return replace(
        cubin,
        kernels=functions(cubin.kernels),
        device_functions=functions(cubin.device_functions),
        externals=names.indices(cubin.externals),
        global_data=data(cubin.global_data),
        constant_data=data(cubin.constant_data),
        calls=calls(cubin.calls),
        references=calls(cubin.references),
        address_taken=signatures(cubin.address_taken),
        indirect_calls=signatures(cubin.indirect_calls),
    )
