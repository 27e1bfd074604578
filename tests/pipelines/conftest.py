import pyarrow as pa
import pytest
from rank_fixtures import as_artifact, write_table

from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.models.loading import load_tokenizer


@pytest.fixture
def prompts_and_policy(make_model, tmp_path):
    """A split of 32 prompts, and a random policy."""
    policy, split = make_model("llama", seed=1), tmp_path / "split"
    tokenizer = load_tokenizer(policy)
    messages = [[{"role": "user", "content": f"what is {n}?"}] for n in range(32)]
    ids = [
        tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False)
        for m in messages
    ]
    columns = {"id": [str(n) for n in range(32)], "prompt_ids": ids, "messages": messages}
    table = pa.table(columns | {"source": ["files"] * 32, "reference": ["x"] * 32})
    split.mkdir()
    write_table(table, split / "ppo", TokenContract.read(policy))
    return split, as_artifact(policy)
