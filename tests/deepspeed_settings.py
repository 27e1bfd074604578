"""The settings of a stage's DeepSpeed engines, and whether DeepSpeed accepts them."""

from unittest.mock import patch

from pydantic import ValidationError

from rlhf_pipeline.config.evaluate import EvaluateConfig
from rlhf_pipeline.config.training import TrainedModel
from rlhf_pipeline.distributed.engine import inference_settings, training_settings
from rlhf_pipeline.distributed.zero import deepspeed


def engine_settings(config, trained, **machine):
    """The settings by model; an evaluation shards its models like the block `trained`."""
    is_evaluation = isinstance(config, EvaluateConfig)
    models = config.models([trained.deepspeed]) if is_evaluation else config.models()
    return {
        model.name: training_settings(model.config, **machine)
        if isinstance(model, TrainedModel)
        else inference_settings(model.config, **machine)
        for model in models
        if isinstance(model, TrainedModel) or model.config.zero_stage == 3
    }


def refusal(settings, ranks):
    """Why DeepSpeed refuses settings on a number of ranks; None if it accepts them."""
    with (
        patch.object(deepspeed.comm, "get_rank", lambda: 0),
        patch.object(deepspeed.comm, "get_world_size", lambda: ranks),
    ):
        try:
            config = deepspeed.DeepSpeedConfig(settings)
        except ValidationError as error:
            detail = error.errors()[0]
            return f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}"
        except (AssertionError, ValueError) as error:
            return str(error)
    assert config.train_batch_size == ranks, "the patches no longer reach DeepSpeed"
    return None
