"""Files that are GPU code themselves: which of the unused ones did a process open in the rounds?"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from pytest_negativa.models.code_files import FilesPlan
from pytest_negativa.models.verdict import ProvedFiles
from pytest_negativa.processes.open_watch import Opens

_INSTALLED_ANEW = "its RECORD is another one than when it was traced"


def judge_files(
    plans: Sequence[FilesPlan], rounds: Sequence[Opens], installed: Collection[tuple[str, str]]
) -> Iterator[ProvedFiles]:
    """What the rounds say of the files that the traced run did not open.

    Nothing replaces the files: a program that opens one gets it, and the file is needed from then
    on. So the tests can't fail for lack of a file, and the watch alone is the proof.

    Args:
        plans: what was planned.
        rounds: what was seen in each round, whether on copies or on the originals.
        installed: what is there now: site and digest of each distribution with such files.
    """
    for plan in plans:
        paths = plan.paths
        opened = sorted({paths[p] for o in rounds for p in o.times if p in paths})
        same = (plan.site, plan.digest) in installed
        unseen = [] if same else [_INSTALLED_ANEW]
        unseen += [o.unseen[p] for o in rounds for p in o.unseen if p in paths]
        yield ProvedFiles(
            distribution=plan.distribution,
            version=plan.version,
            site=plan.site,
            files=len(plan.unused),
            size=plan.unused_bytes,
            unused_sha256=plan.unused_sha256,
            opened=tuple(opened),
            opened_bytes=sum(plan.unused[name] for name in opened),
            unseen=next(iter(unseen), None),
        )
