"""Whether a path holds files in another way than as a folder."""

from __future__ import annotations

import os
import re
from pathlib import Path

from pytest_negativa.images.archive_kinds import has_image_list, kind_at

_NAMED_AS_ARCHIVE = re.compile(r".*\.(whl|conda|deb|tar(\.\w+)?)")


def is_container(path: Path) -> bool:
    """Whether a path is an archive, or a folder with a saved image.

    Raises:
        FormatError: it is such a folder, and damaged.
    """
    if not has_image_list(path):
        return kind_at(path) is not None
    # It imports the readers of all archives, which takes 15 ms.
    from pytest_negativa.images.layers import find_image

    return find_image(path) is not None


def count_archives(folder: Path) -> int:
    """Number of files below a folder with names of wheels, packages or tar archives."""
    return sum(
        _NAMED_AS_ARCHIVE.fullmatch(name) is not None
        for _, _, names in os.walk(folder)
        for name in names
    )
