"""Input and output of ``negativa vex``: functions of vulnerabilities, and an OpenVEX document."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pytest_negativa.models.base import Record, Versioned

OPENVEX = "https://openvex.dev/ns/v0.2.0"
"""The version of OpenVEX that is written; its schema is github.com/openvex/spec."""

_Names = tuple[Annotated[str, msgspec.Meta(min_length=1)], ...]


class VulnerableCode(Record, frozen=True, kw_only=True):
    """Place of a vulnerability in a library.

    Attributes:
        library: a glob, as in ``libraries.include``.
        kernels: mangled names of GPU kernels.
        functions: mangled names of CPU functions, with all into which they may be inlined.
    """

    library: str
    kernels: _Names = ()
    functions: _Names = ()

    def __post_init__(self) -> None:
        if not (self.kernels or self.functions):
            raise ValueError("expected kernels or functions")


class Vulnerability(Record, frozen=True, kw_only=True):
    """A vulnerability, such as a CVE.

    Attributes:
        name: such as ``CVE-2026-0001``.
        code: where it lies.
    """

    name: Annotated[str, msgspec.Meta(min_length=1)]
    code: Annotated[tuple[VulnerableCode, ...], msgspec.Meta(min_length=1)]


class Vulnerabilities(Versioned, Record, frozen=True, kw_only=True):
    """The list of vulnerabilities, a YAML or JSON file of the user.

    Attributes:
        vulnerabilities: each with its code.
    """

    vulnerabilities: Annotated[tuple[Vulnerability, ...], msgspec.Meta(min_length=1)]
