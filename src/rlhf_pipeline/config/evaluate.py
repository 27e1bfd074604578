"""Evaluation and registration, with the names and files of tasks."""

import re
from collections.abc import Iterator, Sequence
from glob import escape, glob
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
    field_validator,
)

from rlhf_pipeline.config.block import Block, Precision, operational
from rlhf_pipeline.config.doors import GENERATOR
from rlhf_pipeline.config.rewards import Judge, RewardSource
from rlhf_pipeline.config.training import (
    DeepSpeedConfig,
    FrozenDeepSpeedConfig,
    FrozenModel,
    FrozenModelConfig,
    SamplingConfig,
)
from rlhf_pipeline.errors import suggestion

REWARD_MODEL = "score"
"""Name of the judge that is the reward model; its scores are called `score`."""

GOLD = "gold"
"""Name of the judge that knows the true quality; its scores are called `gold_score`."""

CHAMPION = "champion"
"""Name of the registry's champion where it answers beside a candidate, and of its alias."""

JUDGE_PREFIX = "judges."
"""Inputs of the evaluation job: the source file of `evaluate.judges.0` is the input `judges.0`."""

TASK_PREFIX = "tasks."
"""Inputs of the evaluation job: the files of own tasks (`evaluate.tasks`)."""

SFT_MODEL = "sft_model"
"""Input of the evaluation job: the baseline, which is the base model if `sft` is null."""

SFT_ROWS = "sft_rows"
"""Input of the evaluation job: the rows of SFT, whose validation rows are held-out answers."""

_NAME = re.compile(r"[\w.-]+(?<!_lower)(?<!_upper)")


class TasksConfig(Block):
    """Tasks of the lm-evaluation-harness (the extra `tasks`) in the chat template of the policy."""

    names: tuple[str, ...] = Field(min_length=1)
    """Tasks, groups and tags of the harness, or files of your own tasks (FILE.yaml)."""
    limit: PositiveInt | None = None
    """Number of documents of each task to evaluate, from the first one on. None: all documents."""
    few_shot: NonNegativeInt | None = None
    """Solved examples before each question. None: as many as the task says. A task that has no
    examples gets none."""
    batch_size_per_gpu: PositiveInt = 8
    """Documents per forward pass on each rank."""

    @property
    def files(self) -> tuple[str, ...]:
        """The files among the names."""
        return tuple(name for name in self.names if name.endswith((".yaml", ".yml")))


class EvaluationSamplingConfig(SamplingConfig):
    """How responses are sampled to compare policies."""

    temperature: NonNegativeFloat = 1.0
    """Softmax temperature in sampling and in every log-probability. 0: greedy, always the most
    likely token; log-probabilities are then those at temperature 1."""


class AnsweringConfig(Block):
    """How policies answer and are scored, one model at a time."""

    micro_batch_tokens: PositiveInt = 16384
    """Largest number of tokens in a forward pass on each rank when scoring."""
    precision: Precision | None = None
    """Precision of all models. None: each model has the precision that it was saved in."""
    zero_stage: Literal[0, 3] | None = None
    """0: a whole copy of the model on every rank; 3: sharded over the ranks. None: 3 for a model
    that was trained at stage 3, else 0. One model at a time is in memory."""
    generator: Annotated[str, GENERATOR] = "transformers"
    """Program that samples the answers of all policies, also the champion's; see
    `ppo.generator`."""
    gather_for_generation: bool = operational(True)
    """For a policy at ZeRO stage 3: gather all its weights to answer, which needs memory for the
    whole model on every GPU. False: gather each layer at every token, which is much slower."""


class EvaluateConfig(AnsweringConfig):
    """Both policies answer the same held-out prompts with equal decoding."""

    prompts: PositiveInt = 512
    """Largest number of held-out prompts. The half width of the win rate's interval falls with the
    square root of this number: 512 prompts give 0.04."""
    answers_per_prompt: PositiveInt = 1
    """Answers of each policy to each prompt. Several narrow the intervals less than as many further
    prompts, because answers to one prompt resemble each other; intervals take this into account."""
    sampling: EvaluationSamplingConfig = EvaluationSamplingConfig()
    """Decoding of both policies."""
    judges: tuple[Judge, ...] = ()
    """Further judges, see `config.rewards`: Python functions (FILE.py:FUNCTION, or a block with
    `callable` and `name`; see `rlhf_pipeline.rollout.function_reward`), reward models, true answers
    and chat models. The first one that training has not optimized decides about a promotion. The
    reward model always judges; without it (`reward_model: null`) and without judges here, the
    rewards that the policy was trained on do. The gold score judges, and decides, if the source of
    every prompt has one."""
    best_of_n: int = Field(default=0, ge=0)
    """A power of two: for n = 1, 2, 4, ... up to this number, also report the best of n answers of
    SFT by the reward model, or without it by the first judge: a bound for PPO. SFT then gives so
    many answers to every prompt, which include those of `answers_per_prompt`. 0: no such report."""
    tasks: TasksConfig | None = None
    """Benchmark tasks that each policy also solves. None: no tasks."""

    _places: dict[str, str] = PrivateAttr(default_factory=dict)

    def place_of(self, judge: Judge) -> str:
        """The parameter of a judge, for messages; for stage `sample`, that of the reward."""
        return self._places.get(judge.label, f"evaluate.{JUDGE_PREFIX}{self.judges.index(judge)}")

    def models(self, trained: Sequence[DeepSpeedConfig]) -> list[FrozenModel]:
        """The models that the stage loads one after the other, as they were `trained`."""
        own = FrozenModelConfig(
            deepspeed=FrozenDeepSpeedConfig(zero_stage=self.zero_stage, precision=self.precision)
        )
        return [FrozenModel("evaluate", own.beside(companion)) for companion in trained]

    @property
    def baseline_draws(self) -> int:
        """Answers of the baseline to each prompt: the second is independent of the candidate's."""
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

    @field_validator("judges")
    @classmethod
    def _check_judges(cls, judges: tuple[Judge, ...]) -> tuple[Judge, ...]:
        labels = [judge.label for judge in judges]
        for judge in judges:
            if isinstance(judge, RewardSource) and judge.weight != 1.0:
                raise ValueError(
                    f"found weight {judge.weight} of judge {judge.label}, expected none, because "
                    "judges are not summed. Fix: remove weight"
                )
            if not _NAME.fullmatch(judge.label):
                raise ValueError(
                    f"found judge {judge.label!r}, expected letters, digits, '.', '_' and '-', and "
                    "neither _lower nor _upper at the end. Fix: set name"
                )
            if judge.label in (REWARD_MODEL, GOLD) or labels.count(judge.label) > 1:
                raise ValueError(
                    f"found two judges called {judge.label!r}, expected unique names. Fix: set name"
                )
        return judges


class CandidateConfig(Block):
    """The policy compared with the baseline. The pipeline sets this block, not the user."""

    name: str
    """Stage that trained the policy, such as "ppo" or "dpo"; of several `models`, the second."""
    models: tuple[str, ...] = ()
    """Names of the models of `kedro rlhf evaluate`, each with tokens of its own, the baseline
    first. The inputs are `<name>_model` and `<name>_prompts`. Empty: those of a pipeline."""


Promote = Literal["never", "gate", "always"]


class RegisterConfig(Block):
    """Name of the registered model, and the promotion gate, see `rlhf_pipeline.evaluation.gate`."""

    model: str = Field(default="rlhf-policy", min_length=1, pattern=r"^[^/:']+$")
    """Name of the registered model. The SFT baseline and the candidates (PPO, DPO) are versions of
    this one model, so MLflow can compare them. MLflow allows neither slash nor colon,
    and its filters no apostrophe."""
    promote: Promote = "gate"
    """When the candidate becomes the champion. gate: if it passes every condition below and beats
    the present champion. The conditions are checked and reported in any case."""
    min_win_rate_lower: float = Field(default=0.5, ge=0, lt=1)
    """The lower end of the 95% interval on the paired win rate (equal draws) against SFT, and on
    the one against the champion, must be above this value. 0.5 requires a policy that is better
    beyond chance; a mean above 0.5 is not enough."""
    min_gain: float = Field(default=0.1, ge=0)
    """Smallest allowed gain over SFT with equal draws: the lower end of its 95% interval, in units
    of the scores' spread. Many wins by very small differences are not enough."""
    require_independent_judge: bool = False
    """Whether training must not have optimized the judge that decides."""
    max_kl: float = Field(default=10.0, gt=0)
    """Largest KL from SFT, nats per response. Far from SFT the reward model's score still rises
    while the true quality falls: the policy exploits the reward model."""
    max_length_ratio: float = Field(default=3.0, ge=1)
    """Answers may be this many times longer or shorter than SFT's, on average."""
    max_eos_drop: float = Field(default=0.1, ge=0, le=1)
    """Largest allowed fall of the share of answers that end by themselves."""
    max_repetition_rise: float = Field(default=0.1, ge=0, le=1)
    """Largest allowed rise of the share of word triples that repeat within an answer."""
    max_phrase_rise: float = Field(default=0.3, ge=0, le=1)
    """Largest allowed rise of the share of answers with a common four-word phrase, as a fraction of
    (1 - SFT's share). 1 switches the check off."""
    max_task_drop: float = Field(default=0.05, ge=0, le=1)
    """Largest allowed fall of the share of right documents of a task (`evaluate.tasks`)."""
    min_score_spread: PositiveFloat = 0.1
    """Smallest allowed standard deviation of the candidate's scores, relative to SFT's scores."""


_NAMES = re.compile(r"""^[ \t]*(?:-|["']?(?:task|group|tag)["']?:)[ \t]*(.+)""", re.MULTILINE)
"""Lines with names of tasks, groups or tags; items of a list may be tags."""


def task_faults(config: TasksConfig) -> Iterator[str]:
    """Names that the harness does not know, and files that cannot be read."""
    known = _known_names() if len(config.files) < len(config.names) else set()
    for index, name in enumerate(config.names):
        place = f"evaluate.tasks.names.{index}: found {name}"
        if name in config.files:
            try:
                _named_files(Path(name).expanduser())
            except (OSError, UnicodeError, yaml.YAMLError) as error:
                yield f"{place}, expected a file of YAML: {error}"
        elif name not in known:
            yield (
                f"{place}{suggestion(name, known)}, expected FILE.yaml or a name of the "
                "lm-evaluation-harness. Fix: `lm-eval ls tasks` lists them"
            )


def task_inputs(config: TasksConfig | None) -> dict[str, Path]:
    """Inputs of the evaluation: the files among the tasks, and all files that they name."""
    names = config.files if config is not None else ()
    files = [file for name in names for file in _named_files(Path(name).expanduser())]
    return {f"{TASK_PREFIX}{number}": file for number, file in enumerate(files)}


def _named_files(path: Path) -> list[Path]:
    """A task file, its data, the files that it includes, and the modules of its functions.

    A name is relative to the file or to the current folder, as in the harness, or a pattern.
    """
    found = [path]
    for file in found:
        if file.name.endswith(("yaml", "yml")):
            events = yaml.parse(file.read_text(encoding="utf-8"), yaml.SafeLoader)
            for text in [event.value for event in events if isinstance(event, yaml.ScalarEvent)]:
                module = escape(text.rpartition(".")[0].replace(".", "/") + ".py")
                for folder, name in product((file.parent, Path()), (text, module)):
                    # Path.glob refuses absolute names.
                    named = sorted(glob(name, root_dir=folder, recursive=True))  # noqa: PTH207
                    paths = [folder / each for each in named]
                    found += [each for each in paths if each.is_file() and each not in found]
    return found


def _known_names() -> set[str]:
    """The words where the harness names tasks: all its names, and some other words."""
    package = find_spec("lm_eval")
    assert package is not None and package.origin is not None, "the caller looks for it"
    files = Path(package.origin).with_name("tasks").rglob("*")
    # Included files have no suffix.
    texts = (path for path in files if path.suffix in ("", ".yaml") and path.is_file())
    lines = (line for path in texts for line in _NAMES.findall(path.read_text("utf-8")))
    return {word for line in lines for word in re.findall(r"[^\s\"',\[\]{}]+", line)}
