"""The examples of the data report: what the model sees, and what it learns."""

import pyarrow as pa

from rlhf_pipeline.data.split_report import first_examples


def write(path, columns):
    path.parent.mkdir(parents=True)
    table = pa.table(columns)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)


def test_the_first_row_of_each_phase_is_decoded_with_its_learned_tokens(tokenizer, tmp_path):
    prompt, answer, other = (
        tokenizer.encode(text, add_special_tokens=False)
        for text in ("User: <hi>", "Hello.<|end|>", "No.<|end|>")
    )
    write(
        tmp_path / "sft" / "train.arrow",
        {
            "prompt_ids": [prompt, prompt],
            "response_ids": [answer, other],
            "loss_mask": [[True] * (len(answer) - 1) + [False], [True] * len(other)],
        },
    )
    write(
        tmp_path / "reward_model" / "train.arrow",
        {"prompt_ids": [prompt], "chosen_ids": [answer], "rejected_ids": [other]},
    )
    write(tmp_path / "ppo" / "train.arrow", {"prompt_ids": [prompt]})
    assert first_examples(tmp_path, tokenizer) == {
        "SFT": [("User: <hi>", False), ("Hello.", True), ("<|end|>", False)],
        "reward model, chosen answer": [("User: <hi>", False), ("Hello.<|end|>", True)],
        "reward model, rejected answer": [("User: <hi>", False), ("No.<|end|>", True)],
        "PPO, prompt": [("User: <hi>", False)],
    }
