"""The results of one complete run, for notebooks: never a mixture of several runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.runtime.manifest import Manifest, artifact_of
from rlhf_pipeline.runtime.metrics_file import read_json_lines


@dataclass(frozen=True)
class RunResults:
    """One evaluation, and the models that it compared."""

    folder: Path
    """The published evaluation."""
    evaluation: dict[str, Any]
    """Its `evaluation.json`, see `rlhf_pipeline.evaluation.report`."""
    models: dict[str, Path]
    """Folder of each model by the name of its stage: sft, reward_model, and ppo or dpo."""
    workspace: Path

    @classmethod
    def load(cls, root: Path, version: str | None = None) -> RunResults:
        """Load a run of the folder `root`, such as data/: the given version or the newest one.

        Raises:
            ArtifactError: no run is complete, or a result was removed.
        """
        found = sorted(
            path.parent
            for path in (root / "08_reporting").glob("*evaluation/*/*evaluation/evaluation.json")
            if version in (None, path.parents[1].name)
        )
        if not found:
            raise ArtifactError(
                f"{root}: found no complete run{f' {version}' if version else ''}. "
                "Fix: `kedro run --pipeline=full`, or the root of another environment, such as "
                "data/tiny"
            )
        folder = max(found, key=lambda path: path.parent.name)
        job = _work(folder, root) / "job.json"
        inputs = json.loads(job.read_text())["inputs"].values()
        artifacts = (artifact_of(Path(path)) for path in inputs)
        made = {Manifest.read(path).stage: path for path in artifacts if path is not None}
        return cls(
            folder,
            json.loads((folder / "evaluation.json").read_text()),
            {stage: path for stage, path in made.items() if stage != "split"},
            root / "07_workspace",
        )

    @property
    def candidate(self) -> str:
        """The policy that is compared with SFT: "ppo" or "dpo"."""
        return str(self.evaluation["candidate"])

    def metrics(self, stage: str) -> list[dict[str, Any]]:
        """The records of a stage's `metrics.jsonl`: {"step", "metrics", ...}, in order."""
        return read_json_lines(_work(self.models[stage], self.workspace.parent) / "metrics.jsonl")


def _work(artifact: Path, root: Path) -> Path:
    """The work directory of the stage that made an artifact."""
    manifest = Manifest.read(artifact)
    found = sorted(
        (root / "07_workspace" / manifest.stage).glob(f"{manifest.fingerprint[:16]}*/job.json")
    )
    if not found:
        raise ArtifactError(
            f"{artifact}: its work directory was removed. Fix: run stage {manifest.stage} again"
        )
    return found[-1].parent
