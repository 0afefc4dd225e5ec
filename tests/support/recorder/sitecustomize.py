"""Writes each attempt that ``judge`` gets, and the verdict; see ``tests.support.attempts``.

Python imports this module at its start, because its folder is in PYTHONPATH.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location

_ATTEMPTS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "attempts.py")
_JUDGE = "pytest_negativa.verifying.judge"


class _Recorder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads the module ``judge`` as it is, and wraps its function."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != _JUDGE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        assert spec is not None and spec.loader is not None
        self.loader = spec.loader
        spec.loader = self
        return spec

    def create_module(self, spec):  # type: ignore[no-untyped-def]
        return None

    def exec_module(self, module):  # type: ignore[no-untyped-def]
        self.loader.exec_module(module)
        decide = module.judge
        # By its file: a project may have a package called tests.
        attempts = spec_from_file_location("recorded_attempts", _ATTEMPTS)
        assert attempts is not None and attempts.loader is not None
        recorder = module_from_spec(attempts)
        sys.modules["recorded_attempts"] = recorder
        attempts.loader.exec_module(recorder)
        write_attempt = recorder.write_attempt

        def judge(attempt):  # type: ignore[no-untyped-def]
            verdict = decide(attempt)
            write_attempt(attempt, verdict)
            return verdict

        module.judge = judge


if "RECORD_ATTEMPTS" in os.environ:
    sys.meta_path.insert(0, _Recorder())
