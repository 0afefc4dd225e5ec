"""One round of a program."""

from __future__ import annotations

import os
from pathlib import Path

from pytest_negativa.models.round import Round, RoundKind
from pytest_negativa.storage.handover import identify_process
from pytest_negativa.verifying.rounds import Program, RoundResult, run_round


def round_spec(folder: Path, name: str = "001", *, is_pytest: bool = False) -> Round:
    return Round(
        kind=RoundKind.VERIFY,
        supervisor=os.getpid(),
        pid_namespace=identify_process().namespace,
        folder=str(folder / name),
        is_pytest=is_pytest,
    )


def program_of(folder: Path, *command: str) -> Program:
    return Program(
        command=command,
        again=command,
        alone=command,
        cwd=folder,
        root=folder,
        environ=dict(os.environ),
        is_pytest=False,
    )


def run_command(folder: Path, *command: str, limit: float | None = None) -> RoundResult:
    program = program_of(folder, *command)
    return run_round(program, round_spec(folder), program.environ, limit)
