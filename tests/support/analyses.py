"""What an analysis starts from: settings of a folder, and use of compiled libraries."""

from __future__ import annotations

from pathlib import Path

from pytest_negativa.arch import ElementKind
from pytest_negativa.gpucode.library import read_library
from pytest_negativa.models.library import Scope
from pytest_negativa.models.settings import Settings
from pytest_negativa.models.trace import LibraryUsage, Usage
from pytest_negativa.settings.resolve import load_settings
from tests.support.usages import library_usage, usage_of


def settings(folder: Path, text: str = "") -> Settings:
    """The settings of a ``negativa.yaml``, as a session in ``folder`` would have them."""
    (folder / "negativa.yaml").write_text(text)
    return load_settings({}, {"NEGATIVA_CACHE_DIR": str(folder / "cache")}, root=folder, cwd=folder)


def use(path: Path, used_regions: tuple[int, ...] = ()) -> LibraryUsage:
    """A use of the library: by number of the region, a kernel of what an H200 loads of it."""
    library_map = read_library(path, Scope(devices=("9.0",)))
    regions = tuple(library_map.iter_regions())
    images = {}
    for number in used_regions:
        element = next(
            e
            for e in regions[number].elements
            if e.kind is ElementKind.CUBIN and str(e.arch) == "sm_90"
        )
        kernels = [k.name for k in library_map.kernels_of(element.content)]
        images[regions[number].span.start] = kernels[:1]
    return library_usage(library_map, images)


def used(*paths: Path, regions: tuple[int, ...] = (), **more: object) -> Usage:
    incomplete = more.get("incomplete", ())
    assert isinstance(incomplete, tuple)
    return usage_of(*(use(path, regions) for path in paths), incomplete=incomplete)


def region_starts(path: Path) -> list[int]:
    """File offsets of the regions of a library."""
    library_map = read_library(path, Scope(headers_only=True))
    return [region.span.start for region in library_map.iter_regions()]
