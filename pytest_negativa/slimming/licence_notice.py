"""A note on the terms of libraries, shown to each user once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from pytest_negativa.storage.user_folders import user_state

_NOTICE = """\
negativa: note: the licence of a library may limit how it is changed and passed on; NVIDIA's \
licence agreements do. negativa slim changes the copies on this machine; check the terms of each \
vendor before you pass them on, in an image for instance: see docs/explanation/licences.md. This \
note is shown once."""
_SHOWN = "eula-notice"


def show_notice(show: Callable[[str], None], folder: Path | None = None) -> None:
    """Show the note, unless this user has seen it.

    Args:
        show: what shows a text.
        folder: where a file remembers it; by default, ``negativa`` in the user's state folder
            (``XDG_STATE_HOME``).
    """
    folder = folder or user_state()
    # Path.exists raises an error if the folder is in another user's home.
    if folder is not None and os.path.exists(folder / _SHOWN):  # noqa: PTH110
        return
    show(_NOTICE)
    if folder is not None:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _SHOWN).touch()
