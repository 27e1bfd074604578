"""The node of distillation: the teacher that it fetches, and the job that it runs."""

from pathlib import Path

import pytest

from rlhf_pipeline.config.policies import DistillConfig
from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.errors import ArtifactError
from rlhf_pipeline.models.loading import load_tokenizer
from rlhf_pipeline.pipelines.ppo import distill


class Recorder:
    """Takes the jobs of the node; the teacher is where its job reads it."""

    def __init__(self):
        self.jobs = []

    def run(self, job):
        self.jobs.append(job)
        return Path(job.config["base_model"].path) if job.spec.name == "teacher" else Path("export")


def jobs_of(student, teacher, **fields):
    stages = Recorder()
    config = DistillConfig.model_validate({"teacher": str(teacher), **fields})
    assert distill(Path("split"), student, config, 7, stages) == Path("export")
    return stages.jobs


def test_the_bytes_of_the_teacher_identify_its_stage_whose_result_is_an_input(
    make_model, monkeypatch
):
    student, teacher = make_model("llama"), make_model("llama", num_hidden_layers=3)
    fetched, trained = jobs_of(student, teacher)
    assert fetched.spec.name == "teacher" and fetched.inputs == {}
    assert trained.spec.name == "distill" and trained.seed == 7
    inputs = {"prompts": Path("split/ppo"), "sft_model": student, "teacher": teacher}
    assert trained.inputs == inputs
    (teacher / "notes.txt").write_text("other bytes")
    assert jobs_of(student, teacher)[0].identities != fetched.identities
    assert "vllm" in jobs_of(student, teacher, generator="vllm")[1].spec.libraries
    given = jobs_of(student, teacher, given_batch_size=2)[1].inputs
    assert given == inputs | {"demonstrations": Path("split/sft")}
    text = {"ptx": {"batch_size": 2}}
    assert jobs_of(student, teacher, **text)[1].inputs["pretraining"] == Path("split/pretraining")


def test_a_teacher_with_another_tokenizer_is_refused_before_the_launch(make_model):
    student, teacher = make_model("llama"), make_model("llama", seed=1)
    tokenizer = load_tokenizer(teacher)
    tokenizer.chat_template += " "
    TokenContract.of(tokenizer).write(teacher)
    with pytest.raises(ArtifactError) as error:
        jobs_of(student, teacher)
    message = str(error.value)
    assert "sft_model and distill.teacher use different tokenizers: chat_template_digest" in message
    assert str(student) in message and str(teacher) in message
    assert "Fix: choose a teacher with the student's tokenizer and chat template" in message


def test_models_that_do_not_exist_yet_are_planned(make_model):
    _, trained = jobs_of(Path("/pending/sft"), make_model("llama"))
    assert trained.inputs["sft_model"] == Path("/pending/sft")
