"""The pytest plugin: hooks of a few lines, which hand over to ``session``.

Every pytest session imports this module, so it imports only pytest and the table of options. The
modules for tracing are imported when ``--negativa`` is given.
"""

from __future__ import annotations

import atexit
import os
import shlex
import sys
from collections.abc import Generator, Iterator

import pytest

from pytest_negativa.errors import NegativaError, OptionError
from pytest_negativa.models.environment import OWN_VARIABLES, ROUND_VARIABLE
from pytest_negativa.settings.flags import (
    add_pytest_options,
    find_variables,
    flag_without_effect,
    pick_flags,
)
from pytest_negativa.settings.options import PROVED

MARKER = (
    "negativa_off(reason): release CUPTI while this test runs, because it needs a profiler itself; "
    "the code that it uses is not traced, so no code that it may use counts as unused"
)

# Options with which pytest runs no test, so a report of unused code would mean nothing.
_RUNS_NO_TEST = (
    "help",
    "version",
    "collectonly",
    "setuponly",
    "setupplan",
    "markers",
    "showfixtures",
    "show_fixtures_per_test",
    "cacheshow",
)


@atexit.register
def _end_tracing() -> None:
    """End tracing, after the handlers of everything that was imported later."""
    # Only a session that traces has imported it.
    if (tracing_end := sys.modules.get("pytest_negativa.session.tracing_end")) is not None:
        tracing_end.end_tracing()


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the flags of the option table."""
    group = parser.getgroup("negativa", "GPU code that tests use (pytest-negativa)")
    config: pytest.Config | None = pluginmanager.get_plugin("pytestconfig")
    # pytest.main(plugins=...) registers plugins before pytest has read its configuration.
    words = None
    if config is not None and hasattr(config, "rootpath"):
        words = [
            *config.getini("addopts"),
            *shlex.split(os.environ.get("PYTEST_ADDOPTS", "")),
            *_typed(config),
        ]
    add_pytest_options(group, words)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the hooks of ``hookspecs``."""
    from pytest_negativa import hookspecs

    pluginmanager.add_hookspecs(hookspecs)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config,
) -> Generator[None, object, object]:
    """Begin before conftest.py files are imported, because they may use the GPU.

    It is also before pytest captures output, which the supervisor that replaces this process needs.
    """
    try:
        _begin(early_config)
    except NegativaError as e:
        from pytest_negativa.reporting.text import printable_lines

        raise pytest.UsageError(f"negativa: {printable_lines(str(e))}") from None
    return (yield)


def _begin(config: pytest.Config) -> None:
    """Begin to trace, or replace this process by one that traces or supervises."""
    namespace = config.known_args_namespace
    flags = pick_flags(vars(namespace))
    enabled = bool(flags.get("enabled"))
    supervised = any(flags.get(name) for name in PROVED)
    in_round = ROUND_VARIABLE in os.environ
    if not OWN_VARIABLES & os.environ.keys():
        # A process that another session started need not say it again.
        for text in find_variables(os.environ):
            from pytest_negativa.reporting.text import print_warning

            print_warning(text)
    if any(getattr(namespace, name, None) for name in _RUNS_NO_TEST):
        return
    # In a round, the supervisor has checked this.
    if not in_round and (idle := flag_without_effect(_typed(config), flags)) is not None:
        raise OptionError(idle)
    if not (enabled or supervised or in_round):
        return
    from pytest_negativa.session import page_trace

    if not page_trace.is_in_round():
        if supervised and not in_round:
            # In a round, a test has started this pytest. It must not rewrite the copies.
            from pytest_negativa.session import request

            request.start_supervisor(config, flags)
        if not enabled:
            return
    # It may replace the process, so it comes before the other imports.
    settings, pages = page_trace.begin(config, flags)
    from pytest_negativa.session import start

    start.begin(config, settings, pages)


def _typed(config: pytest.Config) -> list[str]:
    """The words of the command line, without those of ``addopts``."""
    return [str(word) for word in config.invocation_params.args]


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", MARKER)


@pytest.fixture
def negativa_off(request: pytest.FixtureRequest) -> Iterator[None]:
    """Release CUPTI for the rest of a test, because the test needs a profiler itself.

    The code that runs meanwhile is not traced, so no code that it may use counts as unused. The
    fixture does nothing in a session without ``--negativa``.
    """
    traced = request.config.pluginmanager.get_plugin("negativa-traced-process")
    if traced is None:
        yield
    else:
        with traced.paused(f"the fixture negativa_off of {request.node.nodeid}"):
            yield
