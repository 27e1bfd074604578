"""Errors shown to the user: what is wrong, the value found, and the fix, without a traceback."""

import click


class PipelineError(click.ClickException):
    """Base of all errors that are explained to the user.

    Kedro's command line prints the message of a `ClickException` without a traceback.
    """


class ConfigError(PipelineError):
    """An invalid parameter, or an invalid combination of parameters."""


class DataError(PipelineError):
    """A source, file or row that cannot be read as training data."""


class ArtifactError(PipelineError):
    """An artifact or model that is incomplete, was changed, or does not fit the others."""


class ForeignFileError(ArtifactError):
    """A file was added to an artifact; the files of the artifact are intact."""


class StageError(PipelineError):
    """A stage ended without a finished result.

    `cause` is the name of a known failure, see `rlhf_pipeline.stages.launch.hints`; None: unknown.
    """

    def __init__(self, message: str, cause: str | None = None) -> None:
        super().__init__(message)
        self.cause = cause


class Interrupted(PipelineError):  # noqa: N818 - not an error
    """The user or the scheduler ended the stage by a signal."""
