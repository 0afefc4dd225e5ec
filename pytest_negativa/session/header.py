"""The line of pytest's header that says what the session traces, where and how."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pytest_negativa.models.settings import Settings, TraceLevel
from pytest_negativa.reporting.text import printable


def describe_session(
    settings: Settings,
    *,
    gpus: Sequence[str],
    recorded: TraceLevel | None,
    not_traced: str | None,
    root: Path,
) -> str:
    """The line.

    Args:
        settings: of the session.
        gpus: names of this machine's GPUs, if known.
        recorded: level of the recording that stands in for a GPU.
        not_traced: why no GPU code is traced; None if it is.
        root: paths below this folder are shown relative to it.
    """
    if not_traced is not None:
        state = f"GPU code not traced: {not_traced}"
    elif recorded is not None:
        state = f"no GPU, replaying {_shown(settings.trace.replay or '', root)}"
    else:
        state = f"tracing on {', '.join(dict.fromkeys(gpus)) or 'a GPU'}"
    level = f"level {(recorded or settings.trace.level).value}"
    config = settings.config and _shown(settings.config, root)
    words = (state, level, config or "no configuration file")
    return printable(f"negativa: {', '.join(words)}")


def _shown(path: str, root: Path) -> str:
    return os.path.relpath(path, root) if Path(path).is_relative_to(root) else path
