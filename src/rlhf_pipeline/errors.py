"""The failures a user can meet. Each message names the place, the value and the fix; none needs a traceback."""

import click


class PipelineError(click.ClickException):
    """Base of every failure that the pipeline explains to its user.

    A `ClickException`, so that Kedro's command line prints the message alone, without a traceback.
    """


class ConfigError(PipelineError):
    """A parameter, or a combination of parameters, that cannot work."""


class DataError(PipelineError):
    """A source, a file or a row that cannot be read as training data."""


class ArtifactError(PipelineError):
    """A checkpoint or a prepared data set that is incomplete, altered, or does not fit the others."""


class ForeignFileError(ArtifactError):
    """A file lies in an artifact that its stage did not put there; all of the artifact's own are whole."""


class StageError(PipelineError):
    """A launched stage ended without a finished result.

    `cause` names the known failure behind it, see `rlhf_pipeline.stages.launch.hints`; None: not a known one.
    """

    def __init__(self, message: str, cause: str | None = None) -> None:
        super().__init__(message)
        self.cause = cause


class Interrupted(PipelineError):  # noqa: N818 - an interruption is no error
    """The user or the scheduler ended a stage by a signal."""
