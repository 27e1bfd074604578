"""The installed package without its repository: `rlhf-pipeline`, and `python -m rlhf_pipeline`.

The current folder is the project: results are written below it. Without a folder `conf/base` there,
the configuration is that of the package, with the layer `conf/local` of the current folder.
"""

import os
import sys
from pathlib import Path
from typing import Any

PACKAGE = "rlhf_pipeline"
CONF = Path(__file__).parent / "conf"
"""The configuration of the package: a link to conf/ in the repository, a folder in the wheel."""


def command_line() -> None:
    """`rlhf-pipeline ...`: the commands of `kedro`, such as `rlhf-pipeline run`, in any folder."""
    _configure()
    from kedro import __version__
    from kedro.framework.startup import ProjectMetadata

    from rlhf_pipeline.cli import cli

    here = Path.cwd()
    project = ProjectMetadata(
        config_file=here / "pyproject.toml",
        package_name=PACKAGE,
        project_name="rlhf-pipeline",
        project_path=here,
        source_dir=here,
        kedro_init_version=__version__,
        tools=[],
        example_pipeline="False",
    )
    cli(obj=project, prog_name="rlhf-pipeline")


def main(*args: Any, **kwargs: Any) -> Any:
    """`python -m rlhf_pipeline` with the options of `kedro run`, as in any packaged project."""
    _configure()
    from rlhf_pipeline.cli import run

    return run(*args, **{"prog_name": f"python -m {PACKAGE}"} | kwargs)


def _configure() -> None:
    has_conf = Path("conf", "base").is_dir()
    if not has_conf:  # Kedro reads the variable when it is imported
        os.environ.setdefault("KEDRO_LOGGING_CONFIG", str(CONF / "logging.yml"))
    from kedro.framework.project import configure_project, settings

    configure_project(PACKAGE)
    if not has_conf:
        settings.set("CONF_SOURCE", str(CONF))


if __name__ == "__main__":
    command_line() if sys.argv[1:2] in (["run"], ["rlhf"]) else main()
