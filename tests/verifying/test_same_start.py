"""What differs in how two sessions were started, and what of it is named."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_negativa.models.outcomes import Circumstances, SessionResult
from pytest_negativa.verifying.same_start import changes_of_start


def session(**known: Any) -> SessionResult:
    return SessionResult(
        tests=(), collection_errors=(), command=(), duration=0, longest_silence=0, exit_status=0,
        circumstances=Circumstances(**known),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("traced", "copies", "changes"),
    [
        ({"options": {"device": "'cuda'"}}, {"options": {"device": "'cuda'"}}, []),
        (
            {"options": {"device": "'cuda'", "k": "1"}},
            {"options": {"device": "'cpu'"}},
            ["option device: 'cuda' when traced, 'cpu' on the copies",
             "option k: 1 when traced, nothing on the copies"],
        ),
        (
            {"variables": {"HOME": "0", "DEVICE": "1", "ON_GPU": "2", "SHLVL": "3", "CI_A": "4"}},
            {"variables": {"HOME": "0", "DEVICE": "2", "LD_AUDIT": "4", "NO_GPU": "5", "CI_A": ""}},
            ["variable DEVICE: another value when traced",
             "variable NO_GPU: set on the copies alone", "variable ON_GPU: set when traced alone"],
        ),
        (
            {"program": "run.py"}, {}, ["program: run.py when traced, pytest on the copies"],
        ),
        (
            {"files": {"test_a.py": "1", "test_b.py": "2", "test_c.py": "3"}},
            {"files": {"test_a.py": "1", "test_b.py": "9", "test_d.py": "4"}},
            ["file test_b.py: changed since it was traced"],
        ),
    ],
    ids=["nothing", "options", "variables", "program", "files"],
)  # fmt: skip
def test_what_is_named(traced: dict[str, Any], copies: dict[str, Any], changes: list[str]) -> None:
    assert list(changes_of_start(session(**traced), session(**copies))) == changes


def test_nothing_is_said_of_a_session_that_died() -> None:
    died = SessionResult(
        tests=(), collection_errors=(), command=(), duration=0, longest_silence=0, exit_status=None
    )
    assert not list(changes_of_start(session(options={"device": "1"}), died))
