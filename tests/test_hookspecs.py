"""The hooks for other plugins."""

from __future__ import annotations

import inspect

import pluggy
import pytest

from pytest_negativa import hookspecs


def manager() -> pluggy.PluginManager:
    found = pluggy.PluginManager("pytest")
    found.add_hookspecs(hookspecs)
    return found


def test_hooks_are_specified() -> None:
    hook = manager().hook
    names = sorted(name for name in vars(hookspecs) if name.startswith("pytest_negativa"))
    assert names == [
        "pytest_negativa_keep_element",
        "pytest_negativa_libraries",
        "pytest_negativa_register_detector",
        "pytest_negativa_report",
    ]
    for name in names:
        caller = getattr(hook, name)
        described = getattr(hookspecs, name).__doc__
        assert caller.spec is not None
        for argument in caller.spec.argnames:
            # Python 3.13 takes the indentation away.
            assert f"\n    {argument}: " in inspect.cleandoc(described)


def test_hooks_collect_and_take_the_first() -> None:
    hookimpl = pluggy.HookimplMarker("pytest")

    class First:
        @hookimpl
        def pytest_negativa_keep_element(self, element: object) -> str | None:
            return None

        @hookimpl
        def pytest_negativa_libraries(self) -> list[str]:
            return ["/a.so"]

    class Second:
        @hookimpl
        def pytest_negativa_keep_element(self, element: object) -> str | None:
            return f"needed: {element}"

        @hookimpl
        def pytest_negativa_libraries(self) -> list[str]:
            return ["/b.so"]

    found = manager()
    found.register(First())
    found.register(Second())
    found.check_pending()
    keep = found.hook.pytest_negativa_keep_element
    assert keep(settings=None, library=None, element="x") == "needed: x"
    libraries = found.hook.pytest_negativa_libraries(config=None, settings=None, usage=None)
    assert sorted(libraries) == [["/a.so"], ["/b.so"]]


def test_a_misspelt_argument_of_a_hook_is_refused() -> None:
    class Wrong:
        @pluggy.HookimplMarker("pytest")
        def pytest_negativa_keep_element(self, elemnt: object) -> None: ...

    with pytest.raises(pluggy.PluginValidationError, match="elemnt"):
        manager().register(Wrong())
