"""``negativa init``: a first negativa.yaml, and a CI job of GitHub or GitLab."""

from __future__ import annotations

from pathlib import Path

import click

from pytest_negativa.analysis.project import first_settings, read_project
from pytest_negativa.cli.common import say_next
from pytest_negativa.errors import OptionError
from pytest_negativa.settings.file import find_config
from pytest_negativa.settings.options import CONFIG_NAME
from pytest_negativa.storage.atomic import write_atomically


@click.command()
def init() -> None:
    """Write a first negativa.yaml for the project here, and print its CI job.

    It looks at imports, requirements, the project's own libraries and the files of its CI. The job
    needs a runner with a GPU.

    Exit status: 0, or 2 if the project has settings already.
    """
    root = Path.cwd()
    if (found := find_config(root)) is not None:
        raise OptionError("the project has settings already", found, "edit this file")
    project = read_project(root)
    write_atomically(root / CONFIG_NAME, first_settings(project).encode())
    name = "gitlab" if project.on_gitlab else "github"
    job = (Path(__file__).parent / "jobs" / f"{name}.yaml").read_text("utf-8")
    job = job.replace("-r requirements.txt ", project.installed_by)
    file = ".gitlab-ci.yml" if project.on_gitlab else "a workflow in .github/workflows"
    click.echo(f"negativa: wrote {CONFIG_NAME}; the job below is for {file}", err=True)
    click.echo(job, nl=False)
    say_next("pytest --negativa")
