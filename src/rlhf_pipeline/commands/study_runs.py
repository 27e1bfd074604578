"""The runs of a study: recipes and their budget, their evaluations, and those of the baselines."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any, Literal, NamedTuple

import yaml
from kedro.framework.project import pipelines
from kedro.framework.session import KedroSession
from pydantic import Field

from rlhf_pipeline.commands.command import opened
from rlhf_pipeline.commands.status import planned_rows
from rlhf_pipeline.config.block import Block, leaves, validated
from rlhf_pipeline.config.ppo import PPOConfig
from rlhf_pipeline.config.sample import SampledConfig
from rlhf_pipeline.errors import ConfigError, suggestion
from rlhf_pipeline.kedro_run.artifacts import Ledger
from rlhf_pipeline.kedro_run.faults import refuse
from rlhf_pipeline.pipelines.evaluate import UNTOUCHED, evaluate
from rlhf_pipeline.pipelines.table import RUN, pipeline_of, policy_stages
from rlhf_pipeline.runtime.job import as_json
from rlhf_pipeline.runtime.manifest import NAME
from rlhf_pipeline.runtime.metrics_file import read_curves, read_json_lines
from rlhf_pipeline.stages.job import node_of

Vary = Literal["training", "everything"]
Unit = Literal["answers", "steps", "seconds"]
COMMON = ("base_model", "split", "sft", "reward_model", "evaluate")
"""Blocks of what all recipes of a study share: data, baseline and judges."""
TEMPERATURES = (0.7, 0.4, 0.0)
"""Lower temperatures at which the baseline answers, too."""


class RecipeConfig(Block):
    """A recipe in a file."""

    pipeline: str
    params: Mapping[str, Any] = Field(default={})


class Recipe(NamedTuple):
    """A pipeline and the parameters that differ from the project's."""

    name: str
    pipeline: str
    policy: str
    params: Mapping[str, Any]


Evaluations = dict[str, dict[int, Path]]
"""The evaluation of each recipe with each seed."""


class Cost(NamedTuple):
    """What the training of a policy took."""

    steps: int
    seconds: float
    """Of all steps, and of sampling for them; without starts and stops."""
    answers: int
    """Answers that the policy sampled to train on."""


def recipes_of(named: str, file: Path | None) -> list[Recipe]:
    """The recipes of the options `--pipelines` and `--recipes`. Raises ConfigError for a wrong one.

    A file of recipes maps a name to a pipeline and parameters:

        more-kl: {pipeline: grpo, params: {grpo.kl.coef: 0.1}}
    """
    given: dict[str, Any] = {each: {"pipeline": each} for each in filter(None, named.split(","))}
    if file is not None:
        try:
            given |= yaml.safe_load(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
            expected = "a mapping such as {more-kl: {pipeline: grpo, params: {grpo.kl.coef: 0.1}}}"
            raise ConfigError(f"--recipes: found {error}, expected {expected}") from None
    policies = {pipeline_of(policy): policy for policy in policy_stages()}
    found, faults = list[Recipe](), list[str]()
    for name, fields in given.items():
        config, wrong = validated(str(name), RecipeConfig, fields)
        faults += wrong
        if config is None:
            continue
        if own := {"seed", "policy_seed", "force", "inputs"} & config.params.keys():
            faults.append(f"{name}.params: found {', '.join(sorted(own))}, which the study sets")
        if config.pipeline not in policies:
            meant, listed = suggestion(config.pipeline, policies), ", ".join(policies)
            faults.append(f"{name}: found pipeline {config.pipeline!r}{meant}, expected {listed}")
            continue
        params = dict(leaves(config.params))
        found.append(Recipe(str(name), config.pipeline, policies[config.pipeline], params))
    if not given:
        faults.append("--pipelines: found none, expected some such as full,dpo,grpo")
    refuse(faults)
    return found


def cost(ledger: Ledger, recipe: Recipe, evaluation: Path) -> Cost:
    """What the training of a policy took, from the records of its stages."""
    steps, seconds, answers = 0, 0.0, 0
    for path, manifest in ledger.ancestors(evaluation):
        if manifest.stage == recipe.policy:
            curves, block = read_curves(path), manifest.config[recipe.policy]
            own = max((record["step"] for record in curves), default=0)
            times = [x for r in curves if (x := r["metrics"].get("time/step_s")) and r["step"] > 0]
            seconds += own * mean(times or [0.0])  # not every step has a line
            sampled = own * block.get("rollout_batch_size", 0) * block.get("rollout_batches", 0)
            again = [r["metrics"].get("rollout/resampled", 0.0) for r in curves if r["step"] > 0]
            answers += round(sampled * (1 + mean(again or [0.0])))
            steps += own
        elif (sampler := f"{recipe.policy}.sample") in manifest.config:
            launched = path.parent / "job.json"
            if launched.is_file():  # else it is a download, and nobody knows
                seconds += (path / NAME).stat().st_mtime - launched.stat().st_mtime
            lines = read_json_lines(path / "samples.jsonl")
            prompts = sum(line["part"] == "train" for line in lines)
            answers += prompts * manifest.config[sampler]["n"]
    return Cost(steps, seconds, answers)


@dataclass(frozen=True)
class Runs:
    """The runs of one study in a project."""

    project: Path
    configuration: Mapping[str, Any]
    """The options of the command that choose a configuration, for a session."""
    vary: Vary
    budget: tuple[Unit, float] | None = None
    pilots: dict[str, Cost] = field(default_factory=dict)
    """What recipes took with their own parameters and the first seed, by name."""

    def session(
        self, params: Mapping[str, Any]
    ) -> AbstractContextManager[tuple[KedroSession, Ledger]]:
        """A session with further parameters, and the ledger of its project."""
        return opened(self.project, self.configuration, params)

    def of_seed(self, recipe: Recipe, seed: int) -> dict[str, Any]:
        """The parameters of a run."""
        return {**recipe.params, **self.budgeted(recipe), **self.seeds(seed)}

    def seeds(self, seed: int) -> dict[str, Any]:
        """The parameters that a seed changes."""
        if self.vary == "training":
            return {"policy_seed": seed}
        return {"seed": seed, "policy_seed": None}

    def require_comparable(self, recipes: Sequence[Recipe]) -> None:
        """Raise ConfigError if recipes would be judged differently, or have wrong parameters."""
        judged = dict[str, Any]()
        for recipe in recipes:
            params = {**recipe.params, **self.seeds(1)}
            self.finished(recipe, params)
            with self.session(params) as (_, ledger):
                blocks = {name: ledger.catalog.load(f"params:{name}") for name in COMMON}
            if len(recipes) > 1 and blocks["evaluate"].rewards_judge(blocks["reward_model"]):
                raise ConfigError(
                    "evaluate.judges: found none and no reward model, so its own rewards would "
                    "judge each recipe, expected judges for all. Fix: set evaluate.judges"
                )
            judged = judged or as_json(blocks)
            for name, block in as_json(blocks).items():
                if block != judged[name]:
                    raise ConfigError(
                        f"{recipe.name}: found another block {name} than for {recipes[0].name}, "
                        f"expected an equal one. Fix: set it for all recipes by --params"
                    )

    def finished(self, recipe: Recipe, params: Mapping[str, Any]) -> Path | None:
        """The evaluation of a run if it is finished. Raises the errors of `kedro run` before its
        first stage."""
        with self.session({**params, "force": None}) as (_, ledger):
            node = node_of("evaluate", recipe.policy)
            planned_rows(pipelines[recipe.pipeline].to_nodes(node), ledger.catalog)
            *_, last = RUN["stages"].stages.values()
            return last.run.export if (last.run.stage, last.state) == (node, "finished") else None

    def run(self, recipe: Recipe, params: Mapping[str, Any]) -> tuple[Path, str | None]:
        """The evaluation of a run, and the version of the `kedro run` that made it, if one did.

        Raises StageError if a stage fails; the next call resumes.
        """
        if (finished := self.finished(recipe, params)) is not None:
            return finished, None
        with self.session(params) as (session, _):
            node = node_of("evaluate", recipe.policy)
            session.run(pipeline_names=[recipe.pipeline], to_nodes=[node])
            version = str(session.session_id)
        evaluation = self.finished(recipe, params)
        assert evaluation is not None, "it was made just now"
        return evaluation, version

    def budgeted(self, recipe: Recipe) -> dict[str, Any]:
        """The parameters with which a recipe gets the budget.

        A training in steps gets other steps, sampling for a training other prompts, and other
        trainings other epochs. Where nothing tells what the recipe takes with its own parameters,
        its first seed is run with them before.
        """
        if self.budget is None:
            return {}
        (unit, amount), policy = self.budget, recipe.policy
        with self.session(recipe.params) as (_, ledger):
            block = ledger.catalog.load(f"params:{policy}")
        if isinstance(block, PPOConfig) and unit != "seconds":
            each = block.responses_per_step if unit == "answers" else 1
            return {f"{policy}.steps": max(1, round(amount / each))}
        if not isinstance(block, PPOConfig | SampledConfig) and unit == "answers":
            return {}  # it samples none
        if isinstance(block, SampledConfig) and block.sample.prompts is None:
            raise ConfigError(
                f"{policy}.sample.prompts: found null, expected a number that --budget can scale. "
                f"Fix: --params={policy}.sample.prompts=1000"
            )
        if recipe.name not in self.pilots:
            evaluation, _ = self.run(recipe, {**recipe.params, **self.seeds(1)})
            with self.session({}) as (_, ledger):
                self.pilots[recipe.name] = cost(ledger, recipe, evaluation)
        factor = amount / max(getattr(self.pilots[recipe.name], unit), 1e-9)
        if isinstance(block, PPOConfig):
            return {f"{policy}.steps": max(1, round(block.steps * factor))}
        if not isinstance(block, SampledConfig):
            return {f"{policy}.epochs": block.epochs * factor}
        return {f"{policy}.sample.prompts": max(1, round((block.sample.prompts or 1) * factor))}

    def baselines(
        self, recipe: Recipe, seed: int, evaluation: Path, n: int | None
    ) -> dict[float, Path]:
        """Evaluations of the base model against the baseline of a run, by temperature.

        At the temperature of the project each policy gives one answer more than `n`. None: only
        this temperature, with the project's number of answers.
        """
        with self.session(self.of_seed(recipe, seed)) as (_, ledger), ledger.stages() as stages:
            found = {manifest.stage: path for path, manifest in ledger.ancestors(evaluation)}
            load = ledger.catalog.load
            own, config = load(f"params:{recipe.policy}"), load("params:evaluate")
            sft = found.get("sft", found["base_model"])
            models = found["split"], sft, found["base_model"], found.get("reward_model", sft)
            blocks = load("params:reward_model"), own, load("params:split")
            config = config.model_copy(update={"tasks": None, "best_of_n": 0})
            usual = config.sampling.temperature
            results = {}
            asked = (usual,) if n is None else dict.fromkeys((usual, *TEMPERATURES))
            for temperature in asked:
                own_draws = {} if n is None else {usual: n + 1, 0.0: 1}
                draws = own_draws.get(temperature, config.answers_per_prompt)
                sampling = config.sampling.model_copy(update={"temperature": temperature})
                own_config = config.model_copy(
                    update={"sampling": sampling, "answers_per_prompt": draws}
                )
                judged = *models, *blocks, own_config, load("params:seed"), stages
                results[temperature] = evaluate(UNTOUCHED)(*judged)
            return results
