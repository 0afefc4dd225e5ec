"""Kinds of arguments that more than one command of ``negativa`` takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from pytest_negativa.errors import OptionError

if TYPE_CHECKING:
    from pytest_negativa.arch import ComputeCapability


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
