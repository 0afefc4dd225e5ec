"""The tracer steps aside once, before the first profile of a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_negativa.tracing.kineto import before_first_profile

CPU, CUDA = SimpleNamespace(name="CPU"), SimpleNamespace(name="CUDA")


def test_it_steps_aside_before_the_first_profile_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def step_aside(act: Callable[[], None]) -> None:
        calls.append("released")
        act()
        calls.append("taken")

    profiler: Any = SimpleNamespace(
        _prepare_profiler=lambda *given, **more: calls.append(("prepare", *given, more)),
        _enable_profiler=lambda *given: calls.append(("enable", *given)),
        _disable_profiler=lambda: calls.append("disable"),
    )
    monkeypatch.setitem(sys.modules, "torch.autograd.profiler", profiler)
    both = [CPU, CUDA]

    assert before_first_profile(step_aside)
    profiler._prepare_profiler("config", [CPU])
    assert calls == [("prepare", "config", [CPU], {})]

    calls.clear()
    profiler._prepare_profiler("config", both, activity_filter=1)
    nothing: list[object] = [("prepare", "config", both, {}), ("enable", "config", both), "disable"]
    first = ("prepare", "config", both, {"activity_filter": 1})
    assert calls == ["released", *nothing, "taken", first]

    calls.clear()
    profiler._prepare_profiler("config", both)
    assert calls == [("prepare", "config", both, {})]


def test_a_fault_of_the_tracer_leaves_the_profile_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[object] = []
    profiler: Any = SimpleNamespace(_prepare_profiler=lambda *given: prepared.append(given))
    monkeypatch.setitem(sys.modules, "torch.autograd.profiler", profiler)

    def step_aside(act: Callable[[], None]) -> None:
        raise RuntimeError

    assert before_first_profile(step_aside)
    profiler._prepare_profiler("config", [CUDA])
    assert prepared == [("config", [CUDA])]


@pytest.mark.parametrize("module", [None, SimpleNamespace()], ids=["not imported", "another one"])
def test_without_pytorch_nothing_is_done(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    monkeypatch.setitem(sys.modules, "torch.autograd.profiler", module)
    assert not before_first_profile(lambda act: act())
