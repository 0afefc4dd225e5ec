"""Our folder among the user's own, by the XDG base directory specification."""

from __future__ import annotations

from pathlib import Path

import platformdirs


def user_cache() -> Path | None:
    """``$XDG_CACHE_HOME/negativa`` or ``~/.cache/negativa``; None for a user without a home."""
    # Containers run as users that have neither HOME nor an entry in /etc/passwd.
    try:
        folder = platformdirs.user_cache_path("negativa")
    except RuntimeError:
        return None
    # Older releases of platformdirs leave "~" as it is, and take a relative XDG folder.
    return folder if folder.is_absolute() else None
