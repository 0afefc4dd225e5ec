"""Plans for made-up files of a distribution that are GPU code."""

from __future__ import annotations

from collections.abc import Mapping

from pytest_negativa.models.analysis import AnalyzedLibrary
from pytest_negativa.models.code_files import WatchedFiles
from pytest_negativa.planning.code_files import plan_files
from tests.support.defaults import DEFAULTS
from tests.support.usages import usage_of


def planned_files(
    unused: Mapping[str, int],
    opened: Mapping[str, int],
    *,
    site: str = "/site",
    distribution: str = "some-kernels",
    digest: str = "0" * 64,
) -> AnalyzedLibrary:
    """The plan of a run that opened some of the files; sizes in bytes, by path below the site."""
    watched = WatchedFiles(
        distribution=distribution,
        version="1.0",
        site=site,
        digest=digest,
        files={name: (f"sha256={name}", size) for name, size in {**unused, **opened}.items()},
        opened=tuple(opened),
    )
    [planned] = plan_files([watched], usage_of(), DEFAULTS, None, ())
    return planned
