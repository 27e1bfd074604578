"""The commands of the documentation, and why some of them are not run here."""

import re
import shlex
from pathlib import Path

SHELL = re.compile(r"^```(?:sh|bash|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

READ_RESULTS = tuple(
    f"kedro rlhf {name}"
    for name in ("clean", "compare", "export", "lineage", "report", "runs", "verify")
)
"""Commands that read the results of a run."""

NOT_RUN = {
    **dict.fromkeys(
        ("code=$?", "exit $code", "params=", "test $code", "trap", "wait $!"),
        "part of a script that tests/stages/launch/test_two_nodes.py submits",
    ),
    **dict.fromkeys(
        ("mkdir -p data/01_raw", "python make_pairs.py", "python make_sums.py", "python score.py"),
        "tests/test_tutorials.py",
    ),
    "kedro rlhf evaluate": "needs two models; tests/commands/test_evaluate.py",
    "#SBATCH": "needs a SLURM cluster",
    ".venv/bin/python benchmarks/": "minutes to hours; tests/test_benchmarks.py rehearses",
    "cat data/tiny/": "tests/test_tutorials.py",
    "cat data/03_split/": "needs a run; tests/test_tutorials.py",
    "deepspeed --num_gpus": "tests/stages/launch starts programs in this form",
    "kedro airflow create": "tests/test_kedro_tools.py",
    "kedro new": "tests/test_starter.py",
    "kedro package": "tests/test_package.py",
    "kedro rlhf chat": "waits at a terminal; tests/commands/test_serve.py",
    "kedro rlhf doctor": "tests/commands/test_doctor.py",
    "kedro rlhf export candidate ~/models/adapter": "needs LoRA; tests/commands/test_export.py",
    "kedro rlhf export s3:": "needs an S3 server; tests/commands/test_export.py",
    "kedro rlhf label": "serves until Ctrl-C; tests/labelling",
    "kedro rlhf params": "tests/commands/test_params.py",
    "kedro rlhf plan": "tests/commands/test_plan.py and test_check.py",
    "kedro rlhf preset": "writes an environment; tests/commands/test_preset.py",
    "kedro rlhf prove": "trains several times; tests/commands/test_prove.py",
    "kedro rlhf serve": "serves until Ctrl-C; tests/commands/test_serve.py",
    "kedro rlhf status --env=tiny --params='ppo.rewards": "needs a file; tests/test_tutorials.py",
    "kedro rlhf status --env=tiny --pipeline=grpo": "needs a block; tests/test_tutorials.py",
    "kedro rlhf status --env=tools": "needs files; tests/test_tutorials.py",
    "kedro run --env=tools": "needs files; tests/test_tutorials.py",
    "python conf/tools/tasks.py": "tests/test_tutorials.py",
    "kedro rlhf study": "trains several times; tests/commands/test_study.py",
    "kedro run --env=hh-rlhf": "needs the file; tests/pipelines/test_published_inputs.py",
    "kedro run --env=opt-1.3b": "needs a GPU and the model; tests/sizing/test_environments.py",
    "kedro run --env=qwen2.5": "needs GPUs and the model; tests/sizing/test_environments.py",
    "kedro run --env=smollm2": "needs the model; tests/test_smollm2.py",
    "kedro run --env=tiny --params=launch.mode": "tests/stages/launch/test_two_nodes.py",
    "kedro run --env=tiny --pipeline=grpo": "needs a block; tests/test_tutorials.py",
    "kedro run --pipeline=grpo": "needs the model; tests/test_tutorials.py",
    "kedro run --pipeline=full --params=launch.mode": "tests/stages/launch/test_two_nodes.py",
    'kedro run --pipeline=full --params="$params': "tests/stages/launch/test_two_nodes.py",
    "kedro run --pipeline=distill": "needs a teacher; tests/pipelines/test_roads.py",
    "kedro run --pipeline=full --params=store": "tests/test_storage.py",
    "make": "a target of the Makefile",
    "pip install --constraint constraints.txt dist/": "tests/test_package.py",
    "pip install rlhf_pipeline-": "tests/test_package.py",
    "python benchmarks/distillation.py": "needs a finished pipeline=full",
    "rlhf-pipeline": "the commands of kedro; tests/test_package.py",
    "sbatch": "tests/stages/launch/test_two_nodes.py",
    "srun": "needs a SLURM cluster; tests/stages/launch/test_two_nodes.py",
    "ssh worker-1": "needs another machine",
    "sudo apt-get": "needs root",
}
"""Beginnings of commands, with what they need, or the test that runs them in another place."""


def commands(page: Path) -> list[str]:
    """The commands in the shell blocks of a page, without comments."""
    found = []
    for block in SHELL.findall(page.read_text()):
        for line in block.replace("\\\n", "").splitlines():
            command = line if line.startswith("#SBATCH") else re.sub(r"(^|\s\s+)#.*", "", line)
            if command.strip() and not command.startswith("export "):
                found.append(re.sub(r"^(?:[A-Z_]+=\S* )+", "", command.strip()))
    return found


def as_status(command: str) -> list[str] | None:
    """The arguments of `kedro rlhf status` that check a `kedro run`; None for another command."""
    words = shlex.split(command)
    if words[:2] != ["kedro", "run"] and words[:3] != ["kedro", "rlhf", "status"]:
        return None
    options = [word for word in words if word.startswith(("--pipeline=", "--params=", "--env="))]
    other = [word for word in options if word.startswith("--env=") and word != "--env=tiny"]
    return None if other else options
