"""The ledger of artifacts: finds them by a version, an alias, a folder or their content."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kedro.framework.project import pipelines
from kedro.io import CatalogProtocol
from rich.console import Console

from rlhf_pipeline.config.base_model import BaseModelConfig
from rlhf_pipeline.config.block import leaves
from rlhf_pipeline.datasets.artifact import ArtifactDataset
from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.kedro_run.faults import path_faults, refuse
from rlhf_pipeline.pipelines.preparation import base_model
from rlhf_pipeline.pipelines.table import kinds_of_results
from rlhf_pipeline.runtime.job import title
from rlhf_pipeline.runtime.manifest import NAME, Manifest, artifact_of, content_digest, verify
from rlhf_pipeline.stages.cache.workspace import DOWNLOADS
from rlhf_pipeline.stages.job import StageListener, Stages
from rlhf_pipeline.tracking.store import registered_folder
from rlhf_pipeline.verdict.comparison import BASE_MODEL, EVALUATION, read_evaluation


@dataclass(frozen=True)
class Policy:
    """A policy, what it was made from, and its evaluations."""

    name: str
    """The version, alias or path that the user gave."""
    stage: str
    """The stage that trained the policy."""
    made_from: dict[str, Manifest]
    """The manifests of the policy and of all artifacts that it was made from, by stage."""
    evaluations: tuple[tuple[Path, str], ...]
    """The evaluations of the policy, newest first, and its name in each."""
    folder: Path | None = None

    @cached_property
    def metrics(self) -> dict[str, float]:
        """The metrics of the policy in its newest evaluation."""
        if not self.evaluations:
            return {}
        folder, name = self.evaluations[0]
        return dict(read_evaluation(folder, earlier=True)["policies"][name])

    def parameters(self) -> dict[str, Any]:
        """The parameters and the seeds of all stages, by their dotted names."""
        found = {}
        for stage, manifest in self.made_from.items():
            found[f"{stage}: seed"] = manifest.seed
            prefix = f"{stage}: " if manifest.stage != stage else ""
            found |= dict(leaves(manifest.config, prefix))
        return found


@dataclass(frozen=True)
class Ledger:
    """All artifacts of a project: in its registry, its data sets and its workspace."""

    catalog: CatalogProtocol
    project: Path
    listeners: tuple[StageListener, ...] = ()
    """They follow the stages that import a model."""

    @cached_property
    def workspace(self) -> Path:
        return Path(self.catalog.load("workspace")).absolute()

    @cached_property
    def model(self) -> str:
        """The name of the registered model."""
        return str(self.catalog.load("params:register").model)

    @cached_property
    def datasets(self) -> dict[str, ArtifactDataset]:
        """The data sets that publish artifacts, by name."""
        names = {name for pipeline in pipelines.values() for name in pipeline.all_outputs()}
        found = {name: self.catalog.get(name) for name in sorted(names)}
        return {n: data for n, data in found.items() if isinstance(data, ArtifactDataset)}

    @cached_property
    def artifacts(self) -> list[Path]:
        """The finished artifacts of the workspace, then the published versions."""
        finished = sorted(path.parent for path in self.workspace.glob(f"*/*/export/{NAME}"))
        return finished + [path for data in self.datasets.values() for path in data.versions()]

    @cached_property
    def by_digest(self) -> dict[str, Path]:
        """The artifacts, and the folders in them, by the digest of their content."""
        known: dict[str, Path] = {}
        for artifact in self.artifacts:
            for folder in (artifact, *(path for path in artifact.iterdir() if path.is_dir())):
                with suppress(ArtifactError):  # another artifact, which nobody may ask for
                    known[content_digest(folder)] = folder
        return known

    @cached_property
    def evaluations(self) -> list[Path]:
        """The published evaluations, oldest first."""
        kinds = kinds_of_results()
        found = [data for name, data in self.datasets.items() if kinds.get(name) == "evaluation"]
        versions = [path for data in found for path in data.versions()]
        return sorted(versions, key=lambda folder: folder.parent.name)

    @contextmanager
    def stages(self) -> Iterator[Stages]:
        """Runs stages as `kedro run` does; the end waits for the uploads to a store."""
        from rlhf_pipeline.kedro_run.hooks import run_context
        from rlhf_pipeline.stages.progress import ProgressDisplay
        from rlhf_pipeline.stages.run import StageRunner

        context = run_context(self.catalog, ProgressDisplay(Console(stderr=True)), *self.listeners)
        yield StageRunner(context)
        context.stored.close()

    def folder(self, name: str) -> Path:
        """The artifact that a version, an alias or a path names.

        A model that no stage made is imported by the stage `base_model`: a folder of transformers,
        or a name with one slash, an id on the hub. Raises ArtifactError if there is
        none, and StageError if MLflow's store fails.
        """
        path = Path(name)
        if (path / NAME).is_file():
            return path
        if path.exists() or name.count("/") == 1:
            refuse(path_faults("model", name))
            given = self.catalog.load("params:base_model")
            config = BaseModelConfig(path=name, trust_remote_code=given.trust_remote_code)
            sources, seed = (self.catalog.load(f"params:{each}") for each in ("split", "seed"))
            with self.stages() as stages:
                return base_model(config, sources, seed, stages)
        return registered_folder(name, self.model, self.project, self.workspace / DOWNLOADS)

    def language_model(self, name: str) -> Path:
        """The verified folder of a policy that can answer.

        Raises ArtifactError for another artifact, or if a file of the policy was changed.
        """
        folder = self.folder(name)
        config = folder / "config.json"
        if not config.is_file() or "ForSequenceClassification" in config.read_text("utf-8"):
            raise ArtifactError(
                f"{folder}: found an artifact of stage {Manifest.read(folder).stage}, expected a "
                "language model. Fix: name the model of stage sft, or of a policy such as ppo"
            )
        verify(folder)
        return folder

    def ancestors(self, folder: Path) -> Iterator[tuple[Path, Manifest]]:
        """An artifact, and all artifacts that it was made from and that are here, once each."""
        waiting, seen = [folder], set()
        while waiting:
            artifact = artifact_of(found := waiting.pop()) or found
            manifest = Manifest.read(artifact)
            if manifest.fingerprint not in seen:
                seen.add(manifest.fingerprint)
                yield artifact, manifest
                inputs = manifest.inputs.values()
                waiting += [self.by_digest[digest] for digest in inputs if digest in self.by_digest]

    def policy(self, name: str) -> Policy:
        """The policy with a name: its lineage and its evaluations."""
        folder = self.folder(name)
        (_, policy), *others = self.ancestors(folder)
        made_from = {policy.stage: policy} | {title(m.stage, m.config): m for _, m in others}
        digest, found = content_digest(folder), []
        for path in (each for each in self.artifacts if (each / EVALUATION).is_file()):
            for source, content in Manifest.read(path).inputs.items():
                if content == digest and source.endswith("_model") and source != "reward_model":
                    own = source.removesuffix("_model")
                    if own not in read_evaluation(path, earlier=True)["policies"]:
                        own = BASE_MODEL
                    found.append((path, own))
        found.sort(key=lambda each: (each[0] / NAME).stat().st_mtime_ns, reverse=True)
        return Policy(name, policy.stage, made_from, tuple(found), folder)

    def evaluation(self, name: str | None) -> Path:
        """The evaluation with a version, in a folder, or of a policy; without a name the newest.

        Raises ArtifactError if there is none.
        """
        chosen = [folder for folder in self.evaluations if name in (None, folder.parent.name)]
        if chosen:
            return chosen[-1]
        if name is None:
            raise ArtifactError("found no published evaluation. Fix: `kedro run --pipeline=full`")
        folder = self.folder(name)
        if (folder / EVALUATION).is_file():
            return folder
        of_policy = [evaluation for evaluation, _ in self.policy(name).evaluations]
        if not of_policy:
            raise ArtifactError(
                f"{name}: found no evaluation of it here, expected one. Fix: choose one that "
                "`kedro rlhf runs` lists"
            )
        published = [each for each in self.evaluations if each in of_policy]
        return [of_policy[0], *published][-1]

    def beside(self, evaluation: Path, kind: str) -> Path | None:
        """Where the run that published an evaluation publishes its page or its registration."""
        if evaluation not in [folder.resolve() for folder in self.evaluations]:
            return None
        prefix = evaluation.name.removesuffix("evaluation")
        name = {"page": f"{evaluation.name}_page", "registration": f"{prefix}registration"}[kind]
        dataset = self.catalog.get(name)
        versions = getattr(dataset, "folder", None) or Path(str(dataset._filepath))
        return versions / evaluation.parent.name / versions.name
