"""The command ``negativa``, also as ``python -m pytest_negativa``."""

import atexit
import gc

# New objects between two looks for cycles. Maps are hundreds of thousands of objects without any;
# and while modules are imported, these looks take a seventh of the time.
_GC_THRESHOLD = 100_000


def main() -> None:
    """Run the command that the command line names; see ``cli.main``."""
    gc.set_threshold(_GC_THRESHOLD)
    # At its end, Python would look through all objects once more.
    atexit.register(gc.freeze)
    from pytest_negativa.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
