"""torch.profiler in a traced process: Kineto and the tracer share CUPTI.

CUPTI serves one subscriber. Kineto, the library in torch.profiler, subscribes at its first profile
of a GPU; if it can't, it records no GPU event for as long as the process lives (its ``init.cpp``).
It never gives its subscription back, but its records of kernels come without one. So the tracer
steps aside before the first profile, until an empty profile has made Kineto subscribe.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

_PROFILER = "torch.autograd.profiler"


def before_first_profile(step_aside: Callable[[Callable[[], None]], None]) -> bool:
    """Have ``step_aside`` called with a function once torch.profiler begins to profile a GPU.

    Args:
        step_aside: releases CUPTI, calls the function, and takes CUPTI again.

    Returns:
        Whether PyTorch is imported; else nothing was done.
    """
    profiler: Any = sys.modules.get(_PROFILER)
    prepare = getattr(profiler, "_prepare_profiler", None)
    if prepare is None:
        return False

    # Later releases of PyTorch add parameters.
    def prepare_shared(config: object, activities: Iterable[Any], **more: object) -> None:
        if any(activity.name == "CUDA" for activity in activities):
            profiler._prepare_profiler = prepare
            # The user's profile must begin, whatever became of ours.
            with contextlib.suppress(Exception):
                step_aside(partial(profile_nothing, config, activities))
        prepare(config, activities, **more)

    def profile_nothing(config: object, activities: Iterable[Any]) -> None:
        prepare(config, activities)
        profiler._enable_profiler(config, activities)
        profiler._disable_profiler()

    profiler._prepare_profiler = prepare_shared
    return True
