"""Rows of ``negativa inspect --packages``: files and packages, their use, by what they match."""

from __future__ import annotations

import enum

from pytest_negativa.models.base import Record, Versioned
from pytest_negativa.models.library import ForeignCode


class SuiteUse(str, enum.Enum):
    """Use of a library by a traced run."""

    USED = "used"  # loaded GPU code from it
    LOADED = "loaded"  # had it mapped, and loaded no GPU code
    NEVER_LOADED = "never-loaded"
    UNKNOWN = "unknown"  # no build id or digest to recognise it by


class SlimmableBy(str, enum.Enum):
    """Source that says that bytes are slimmable."""

    PLAN = "plan"  # the run's plan for exactly this content
    LOCK = "lock"  # the lock file's plan for exactly this content
    ARCH = "arch"  # none of the given devices loads them, whatever the program does


class Manager(str, enum.Enum):
    """The package manager that installed a file."""

    WHEEL = "wheel"
    CONDA = "conda"
    DPKG = "dpkg"


class ImagePackage(Record, frozen=True, kw_only=True):
    """An installed package.

    Attributes:
        name: as its manager spells it.
        version: as its manager spells it.
        manager: what installed it.
    """

    name: str
    version: str
    manager: Manager


class ImageLibrary(Record, frozen=True, kw_only=True):
    """One file with GPU code, or all files of a package that are GPU code. Sizes are in bytes.

    Attributes:
        path: below the root.
        size: of the file.
        build_id: hex of the GNU build id, if it has one.
        package: the package that it belongs to, if that is known.
        code_bytes: GPU code: payloads with padding, and frames.
        suite: what the run did with it; None if no run was given.
        slimmable_bytes: GPU code that could go; None if neither a plan nor an arch tells.
        slimmable_by: what says so; None if nothing does.
        problems: places that are not understood, and so are never slimmable.
        files: how many files that are GPU code themselves; 0 for a library or program.
    """

    path: str
    size: int
    build_id: str | None
    package: ImagePackage | None
    code_bytes: int
    suite: SuiteUse | None
    slimmable_bytes: int | None
    slimmable_by: SlimmableBy | None
    problems: int
    files: int = 0


class PackageRow(Record, frozen=True, kw_only=True):
    """The files of one package with GPU code, added up. Sizes are in bytes.

    Attributes:
        package: None for files of no known package.
        libraries: how many libraries and programs with GPU code.
        code_files: how many files that are GPU code themselves.
        size: of all these files.
        code_bytes: their GPU code.
        slimmable_bytes: GPU code that could go; None if nothing tells.
        never_loaded: how many of the libraries the run never loaded.
        never_loaded_bytes: sizes of those files.
    """

    package: ImagePackage | None
    libraries: int
    code_files: int
    size: int
    code_bytes: int
    slimmable_bytes: int | None
    never_loaded: int
    never_loaded_bytes: int


class ImageReport(Versioned, Record, frozen=True, kw_only=True):
    """Tables of ``inspect`` by package.

    Attributes:
        root: real path of the tree, or of the archive or image that holds it.
        run_id: the run that was given, or that the lock rests on.
        devices: compute capabilities that slimmable code by arch is judged for.
        libraries: files with GPU code, the most of it first.
        packages: the same by package, the most GPU code first.
        without_code: how many other 64-bit programs and shared libraries there are.
        without_code_bytes: their sizes.
        unreadable: files that could not be read, and why.
        notes: what a reader should know.
        slimmed: files that ``negativa slim`` wrote. Only the GPU code that is left in them counts,
            and none of it is slimmable.
        hidden: how many programs, libraries and files of GPU code of a layered image are hidden by
            upper layers. They are a part of the image all the same.
        hidden_bytes: their sizes.
        foreign: the code for GPUs of other vendors in all files, which is not read.
    """

    root: str
    run_id: str | None
    devices: tuple[str, ...]
    libraries: tuple[ImageLibrary, ...]
    packages: tuple[PackageRow, ...]
    without_code: int
    without_code_bytes: int
    unreadable: tuple[str, ...]
    notes: tuple[str, ...]
    slimmed: tuple[str, ...] = ()
    hidden: int = 0
    hidden_bytes: int = 0
    foreign: tuple[ForeignCode, ...] = ()
