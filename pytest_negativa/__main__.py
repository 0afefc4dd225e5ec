"""``python -m pytest_negativa``: the command ``negativa``."""

from pytest_negativa.cli.main import main

main()
