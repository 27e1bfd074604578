"""Whether training has optimized a judge, by the lineage of both policies.

A judge is "optimized" if the training of one of the policies, or of a model that it was made from,
maximized its scores or learned from its comparisons; "unknown" if the records do not exclude that;
else "independent". Only an independent judge shows that answers are better.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rlhf_pipeline.config.block import Block
from rlhf_pipeline.config.doors import source_file
from rlhf_pipeline.config.evaluate import JUDGE_PREFIX, EvaluateConfig, own_models
from rlhf_pipeline.config.rewards import (
    GOLD,
    INPUT_PREFIX,
    CallableReward,
    ModelReward,
    PairwiseJudge,
    RegexReward,
    RubricReward,
    SampleRewards,
    Scorer,
    TrainedReward,
    reads_references,
)
from rlhf_pipeline.config.split import SAME_COMPARISONS
from rlhf_pipeline.errors import ConfigError
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.manifest import NAME, Manifest, file_digest
from rlhf_pipeline.verdict.comparison import Standing, State

Record = Mapping[str, Any]
"""`Manifest.origin` of an artifact."""
_MODELS = ("base_model", "sft_model", "reward_model", "policy", "teacher")
"""Inputs that are models: a lineage without the record of one of them is incomplete."""

_COMPARISONS = "comparisons", SAME_COMPARISONS


def standings(
    job: LaunchedJob, policies: Mapping[str, Path], config: EvaluateConfig
) -> dict[str, Standing]:
    """Where each judge stands towards the policies, which are the baseline and the candidate.

    A function counts by its place, or its file and name; a reward model by its content or its
    comparisons; a judge by true answers if a reward reads them, or its file has changed; a chat
    model by its name and its rubric. A model that both policies were made from cannot favour one of
    them, so it need not be known how it was trained.
    """
    trained = {name: Manifest.read(folder) for name, folder in policies.items()}
    imported = {name: _imported(policy.lineage) for name, policy in trained.items()}
    shared = set.intersection(*imported.values())
    found = {GOLD: Standing("independent")}
    inputs = [(job.digests[name], path) for name, path in job.inputs.items() if name in job.digests]
    artifacts = {digest: path for digest, path in inputs if (path / NAME).is_file()}
    judges: list[tuple[str, Block, list[str]]] = [  # with the inputs that have their content
        (name, TrainedReward(), places) for name, places in own_models(job.inputs).items()
    ]
    judges += [(one.label, one, [f"{JUDGE_PREFIX}{i}"]) for i, one in enumerate(config.judges)]
    for name, judge, places in judges:
        contents = [job.digests[place] for place in places if place in job.digests]
        made = [Manifest.read(artifacts[each]) for each in contents if each in artifacts]
        learned = _comparisons(made)
        by: dict[str, str] = {}
        unknown: dict[str, str] = {}
        for policy, manifest in trained.items():
            if how := _optimized(manifest, judge, contents, learned):
                by[policy] = how
            elif (
                imported[policy] - shared
                or _is_incomplete(manifest)
                or _may_overlap(learned, _comparisons_of_policy(manifest))
                or _may_be_download(judge, manifest)
            ):
                unknown[policy] = "unknown"
        state: State = "optimized" if by else "unknown" if unknown else "independent"
        found[name] = Standing(state, by or unknown)
    return found


def own_rewards(policy: Path) -> list[str]:
    """Names of the rewards that the last training of a policy maximized, with their weights."""
    return [
        ("" if reward.weight == 1 else f"{reward.weight:g} * ") + reward.label
        for reward in _rewards(Manifest.read(policy).origin)
        if reward.weight
    ]


def _optimized(
    policy: Manifest, judge: Block, contents: Sequence[str], learned: Collection[str]
) -> str | None:
    """How the trainings of a lineage have optimized a judge, which learned from comparisons."""
    own = set().union(*(_identities(judge, content) for content in contents or [""]))
    reads_truth = reads_references(judge)
    for digest, record in [("", policy.origin), *policy.ancestors.items()]:
        for reward, given in _weighted(record):
            is_judge = not own.isdisjoint(_identities(reward, given or ""))
            if is_judge or (reads_truth and _may_read_truth(reward, given)):
                # A policy that trains on its own answers was rewarded where it has drawn them.
                sampled = record["stage"] == "sample" and digest in policy.inputs.values()
                return "rewards" if not digest or sampled else "earlier"
    if policy.inputs.get("comparisons") in learned:
        return "comparisons"
    return None if _comparisons_of_policy(policy).keys().isdisjoint(learned) else "earlier"


def _weighted(record: Record) -> Iterator[tuple[Scorer, str | None]]:
    """The rewards of a training that had an effect, with the digest of each one's content."""
    for index, reward in enumerate(_rewards(record)):
        prefix = JUDGE_PREFIX if record["stage"] == "sample" else INPUT_PREFIX
        place = "reward_model" if isinstance(reward, TrainedReward) else f"{prefix}{index}"
        if reward.weight:
            yield reward, record["inputs"].get(place)


def _may_read_truth(reward: Scorer, content: str | None) -> bool:
    """Whether a reward reads the true answers; a function whose file has changed may have."""
    try:
        changed = isinstance(reward, CallableReward) and (
            file_digest(source_file(reward.callable)) != content
        )
    except ConfigError:
        return True
    return changed or reads_references(reward)


def _rewards(record: Record) -> Sequence[Scorer]:
    """The rewards of a training; none if it has none."""
    blocks = (block for block in record["config"].values() if block and block.get("rewards"))
    adapter: TypeAdapter[Sequence[Scorer]] = TypeAdapter(SampleRewards)
    return next((adapter.validate_python(block["rewards"]) for block in blocks), ())


def _comparisons(made: Iterable[Manifest]) -> dict[str, Record | None]:
    """The digests of the comparisons that models have learned from, with the split of each."""
    found = {one.inputs[name]: one for one in made for name in _COMPARISONS if name in one.inputs}
    return {digest: one.ancestors.get(digest) for digest, one in found.items()}


def _comparisons_of_policy(policy: Manifest) -> dict[str, Record | None]:
    """The same of a policy: by DPO or KTO, or through a reward model that it was trained on."""
    records = {"": policy.origin, **policy.ancestors}
    rewarding = {given for record in policy.lineage for _, given in _weighted(record)}
    learned = [
        record["inputs"][name]
        for digest, record in records.items()
        for name in _COMPARISONS
        if name in record["inputs"]
        and ("reward_model" not in record["config"] or digest in rewarding)
    ]
    return {digest: policy.ancestors.get(digest) for digest in learned}


def _may_overlap(judge: Mapping[str, Record | None], policy: Mapping[str, Record | None]) -> bool:
    """Whether two splits have divided one source: then both may have learned from one row."""

    def sources(split: Record) -> set[str]:
        return {digest for name, digest in split["inputs"].items() if name.startswith("source_")}

    pairs = product(judge.values(), policy.values())
    splits = ((ours, theirs) for ours, theirs in pairs if ours and theirs and ours != theirs)
    return any(sources(ours) & sources(theirs) for ours, theirs in splits)


def _may_be_download(judge: Block, policy: Manifest) -> bool:
    """Whether training may have maximized a judge on the hub in a local folder: the commit of the
    one and the bytes of the other cannot be compared."""
    if not (isinstance(judge, ModelReward) and judge.on_hub):
        return False
    maximized = (reward for record in policy.lineage for reward, _ in _weighted(record))
    return any(isinstance(reward, ModelReward) for reward in maximized)


def _imported(lineage: Iterable[Record]) -> set[tuple[tuple[str, str], ...]]:
    """What identifies each model of a lineage that was trained elsewhere.

    The start of a reward model or a critic does not count: its head, and so its scores, are new.
    """
    own = [record for record in lineage if record["stage"] not in ("reward_base", "critic_base")]
    bases = ((r["config"].get("base_model") or {}, r["inputs"]) for r in own)
    return {tuple(sorted(inputs.items())) for base, inputs in bases if base.get("path")}


def _is_incomplete(policy: Manifest) -> bool:
    """Whether the lineage lacks the record of a model, such as a teacher from elsewhere."""
    inputs = [record["inputs"] for record in policy.lineage]
    asked = {given[name] for given in inputs for name in _MODELS if name in given}
    return not asked <= policy.ancestors.keys()


def _identities(asked: Block, content: str) -> set[tuple[str, str | None]]:
    """What a reward and a judge share if they are the same: the file or its place and the function;
    the model; what a chat model or a regular expression looks for. `content` is a digest."""
    match asked:
        case CallableReward(location=file, function=name):
            return {(file, name), (content or file, name)}
        case TrainedReward() | ModelReward():
            return {(content, None)} if content else set()
        case RubricReward():
            return {(asked.rubric, asked.openai.model)}
        case PairwiseJudge():
            return {("", asked.openai.model)}
        case RegexReward():
            return {(asked.regex, None)}
    return {("", None)}
