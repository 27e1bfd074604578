"""Stage program: compare a candidate policy with the SFT baseline, or any models, on prompts.

    deepspeed --module rlhf_pipeline.evaluation.evaluate job.json

The policies answer the same prompts with equal decoding and equal randomness; the baseline answers
again with other randomness, because a win rate is about independent answers.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from rlhf_pipeline.config.evaluate import (
    CHAMPION,
    SFT_MODEL,
    SFT_ROWS,
    TASK_PREFIX,
    TASK_RESULTS,
    CandidateConfig,
    EvaluateConfig,
    own_models,
)
from rlhf_pipeline.data.token_contract import common_contract
from rlhf_pipeline.distributed.batches import even_share, load_rows, sampled_rows
from rlhf_pipeline.distributed.world import World, join
from rlhf_pipeline.errors import StageError
from rlhf_pipeline.evaluation.answering import Setup, answer_all, in_order, judge_all, perplexity
from rlhf_pipeline.evaluation.judges import judge_pairs, load_judges
from rlhf_pipeline.models.loading import load_tokenizer
from rlhf_pipeline.runtime.job import LaunchedJob
from rlhf_pipeline.runtime.manifest import Manifest
from rlhf_pipeline.runtime.metrics_file import MetricsFile
from rlhf_pipeline.runtime.program import run_program
from rlhf_pipeline.scoring.chat_model import REPLIES, RubricSource, reply_folder
from rlhf_pipeline.verdict.answers import write_answers
from rlhf_pipeline.verdict.comparison import (
    BASE_MODEL,
    BASELINE,
    ENDS,
    FURTHER,
    INSTRUCT,
    baseline_of,
    best_of_n,
    compare,
    with_ends,
)
from rlhf_pipeline.verdict.independence import own_rewards, standings
from rlhf_pipeline.verdict.statistics import ALPHA, mean_with_interval, share_with_interval


def main(job: LaunchedJob) -> dict[str, float]:
    """Answer, judge, compare; write the evaluation and all answers."""
    candidate = job.block("candidate", CandidateConfig)
    config = job.block("evaluate", EvaluateConfig)
    world = join(job.seed, timeout_s=job.collective_timeout_s)
    folders, setups = load(job, config, candidate, world)
    baseline = next(iter(folders))
    judges = load_judges(job, config.judges, "evaluate.judges")
    rows, perplexities = job.inputs.get(SFT_ROWS), dict.fromkeys(folders, 0.0)

    def measure(policy: nn.Module, name: str) -> None:
        if rows is not None:
            perplexities[name] = perplexity(policy, rows, setups[baseline], config.prompts) or 0.0

    # Beside the champion none: the evaluation of the candidate has the same curve.
    best = 0 if CHAMPION in folders else config.best_of_n
    each = config.answers_per_prompt
    scored = answer_all(folders, setups, job, each, max(config.baseline_draws, best), measure)
    draws = judge_all(scored, job, judges, setups)
    rubrics = {name: one for name, one in judges[0].items() if isinstance(one, RubricSource)}
    counted = world.gather({name: source.counted() for name, source in rubrics.items()})
    if world.rank != 0:
        return {}
    curve = best_of_n([draws[baseline, draw] for draw in range(best)]) if best else None
    answers = {name: in_order(name, draws, each) for name in folders}
    drawn = in_order(baseline, draws, config.baseline_draws)
    answers, drawn, replies = judge_pairs(answers, drawn, config, reply_folder(job))
    for name in rubrics:
        replies[name] = {one: sum(own[name][one] for own in counted) for one in REPLIES}
    compared = {name: folders[name] for name in (baseline, candidate.name)}
    stand, rewards = standings(job, compared, config), own_rewards(folders[candidate.name])
    evaluation = compare(answers, config, stand, drawn, rewards)
    writer = MetricsFile(job.metrics_file, len(answers))
    for step, (name, given) in enumerate(evaluation["policies"].items(), start=1):
        writer.write(step, {f"{name}/{key}": value for key, value in given.items()})
    measured = {name: value for name, value in perplexities.items() if value}
    training = Manifest.read(folders[candidate.name]).metrics.items()
    evaluation["learned"] = {name: x for name, x in training if name.startswith("learned/")}
    more = {"best_of_n": curve, "perplexity": measured, "pairwise_judges": replies}
    evaluation |= {name: value for name, value in more.items() if value}
    if f"{TASK_PREFIX}baseline" in job.inputs:
        add_tasks(evaluation, job.inputs)
    if candidate.models:
        evaluation["titles"] = {name: name for name in candidate.models}
    elif Manifest.read(folders[baseline]).metrics.get("base_model/has_chat_template"):
        evaluation["titles"] = {baseline: INSTRUCT}
    evaluation["accuracy"] = {
        judge: accuracy_of([job.inputs[place] for place in places])
        for judge, places in own_models(job.inputs).items()
    }
    job.export.mkdir(exist_ok=True)
    (job.export / "evaluation.json").write_text(json.dumps(evaluation, indent=2))
    further = [answer for answer in drawn if answer.draw >= each]
    write_answers(answers | {f"{baseline}{FURTHER}": further}, job.export)
    return headline(evaluation)


def load(
    job: LaunchedJob, config: EvaluateConfig, compared: CandidateConfig, world: World
) -> tuple[dict[str, Path], dict[str, Setup]]:
    """The folder of each policy, and its tokenizer with the prompts of this rank.

    The policies of a pipeline, which share both, are the baseline, the candidate, and as "ppo_ema"
    the average of its weights, if any; the champion competes without it. Raises ArtifactError if
    the token contracts of what is read together differ, and StageError if models apart from a
    pipeline would answer different prompts.
    """
    inputs, trust, name = job.inputs, job.trust_remote_code, compared.name

    def setup(models: dict[str, Path], tokenizer: Path, prompts: Path) -> Setup:
        contract, table = common_contract(models), load_rows(prompts / "test.arrow", world)
        rows = even_share(sampled_rows(table.num_rows, config.prompts, job.seed), world)
        loaded = load_tokenizer(tokenizer, trust_remote_code=trust)
        return Setup(job.seed, config, contract, loaded, rows, table.columns(rows), trust, world)

    if not compared.models:
        policy, sft = inputs[f"{name}_model"], inputs[SFT_MODEL]
        baseline = BASE_MODEL if Manifest.read(sft).stage == BASE_MODEL else BASELINE
        folders = {baseline: sft, name: policy}
        if name != CHAMPION and (policy / "ema").is_dir():
            folders[f"{name}_ema"] = policy / "ema"
        read = "prompts", SFT_ROWS, SFT_MODEL, f"{name}_model"  # reward models may read text
        models = {one: inputs[one] for one in read if one in inputs}
        return folders, dict.fromkeys(folders, setup(models, sft, inputs["prompts"]))
    folders = {name: inputs[f"{name}_model"] for name in compared.models}
    setups = {}
    for name, folder in folders.items():
        prompts = inputs[f"{name}_prompts"]
        setups[name] = setup({f"{name}_prompts": prompts, f"{name}_model": folder}, folder, prompts)
    first, *rest = (each.prompts["messages"] for each in setups.values())
    if any(messages != first for messages in rest):
        raise StageError(
            "prompts: found other prompts for one model than for another, expected the same ones. "
            "Fix: raise split.max_prompt_tokens, because a prompt has more tokens for one of them"
        )
    return folders, setups


def add_tasks(evaluation: dict[str, Any], inputs: Mapping[str, Path]) -> None:
    """Add what policies achieved in tasks, `tasks/<task>/<metric>`, and the change of each task.

    A change is that of the first metric that is a share, from SFT to the candidate. Its interval is
    that of the differences on the same documents.
    """
    baseline, candidate = baseline_of(evaluation), evaluation["candidate"]
    achieved = dict[str, list[Any]]()
    for place, name in (("baseline", baseline), ("candidate", candidate)):
        results = json.loads((inputs[f"{TASK_PREFIX}{place}"] / TASK_RESULTS).read_text())
        achieved |= {f"{name}{ending}": found for ending, found in results.items()}
    for policy, found in achieved.items():
        for task, metric, value, shares in found:
            name = re.sub(r"[^\w./-]", "_", f"tasks/{task}/{metric}")  # MLflow refuses others
            measured = {name: value}
            if shares:
                measure = share_with_interval if {*shares} <= {0.0, 1.0} else mean_with_interval
                measured = with_ends(name, (value, *measure(shares)[1:]))
            evaluation["policies"][policy] |= measured
    before = {(task, metric): shares for task, metric, _, shares in achieved[baseline]}
    changes = evaluation["tasks"] = {}
    for task, metric, value, ours in achieved[candidate]:
        theirs = before.get((task, metric))
        if task not in changes and ours and theirs:
            pairs = zip(ours, theirs, strict=True)
            change, lower, upper = mean_with_interval([a - b for a, b in pairs])
            changes[task] = {"metric": metric, "value": value, "n": len(ours)}
            changes[task] |= {"change": change, "lower": lower, "upper": upper}


def accuracy_of(models: Sequence[Path]) -> dict[str, dict[str, float]]:
    """How well reward models judge together, each of which was measured on its own comparisons.

    margin          mean of chosen minus rejected score, with the 95% interval of a mean
                    (Student's t): above 0, the models know more than chance
    over_length     of a single model: its accuracy minus that of preferring the longer answer
    """
    from scipy.special import stdtrit

    reports = [json.loads((model / "reward_report.json").read_text()) for model in models]
    names = "pairs", "margin", "margin_square"
    n, margins, squares = (np.array([one[name] for one in reports], float) for name in names)
    pairs, margin = n.sum(), n @ margins / n.sum()
    variance = max(0.0, n @ squares / pairs - margin**2)
    quantile = float(stdtrit(max(pairs - 1, 1), 1 - ALPHA / 2))
    # One comparison shows nothing: its interval contains 0.
    half = quantile * math.sqrt(variance / (pairs - 1)) if pairs > 1 else abs(margin)
    found = {"margin": {"mean": margin, "lower": margin - half, "upper": margin + half, "n": pairs}}
    return found if len(reports) > 1 else found | {"over_length": reports[0]["over_length"]}


def headline(evaluation: dict[str, Any]) -> dict[str, float]:
    """The evaluation as flat metrics.

    `sft/...`, `ppo/...` (or another candidate); `win_rate/<judge>`, `length_controlled/<judge>`,
    `paired_win_rate/<judge>` and `p_value/<judge>`; for a variant of the candidate `ppo_ema/...`
    and `ppo_ema/win_rate_<judge>`.
    """
    metrics: dict[str, float] = {}
    for policy, given in evaluation["policies"].items():
        metrics |= {f"{policy}/{name}": value for name, value in given.items()}
    perplexities = evaluation.get("perplexity", {})
    metrics |= {f"{policy}/held_out_perplexity": x for policy, x in perplexities.items()}
    for judge, counts in evaluation.get("pairwise_judges", {}).items():
        metrics |= {f"pairwise_judges/{judge}/{name}": float(n) for name, n in counts.items()}
    rates: dict[str, Any] = {}
    for judge, rate in evaluation["win_rates"].items():
        metrics[f"p_value/{judge}"] = rate["paired"]["p_value"]
        rates |= {f"win_rate/{judge}": rate, f"paired_win_rate/{judge}": rate["paired"]}
        if rate["length_controlled"] is not None:
            rates[f"length_controlled/{judge}"] = rate["length_controlled"]
    for policy, given in evaluation["variants"].items():
        rates |= {f"{policy}/win_rate_{judge}": rate for judge, rate in given.items()}
    for name, rate in rates.items():
        metrics |= with_ends(name, (rate[end] for end in ENDS))
    return metrics


if __name__ == "__main__":
    run_program(main)
