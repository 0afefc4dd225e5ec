"""Our folders among the user's own, by the XDG base directory specification."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import platformdirs

_NAME = "negativa"


def user_cache() -> Path | None:
    """``$XDG_CACHE_HOME/negativa`` or ``~/.cache/negativa``; None for a user without a home."""
    return _existing_home(platformdirs.user_cache_path)


def user_state() -> Path | None:
    """``$XDG_STATE_HOME/negativa`` or ``~/.local/state/negativa``; None without a home."""
    return _existing_home(platformdirs.user_state_path)


def _existing_home(path_of: Callable[[str], Path]) -> Path | None:
    # Containers run as users that have neither HOME nor an entry in /etc/passwd.
    try:
        folder = path_of(_NAME)
    except RuntimeError:
        return None
    # Older releases of platformdirs leave "~" as it is, and take a relative XDG folder.
    return folder if folder.is_absolute() else None
