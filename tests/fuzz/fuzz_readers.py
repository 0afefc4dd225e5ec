"""Coverage-guided fuzzing of the readers with atheris; run by hand, from the repository's root.

atheris is no dependency of the tests, since it has no wheel for every Python. To run it::

    python3.11 -m venv fuzz-env
    fuzz-env/bin/pip install atheris -e .[test]
    fuzz-env/bin/python -m tests.fuzz.fuzz_readers library fuzz-corpus/library \
        -max_total_time=600 -timeout=10 -rss_limit_mb=2048

The first argument is a target of ``tests.support.fuzz_targets``. The second is the folder of its
corpus, seeded if it is empty. The rest goes to libFuzzer. A crash, a time-out or too much memory
leaves the input in a file of the working directory. Put it into ``tests/fuzz/corpus/TARGET``: a
test tries every file there. So it does with the inputs that reach other code than the seeds do::

    fuzz-env/bin/python -m tests.fuzz.fuzz_readers library new fuzz-corpus/library -merge=1
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris  # type: ignore[import-untyped,import-not-found,unused-ignore]

with atheris.instrument_imports(include=["pytest_negativa", "elftools"]):
    from tests.support.fuzz_targets import TARGETS, iter_seeds


def main() -> None:
    target, *arguments = sys.argv[1:]
    corpus = Path(next(word for word in arguments if not word.startswith("-")))
    corpus.mkdir(parents=True, exist_ok=True)
    if not any(corpus.iterdir()):
        for number, seed in enumerate(iter_seeds(target)):
            (corpus / f"seed-{number}").write_bytes(seed)
    # What libFuzzer starts again for -merge=1, by a shell.
    itself = f"{sys.executable} -m tests.fuzz.fuzz_readers {target}"
    atheris.Setup([itself, *arguments], TARGETS[target])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
