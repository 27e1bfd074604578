"""A pipeline of the project in miniature: the same models, data and machines, and a few steps.

`kedro rlhf prove` and `kedro rlhf plan --measure` run it, in a folder of its own.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from kedro.framework.project import pipelines
from rich.markup import escape
from rich.status import Status

from rlhf_pipeline.commands.command import opened
from rlhf_pipeline.config.block import leaves
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.sample import SampledConfig
from rlhf_pipeline.errors import ConfigError, StageError
from rlhf_pipeline.kedro_run.artifacts import Ledger
from rlhf_pipeline.pipelines.table import stage_specs
from rlhf_pipeline.stages.launch.resources import gpu_count, rank_count

PREPARED = ("source", "base_model", "split", "reward_base", "critic_base", "teacher")
"""Stages that train nothing: the miniature uses the results of the project."""
FOLDERS = (".measure", ".prove")
"""Where miniatures run, beside the workspace; a failed one leaves its folder."""
LONGEST_TAIL = 16_000
"""Bytes of a log that a message shows."""


class Miniature:
    """Short runs of a pipeline in an empty folder beside the workspace."""

    def __init__(
        self, ledger: Ledger, configuration: Mapping[str, Any], project: Path, pipeline: str,
        name: str, status: Status, finished: Collection[str] = (),
    ) -> None:  # fmt: skip
        """It uses the results of the trainings that are `finished`, and does not shorten them."""
        self._ledger, self._project, self._configuration = ledger, project, configuration
        self.pipeline, self._status, specs = pipeline, status, stage_specs()
        load, self.nodes = ledger.catalog.load, [node.name for node in pipelines[pipeline].nodes]
        trained = [n for n in self.nodes if n in specs and ".training." in specs[n].program]
        blocks = {n: load(f"params:{n}") for n in trained}
        self.blocks = {n: each for n, each in blocks.items() if each is not None}
        rows = {n for n, each in self.blocks.items() if not isinstance(each, SampledConfig)}
        whole = [each for each in self.blocks if each in rows and each in finished]
        self.stages = [each for each in self.blocks if each not in whole]
        self.ranks = rank_count(load("params:launch"), gpu_count())
        if "split" not in self.nodes or not self.blocks:
            raise ConfigError(
                f"--pipeline: found {pipeline}, expected one that prepares data and trains. Fix: "
                "choose full"
            )
        self.root = ledger.workspace.parent / name
        self.workspace, self.log = self.root / ledger.workspace.name, self.root / "run.log"
        shutil.rmtree(self.root, ignore_errors=True)
        self.workspace.mkdir(parents=True)
        for each in (*PREPARED, *whole, ".locks"):
            (ledger.workspace / each).mkdir(parents=True, exist_ok=True)
            (self.workspace / each).symlink_to(ledger.workspace / each)

    def prepare(self) -> None:
        """Prepare models and data in the project."""
        with opened(self._project, self._configuration, {}) as (session, _):
            session.run(pipeline_names=[self.pipeline], to_nodes=["split"])

    def load(self, name: str) -> Any:
        """A data set of the project, such as `params:evaluate`."""
        return self._ledger.catalog.load(name)

    @property
    def files(self) -> Mapping[str, Any]:
        """What the split reports of each of its files."""
        report = self._ledger.datasets["split"].versions()[-1] / "report.json"
        found: Mapping[str, Any] = json.loads(report.read_text(encoding="utf-8"))["files"]
        return found

    def start(self, params: Mapping[str, Any], *options: str) -> "subprocess.Popen[bytes]":
        """Start a `kedro run` with parameters and options; it reuses what is finished."""
        given = dict(leaves(self._configuration["runtime_params"])) | {"root": str(self.root)}
        given |= {"store": None, "force": None, **params}  # nothing of another place counts
        words = [f"{name}={json.dumps(value)}" for name, value in given.items()]
        command = [sys.executable, "-P", sys.argv[0], "run", f"--params={','.join(words)}"]
        command += [f"--pipelines={self.pipeline}", *options]
        for option in ("env", "conf_source"):
            if value := self._configuration[option]:
                command.append(f"--{option.replace('_', '-')}={value}")
        place = f"sqlite:///{self.root}/mlflow.db"
        environment = os.environ | {"MLFLOW_TRACKING_URI": place, "MLFLOW_REGISTRY_URI": place}
        with self.log.open("ab") as log:
            return subprocess.Popen(
                command, cwd=self._project, env=environment, stdout=log, stderr=log
            )

    def finish(self, run: "subprocess.Popen[bytes]", what: str) -> None:
        """Wait for the end of a run, and show its last line. Raises StageError if it fails."""
        while (code := run.poll()) is None:
            time.sleep(0.2)
            line = f"{what}: {''.join(self._tail(1))}"
            self._status.update(escape(line[: self._status.console.width - 4]))
        if code != 0:
            tail = "\n".join(["", *self._tail(30)])
            raise StageError(f"{what} failed. Fix: correct what {self.log} ends with:{tail}")

    def _tail(self, lines: int) -> list[str]:
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - LONGEST_TAIL))
            text = log.read().decode(errors="replace")
        return text.strip().splitlines()[-lines:]

    def short(self, stage: str, steps: int, saved_every: int) -> Iterator[tuple[str, Any]]:
        """The parameters with which a stage takes a few steps."""
        block = self.blocks[stage]
        yield f"{stage}.checkpoint_every", saved_every
        yield f"{stage}.log_every", 1
        if isinstance(block, PPOConfig):
            yield f"{stage}.steps", steps
            yield f"{stage}.critic_warmup_steps", min(block.critic_warmup_steps, 1)
        elif isinstance(block, SampledConfig):
            yield f"{stage}.sample.prompts", steps * vars(block)["batch_size"]
            yield from ((f"{stage}.rounds", 1), (f"{stage}.epochs", 1))
            if "sft" in self.stages:  # whose policy hardly has good answers yet, and ends none
                yield f"{stage}.sample.cut_answers", "keep"
                yield f"{stage}.sample.min_score", None
        else:
            yield f"{stage}.epochs", (steps + 0.5) / self.rows(stage) * block.batch_size
        if stage == "reward_model":
            yield "reward_model.gate", None  # after a few steps none is better than chance

    def rows(self, stage: str) -> int:
        """The rows that a training on prepared rows reads in an epoch."""
        phases = "sft", "reward_model", "kto"
        of = {name: self.files[f"{name}/train.arrow"]["rows"] for name in phases}
        of |= {"dpo": of["reward_model"], "kto": 2 * of["reward_model"] + of["kto"]}
        if stage not in of:
            raise ConfigError(
                f"--pipeline: found policy {stage} of another package, expected one of "
                f"{', '.join(of)} or one that samples answers. Fix: choose their pipeline"
            )
        return int(of[stage])

    def folder(self, stage: str) -> Path:
        """The work directory of the only finished run of a stage."""
        (manifest,) = (self.workspace / stage).glob("*/export/manifest.json")
        return manifest.parents[1]
