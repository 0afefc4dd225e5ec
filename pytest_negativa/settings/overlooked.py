"""What a user set that has no effect: variables of no option.

Every pytest session asks, so the module imports little.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pytest_negativa.errors import did_you_mean
from pytest_negativa.models.environment import OWN_VARIABLES
from pytest_negativa.settings.options import OPTIONS


def find_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """A warning for each variable ``NEGATIVA_*`` that no option has."""
    known = {option.variable for option in OPTIONS if option.variable is not None}
    for name in sorted(environ):
        if name.startswith("NEGATIVA_") and name not in known | OWN_VARIABLES:
            yield f"{name}: no option has this variable{did_you_mean(name, known)}"
