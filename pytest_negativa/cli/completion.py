"""The command that installs the completion of ``negativa`` in a shell: completion."""

from __future__ import annotations

import os
from pathlib import Path

import click

from pytest_negativa.errors import StoreError

_VARIABLE = "_NEGATIVA_COMPLETE"
# The last line of a script that may be overwritten. The first one of zsh's must be "#compdef".
_MARK = "# negativa completion --install overwrites this file."
# Where the shells look for the completions of a user. Sources: bash-completion, README, "FAQ";
# fish, "Where to put completions". zsh has no such folder.
_FOLDERS = {
    "bash": ("XDG_DATA_HOME", ".local/share", "bash-completion/completions/negativa"),
    "fish": ("XDG_CONFIG_HOME", ".config", "fish/completions/negativa.fish"),
    "zsh": ("XDG_DATA_HOME", ".local/share", "zsh/site-functions/_negativa"),
}


@click.command()
@click.argument("shell", type=click.Choice(sorted(_FOLDERS)), required=False)
@click.option("--install", is_flag=True, help="Write the script to the shell's folder.")
def completion(shell: str | None, install: bool) -> None:
    """Print a script that completes negativa's commands and options.

    SHELL is that of the variable SHELL by default. --install writes the script where bash and fish
    find it, and tells the line that zsh needs. A new shell completes negativa with the Tab key.

    Exit status: 0, or 1 if another file is at that place or it can't be written.
    """
    from click.shell_completion import get_completion_class

    from pytest_negativa.cli.main import main
    from pytest_negativa.reporting.text import printable

    shell = shell or Path(os.environ.get("SHELL", "")).name
    if shell not in _FOLDERS:
        raise click.UsageError(f"name the shell: {', '.join(sorted(_FOLDERS))}")
    completer = get_completion_class(shell)
    assert completer is not None
    source = completer(main, {}, "negativa", _VARIABLE).source()
    if not install:
        click.echo(source)
        return
    target = _script_of(shell)
    try:
        _install(target, source)
    except OSError as e:
        raise StoreError(f"{target}: cannot be written: {e.strerror}") from e
    click.echo(f"Written to {printable(str(target))}. A new {shell} completes negativa.")
    if shell == "zsh":
        click.echo(f"Put this line before compinit in .zshrc: fpath+=({target.parent})")


def _script_of(shell: str) -> Path:
    variable, below, name = _FOLDERS[shell]
    folder = Path(os.environ.get(variable, ""))
    # XDG Base Directory Specification: "consider the path invalid and ignore it".
    return (folder if folder.is_absolute() else Path.home() / below) / name


def _install(target: Path, source: str) -> None:
    from pytest_negativa.storage.output import write_output
    from pytest_negativa.storage.system import read_regular

    try:
        present = read_regular(target).decode(errors="replace")
    except FileNotFoundError:
        present = _MARK
    if present.rstrip() != source.rstrip() and not present.rstrip().endswith(_MARK):
        raise StoreError(
            f"{target}: another file is there; move it, or print the script and place it"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    write_output(target, f"{source}\n{_MARK}\n".encode())
