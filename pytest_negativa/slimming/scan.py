"""The folders and files of a command: they are listed, and held while the command works."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from pytest_negativa.errors import OptionError, ReconstructError
from pytest_negativa.gpucode.elf_tables import ELF_MAGIC
from pytest_negativa.slimming.folder_locks import hold
from pytest_negativa.slimming.journal import Journal
from pytest_negativa.slimming.tree import MANIFEST_NAME, Tree, head_of, scan_files, scan_folder
from pytest_negativa.storage.shared_folders import refuse_shared

_NO_LIBRARY = (
    "not a shared library (ELF, *.so*); slim takes folders, libraries, and one wheel or "
    "conda package with --target; of an image, slim the folder of its packages while it is built"
)


def refuse_other_files(paths: Sequence[Path]) -> None:
    """Refuse named files that can't be libraries, such as images.

    Raises:
        OptionError: one is. A damaged library, which the manifest beside it may name, is none.
    """
    for path in paths:
        head = head_of(path)
        is_elf = head is None or head.startswith(ELF_MAGIC)
        if not is_elf and not path.resolve().with_name(MANIFEST_NAME).exists():
            raise OptionError(f"{path}: {_NO_LIBRARY}")


def roots_of(paths: Sequence[Path]) -> list[Path]:
    """The roots of the trees that ``scan`` lists.

    Raises:
        OptionError: see ``scan``.
    """
    folders, files = _folders_and_files(paths)
    return sorted({*folders, *(file.resolve().parent for file in files)})


def scan(paths: Sequence[Path]) -> list[Tree]:
    """List the folders and files of these paths.

    Raises:
        OptionError: a path does not exist, or lies in another one.
        StoreError: one can't be listed.
    """
    folders, files = _folders_and_files(paths)
    return [*map(scan_folder, folders), *(scan_files(files) if files else ())]


def _folders_and_files(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    for path in paths:
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            is_name = len(path.parts) == 1 and not path.suffix
            hint = "; slim takes paths, not names of distributions" if is_name else ""
            raise OptionError(f"{path}: no such file or folder{hint}") from None
        except OSError as e:
            raise OptionError(f"{path}: cannot be read: {e.strerror}") from e
    folders = sorted({path.resolve() for path in paths if path.is_dir()})
    files = [path for path in paths if not path.is_dir()]
    for inner in (*folders, *(file.resolve() for file in files)):
        if outer := next((f for f in folders if f in inner.parents), None):
            raise OptionError(f"{inner} is in {outer}; give one of them")
    return folders, files


@contextlib.contextmanager
def open_journals(paths: Sequence[Path], *, dry_run: bool) -> Iterator[list[Journal]]:
    """The journals of the folders, which this process holds, without what killed runs left.

    Args:
        paths: folders and files.
        dry_run: remove nothing.

    Raises:
        OptionError: see ``scan``.
        NegativaError: a folder can't be held.
    """
    with hold(*roots_of(paths)):
        trees = scan(paths)
        leftovers = [] if dry_run else [path for tree in trees for path in tree.leftovers]
        for path in leftovers:
            # A folder that can't be written is the business of the work that follows.
            with contextlib.suppress(OSError, ReconstructError):
                refuse_shared(path.parent)
                path.unlink()
        # A leftover may have been one more name of a library.
        trees = scan(paths) if leftovers else trees
        yield [Journal(tree, held=[tree.root for tree in trees]) for tree in trees]
