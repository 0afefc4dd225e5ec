"""What more than one command of ``negativa`` takes: kinds of arguments, settings, the run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pytest_negativa.errors import OptionError
from pytest_negativa.settings.flags import pick_flags

if TYPE_CHECKING:
    from pytest_negativa.arch import ComputeCapability
    from pytest_negativa.models.settings import Settings
    from pytest_negativa.storage.runs import Run


class DeviceType(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # click < 8.3: not generic
    """A compute capability, in any of the forms that ``ComputeCapability.parse`` reads."""

    name = "ARCH"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> ComputeCapability:
        from pytest_negativa.arch import ComputeCapability

        try:
            return ComputeCapability.parse(value)
        except OptionError as e:
            self.fail(str(e), param, ctx)


def settings_of(flags: Mapping[str, Any]) -> Settings:
    """The settings of a command, from the flags that ``click_options`` gave it.

    Raises:
        OptionError: an option or ``negativa.yaml`` can't be used.
    """
    from pytest_negativa.settings.resolve import load_settings

    here = Path.cwd()
    return load_settings(pick_flags(flags), os.environ, root=here, cwd=here, of_command=True)


def run_of(settings: Settings) -> Run:
    """The run that a command works on: that of ``--run``, else the last one.

    Raises:
        OptionError: the named one is not there.
        StoreError: there is no run.
    """
    from pytest_negativa.storage.runs import RunsFolder

    return RunsFolder(Path(settings.directory)).find(settings.run)
