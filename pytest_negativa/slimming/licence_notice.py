"""What a user should know of NVIDIA's terms, said once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

_NOTICE = """\
negativa: note: NVIDIA's libraries come under NVIDIA's licence agreements, which limit changing \
and passing on of its files. negativa slim changes the copies on this machine; whether you may \
pass these on, in an image for instance, is for you to find out: see docs/slim.md. This note \
is shown once."""
_SAID = "eula-notice"


def show_notice(say: Callable[[str], None]) -> None:
    """Say it, unless this user was told before."""
    said = _state_folder()
    said = None if said is None else said / _SAID
    if said is not None and said.exists():
        return
    say(_NOTICE)
    if said is not None:
        with contextlib.suppress(OSError):
            said.parent.mkdir(parents=True, exist_ok=True)
            said.touch()


def _state_folder() -> Path | None:
    """``negativa`` in the user's state folder, by the XDG base directory specification."""
    base = os.environ.get("XDG_STATE_HOME", "")
    try:
        return (Path(base) if base.startswith("/") else Path.home() / ".local/state") / "negativa"
    except RuntimeError:
        return None
