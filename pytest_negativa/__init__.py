"""Debloat-aware GPU testing: which GPU code does a test suite need, and which not.

A pytest session without the plugin's flags imports this package, too. So it must stay
cheap and imports nothing. ``docs/architecture.md`` tells where things live.
"""

__all__ = ["__version__", "why"]


def why(error: object = None) -> str:
    """What slimmed libraries of this process may have to do with a CUDA error, and the remedy.

    Args:
        error: an exception or its text; None: the libraries alone.
    """
    from pytest_negativa.slimming.explain import explain_error, loaded_slimmed

    return explain_error("" if error is None else str(error), loaded_slimmed())


def __getattr__(name: str) -> str:
    # importlib.metadata costs some 20 ms; only who asks for the version pays.
    if name == "__version__":
        from importlib.metadata import version

        return version("pytest-negativa")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
