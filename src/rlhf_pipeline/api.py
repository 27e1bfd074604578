"""Run pipelines and use their results from Python, as `kedro run` and `kedro rlhf` do.

All functions take `params` (parameters to change, nested or with dotted names), `env` (environment
of the configuration) and `project` (a folder in the project), like the options of the commands.
Relative paths start at the project, where the process works until the function returns. Errors are
those of `rlhf_pipeline.errors`, whose message names the fix.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedro.utils import find_kedro_project

from rlhf_pipeline.config.evaluate import CHAMPION, JUDGE_MODEL
from rlhf_pipeline.errors import ArtifactError, ConfigError
from rlhf_pipeline.kedro_run.explain import explained_errors
from rlhf_pipeline.runtime.metrics_file import read_curves
from rlhf_pipeline.verdict.answers import ANSWERS, Answer, read_answers
from rlhf_pipeline.verdict.comparison import read_evaluation
from rlhf_pipeline.verdict.words import Evaluation

if TYPE_CHECKING:
    from kedro.framework.session import KedroSession
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rlhf_pipeline.kedro_run.artifacts import Ledger, Policy

Folder = str | Path
Params = Mapping[str, Any] | None


@dataclass(frozen=True)
class RunResults:
    """What a run published, and what that was made from: never a mixture of several runs."""

    version: str
    """The version of all that the run published."""
    artifacts: dict[str, Path]
    """The folder of each artifact by its stage, such as split, sft, reward_model, ppo, evaluate."""

    @property
    def evaluation(self) -> Evaluation:
        """The comparison with SFT. Raises ArtifactError if the run has none."""
        return Evaluation(read_evaluation(self._evaluated))

    @property
    def answers(self) -> dict[str, list[Answer]]:
        """The answers of each policy to the test prompts, the baseline first."""
        return read_answers(self._evaluated)

    def metrics(self, stage: str) -> list[dict[str, Any]]:
        """The training curves of a stage: {"step": 1, "metrics": {...}, ...}, in order."""
        return read_curves(self.artifacts[stage])

    @property
    def _evaluated(self) -> Path:
        for folder in self.artifacts.values():
            if (folder / ANSWERS).is_file():
                return folder
        raise ArtifactError(
            f"run {self.version}: found no evaluation, expected one. Fix: run the pipeline full"
        )


def run(
    pipeline: str | Iterable[str] = (),
    *,
    params: Params = None,
    env: str | None = None,
    project: Folder = ".",
    **options: Any,
) -> RunResults:
    """Run a pipeline, or several together; without a name `full`. Finished stages are reused.

    It is a `kedro run` with its checks, cache, progress, tracking and printed results. `options`
    are those of `KedroSession.run`, such as `from_nodes` and `to_nodes`. Raises ConfigError for
    wrong parameters or names, and StageError if a stage fails; the same call then resumes.
    """
    names = [pipeline] if isinstance(pipeline, str) else [*pipeline]
    with _opened(project, env, params) as (session, ledger):
        from rlhf_pipeline.commands.command import check_names

        check_names(names, options)
        session.run(pipeline_names=names, **options)
        version = str(session.session_id)
        published = [path for data in ledger.datasets.values() for path in data.versions()]
        own = [path for path in published if path.parent.name == version]
        return _results(ledger, version, [p for p in own if (p / ANSWERS).is_file()] or own)


def runs(
    *, params: Params = None, env: str | None = None, project: Folder = "."
) -> list[RunResults]:
    """All runs with a published evaluation, the newest one last."""
    with _opened(project, env, params) as (_, ledger):
        return [_results(ledger, each.parent.name, [each]) for each in ledger.evaluations]


def policy(
    name: Folder = CHAMPION, *, params: Params = None, env: str | None = None, project: Folder = "."
) -> "Policy":
    """A version or an alias of the registered model, or the folder of an artifact.

    Raises ArtifactError if there is none.
    """
    with _opened(project, env, params) as (_, ledger):
        return ledger.policy(str(name))


def load_policy(
    name: Folder = CHAMPION, *, params: Params = None, env: str | None = None, project: Folder = "."
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Model and tokenizer of a verified policy, ready for `generate`; `name` as in `policy`.

    The model is on the GPU if there is one, in the precision that it was saved in. Raises
    ArtifactError for another artifact, or if one of its files was changed.
    """
    with _opened(project, env, params) as (_, ledger):
        folder = ledger.language_model(str(name)).resolve()
    from rlhf_pipeline.models.loading import load_finished

    return load_finished(folder)


@contextmanager
def _opened(
    project: Folder, env: str | None, params: Params
) -> Iterator["tuple[KedroSession, Ledger]"]:
    """A session of the project and its artifacts, in its folder."""
    folder = Path(project).resolve()
    if (found := find_kedro_project(folder)) is None:
        raise ConfigError(
            f"project: found no project in {folder} or above it. Fix: pass the folder of yours"
        )
    given = {"env": env, "conf_source": None, "runtime_params": params or {}}
    with chdir(found), explained_errors(show_traceback=False):
        # Kedro reads the project's logging where it is first imported.
        from kedro.framework.startup import bootstrap_project

        from rlhf_pipeline.commands.command import opened

        bootstrap_project(found)
        with opened(found, given, {}) as both:
            yield both


def _results(ledger: "Ledger", version: str, published: Iterable[Path]) -> RunResults:
    lineage = [each for folder in published for each in ledger.ancestors(folder)]
    several = ("source", "tasks", JUDGE_MODEL)  # for several files, policies and folds
    lineage.reverse()  # of several rounds, the last comes first
    return RunResults(version, {m.stage: path for path, m in lineage if m.stage not in several})
