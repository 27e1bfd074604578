"""Evaluation and registration, with the names and files of tasks."""

from collections.abc import Iterable, Iterator, Sequence
from glob import escape, glob
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
)

from rlhf_pipeline.config.block import Block, Precision, operational
from rlhf_pipeline.config.doors import GENERATOR
from rlhf_pipeline.config.episodes import EpisodesConfig
from rlhf_pipeline.config.rewards import JUDGE_MODEL, REWARD_MODEL, Judges
from rlhf_pipeline.config.split import BlendedSourceConfig, ColumnMap, DataPath
from rlhf_pipeline.config.training import (
    DeepSpeedConfig,
    FrozenDeepSpeedConfig,
    FrozenModel,
    FrozenModelConfig,
    SamplingConfig,
)

CHAMPION = "champion"
"""The registry's champion where it answers beside a candidate, and its alias."""
JUDGE_PREFIX = "judges."
"""Inputs of the evaluation: the source file of `evaluate.judges.0` is `judges.0`."""
TASK_PREFIX = "tasks."
"""Inputs of the stage `tasks`: the files of own tasks; of the evaluation: what each policy did."""
TASK_RESULTS = "tasks.json"
"""File of the stage `tasks` with what a policy achieved."""
SFT_MODEL = "sft_model"
"""Input of the evaluation: the baseline, which is the base model if `sft` is null."""
SFT_ROWS = "sft_rows"
"""Input of the evaluation: the rows of SFT, whose validation rows are held-out answers."""


class TasksConfig(Block):
    """Tasks of the lm-evaluation-harness (the extra `tasks`) in the chat template of the policy."""

    names: tuple[str, ...] = Field(min_length=1)
    """Tasks, groups and tags of the harness, or files of your own tasks (FILE.yaml)."""
    limit: PositiveInt | None = None
    """Number of first documents of each task to evaluate. None: all documents."""
    few_shot: NonNegativeInt | None = None
    """Solved examples before each question. None: as many as the task says."""
    batch_size_per_gpu: PositiveInt = 8
    """Documents per forward pass."""

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name.endswith((".yaml", ".yml")))


class EvaluationSamplingConfig(SamplingConfig):
    """How responses are sampled to compare policies."""

    temperature: NonNegativeFloat = 1.0
    """Softmax temperature in sampling and in every log-probability. 0: the most likely token, with
    the log-probabilities of temperature 1."""


class AnsweringConfig(EpisodesConfig):
    """How policies answer and are scored, one model at a time."""

    micro_batch_tokens: PositiveInt = 16384
    """Largest number of tokens in a forward pass that scores, on each rank."""
    precision: Precision | None = None
    """Precision of all models. None: that in which each model was saved; fp32 for one in fp16."""
    zero_stage: Literal[0, 3] | None = None
    """0: a whole copy of the model, one at a time, on every rank; 3: sharded over the ranks. None:
    3 for a model that was trained at stage 3, else 0."""
    generator: Annotated[str, GENERATOR] = "transformers"
    """Program that samples the answers of all policies, as in `ppo.generator`."""
    gather_for_generation: bool = operational(True)
    """As in `ppo.gather_for_generation`."""


class JudgeModelConfig(Block):
    """A second reward model, which judges, and which no policy is trained on. It is trained like
    `reward_model`, from the SFT model. Set `held_back` or `path`."""

    held_back: float | None = Field(default=None, gt=0, lt=1)
    """Share of the reward model's conversations that train this model instead; no policy reads them
    either. It shares the mistakes of those who made the comparisons."""
    path: DataPath | None = None
    """A file of comparisons, such as some hundreds that you have made with care."""
    columns: ColumnMap | None = None
    """The columns of the file, as in `split.sources`."""
    epochs: PositiveFloat | None = None
    """Passes over the comparisons. None: `reward_model.epochs`, or 10 for a file."""

    def _faults(self) -> Iterator[str]:
        if (self.held_back is None) == (self.path is None):
            yield self._fault("path", "one of held_back and path", "set one of them")

    @property
    def source(self) -> BlendedSourceConfig:
        """The file as a source of comparisons for the reward model alone."""
        file = BlendedSourceConfig(name="files", path=self.path, columns=self.columns)
        return file.model_copy(update={"phases": ("reward_model",)})


class FoldConfig(Block):
    """The comparisons that one of several reward models does not train on, and is measured on. The
    pipeline sets this block."""

    number: NonNegativeInt
    """Number of the fold, from 0."""
    of: PositiveInt
    """Number of folds. The prompt of a comparison decides to which one it belongs."""


def own_models(inputs: Iterable[str]) -> dict[str, list[str]]:
    """The judges that are reward models of the pipeline, with the inputs that are their models."""
    found = {
        REWARD_MODEL: [name for name in inputs if name == "reward_model"],
        JUDGE_MODEL: [name for name in inputs if name.startswith(f"{JUDGE_MODEL}.")],
    }
    return {judge: places for judge, places in found.items() if places}


class EvaluateConfig(AnsweringConfig):
    """Both policies answer the same held-out prompts with equal decoding."""

    prompts: int = Field(default=512, ge=2)
    """Largest number of held-out prompts; the win rate's interval narrows with its square root, to
    a half width of 0.04 with 512 prompts."""
    answers_per_prompt: PositiveInt = 1
    """Answers of each policy to each prompt, which narrow intervals less than further prompts."""
    sampling: EvaluationSamplingConfig = EvaluationSamplingConfig()
    judges: Judges = ()
    """Judges beside the reward model and the gold score, in the forms of `config.rewards`; without
    any and with `reward_model: null`, the rewards of training judge. The first independent one
    decides about a promotion, unless the gold score does; without one, `judge_model`."""
    judge_model: JudgeModelConfig | None = None
    """A second reward model as a judge, such as {held_back: 0.25} or {path: careful.jsonl}. None:
    no such judge."""
    best_of_n: int = Field(default=0, ge=0)
    """A power of two: also report the best of 1, 2, 4, ... up to so many answers of SFT by the
    reward model, or without it by the first judge, as a bound for PPO. 0: no such report."""
    tasks: TasksConfig | None = None
    """Benchmark tasks that each policy also solves. None: no tasks."""

    def with_episodes_of(self, policy: Any) -> Self:
        """The block with tools and environment of a policy, if it has none of its own."""
        if self.has_turns or not hasattr(policy, "episodes"):
            return self
        return self.model_copy(update=dict(policy.episodes))

    def rewards_judge(self, trained: Block | None) -> bool:
        """Whether the rewards of a training judge its answers: without a `trained` reward model and
        without `judges`."""
        return trained is None and not self.judges

    def models(self, trained: Sequence[DeepSpeedConfig]) -> list[FrozenModel]:
        """The models that the stage loads one after the other, as they were `trained`."""
        own = FrozenModelConfig(
            deepspeed=FrozenDeepSpeedConfig(zero_stage=self.zero_stage, precision=self.precision)
        )
        return [FrozenModel("evaluate", own.beside(companion)) for companion in trained]

    @property
    def baseline_draws(self) -> int:
        """Answers of the baseline to each prompt; the second is independent of the candidate's."""
        return 1 if self.sampling.temperature == 0 else max(2, self.answers_per_prompt)

    def _faults(self) -> Iterator[str]:
        if self.sampling.temperature == 0 and (self.answers_per_prompt > 1 or self.best_of_n):
            yield (
                f"found answers_per_prompt {self.answers_per_prompt} and best_of_n "
                f"{self.best_of_n}, expected 1 and 0 with sampling.temperature 0, which gives the "
                "same answer every time. Fix: set them so, or raise the temperature"
            )

    @field_validator("best_of_n")
    @classmethod
    def _check_power(cls, value: int) -> int:
        if value and (value == 1 or value & (value - 1)):
            raise ValueError(f"found {value}, expected 0, 2, 4, 8 or another power of two")
        return value


class CandidateConfig(Block):
    """The policy compared with the baseline. The pipeline sets this block, not the user."""

    name: str
    """Stage that trained the policy, such as "ppo"; of several `models`, the second."""
    models: tuple[str, ...] = ()
    """Names of the models of `kedro rlhf evaluate`, the baseline first, with the inputs
    `<name>_model` and `<name>_prompts`. Empty: those of a pipeline."""


Promote = Literal["never", "gate", "always"]


class RegisterConfig(Block):
    """Name of the registered model, and the promotion gate, see `rlhf_pipeline.verdict.gate`."""

    model: str = Field(default="rlhf-policy", min_length=1, pattern=r"^[^/:']+$")
    """Name of the registered model, whose versions are the SFT baseline and the candidates. MLflow
    allows neither slash nor colon, and its filters no apostrophe."""
    promote: Promote = "gate"
    """When the candidate becomes the champion; gate: if it beats it and passes all checks below."""
    min_win_rate_lower: float = Field(default=0.5, ge=0, lt=1)
    """The lower end of the 95% interval on the paired win rate against SFT, and on the one against
    the champion, must be above this value; 0.5 is chance."""
    min_gain: float = Field(default=0.1, ge=0)
    """Smallest lower end of the gain over SFT (95% interval), in units of the scores' spread."""
    min_length_controlled_lower: float = Field(default=0.5, ge=0, lt=1)
    """The lower end of the 95% interval on the win rate at equal length must be above this value,
    against SFT and against the champion: a longer answer is not a better one. 0: no check."""
    min_accuracy_over_length: float | None = Field(default=0.0, ge=0, le=1)
    """A reward model that decides, or that training has optimized, must know more than length: the
    lower end of the 95% interval on its held-out accuracy, minus that of preferring the longer
    answer, must be above this value. None: no check. That of a careful file has too few."""
    require_independent_judge: bool = True
    """Whether only an independent judge promotes: one of which it is known that no training of the
    candidate, of its baseline, or of a model that they were made from has optimized it."""
    max_kl: float = Field(default=10.0, gt=0)
    """Largest KL from SFT in nats per response, beyond which policies exploit the reward model. No
    condition if the KL is unknown: at `evaluate.sampling.temperature: 0`, or with other tokens."""
    max_length_ratio: float = Field(default=3.0, ge=1)
    """Answers may be this many times longer or shorter than SFT's, on average."""
    max_eos_drop: float = Field(default=0.1, ge=0, le=1)
    """Largest allowed fall of the share of answers that end by themselves."""
    max_repetition_rise: float = Field(default=0.1, ge=0, le=1)
    """Largest allowed rise of the share of word triples that repeat within an answer."""
    max_task_drop: float = Field(default=0.05, ge=0, le=1)
    """Largest allowed fall of the share of right documents of a task (`evaluate.tasks`), and of
    right answers to prompts with a true answer."""
    min_score_spread: PositiveFloat = 0.1
    """Smallest allowed standard deviation of the candidate's scores, relative to SFT's scores."""


def task_faults(config: TasksConfig) -> Iterator[str]:
    """Files of tasks that cannot be read; `dry_run` asks the harness about names."""
    try:
        task_inputs(config)
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        yield f"evaluate.tasks.names: found {error}, expected files of YAML. Fix: correct the file"


def task_inputs(config: TasksConfig) -> dict[str, Path]:
    """Inputs of the tasks: the files among them, and all files that they name."""
    found = [Path(name).expanduser() for name in config.files]
    for file in found:
        if file.name.endswith(("yaml", "yml")):
            with file.open(encoding="utf-8") as stream:
                events = [*yaml.parse(stream, yaml.SafeLoader)]
            for text in [event.value for event in events if isinstance(event, yaml.ScalarEvent)]:
                module = escape(text.rpartition(".")[0].replace(".", "/") + ".py")
                for folder, name in product((file.parent, Path()), (text, module)):
                    # Path.glob refuses absolute names.
                    named = sorted(glob(name, root_dir=folder, recursive=True))  # noqa: PTH207
                    paths = [folder / each for each in named]
                    found += [each for each in paths if each.is_file() and each not in found]
    return {f"{TASK_PREFIX}{number}": file for number, file in enumerate(found)}
