"""By what a process knows that the session it finds in its environment is its own."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict

from pytest_negativa.models.environment import SESSION_VARIABLE
from pytest_negativa.storage.handover import Handover, find_handover, identify_process
from tests.support.emulators import not_in_qemu

SHOW = """
import json, os, sys
from pytest_negativa.storage.handover import identify_process
print(json.dumps(identify_process()), flush=True)
if len(sys.argv) == 1:
    os.execv(sys.executable, [*sys.orig_argv, "again"])
"""


def test_a_session_travels_as_text() -> None:
    session = Handover(identify_process(), "run", "/", None, False, "run", "runs")
    assert find_handover({SESSION_VARIABLE: session.to_text()}) == session
    for text in ("", "{}", "[]", json.dumps({**asdict(session), "process": [1]})):
        assert find_handover({SESSION_VARIABLE: text}) is None


@not_in_qemu("starts anew when a program calls execv")
def test_a_process_keeps_its_identity_when_execv_replaces_its_program() -> None:
    done = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, check=True)
    before, after = map(json.loads, done.stdout.splitlines())
    assert before == after
    _, namespace, started = identify_process()
    # The same namespace; a later start, in clock ticks.
    assert before[1] == namespace and namespace is not None and started is not None
    assert int(before[2]) >= int(started)
