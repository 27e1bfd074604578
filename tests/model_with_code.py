"""A model that ships its own Python code, like hub models of a type unknown to transformers."""

import json
from pathlib import Path

CODE = """
from pathlib import Path
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, LlamaPreTrainedModel
from transformers import PreTrainedTokenizerFast

Path({marker!r}).touch()

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

class OwnForSequenceClassification(LlamaPreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = LlamaModel(config)
        self.score = torch.nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


def bring_code(folder: Path, marker: Path) -> None:
    """Turn a Llama into a model with its own type, whose code creates `marker` when executed."""
    (folder / "modeling_own.py").write_text(CODE.format(marker=str(marker)))
    classes = {
        "AutoConfig": "OwnConfig",
        "AutoModelForCausalLM": "OwnForCausalLM",
        "AutoModelForSequenceClassification": "OwnForSequenceClassification",
    }
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "architectures": ["OwnForCausalLM"]}
    config["auto_map"] = {auto: f"modeling_own.{own}" for auto, own in classes.items()}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text()) | {
        "tokenizer_class": "OwnTokenizer"
    }
    tokenizer["auto_map"] = {"AutoTokenizer": [None, "modeling_own.OwnTokenizer"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
