"""Tasks of the lm-evaluation-harness in local files, which one tiny policy solves by construction.

In `letters`, the right choice is the letter that this policy finds most likely; in `words`, the
right answer is its own greedy one. Both are computed here, without the harness.
"""

import json
from pathlib import Path

import torch

from rlhf_pipeline.data.token_contract import TokenContract
from rlhf_pipeline.models.loading import load_policy, load_tokenizer

LETTERS = "abcd"
DOCUMENTS = 9
QUESTIONS = [f"{n * 7} apples or {n * n}?" for n in range(DOCUMENTS)]
WORDS = 3
"""Tokens of an answer."""

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
{rest}"""
TASKS = {
    "letters": """\
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: [a, b, c, d]
doc_to_target: letter
target_delimiter: ""
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
""",
    "words": """\
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: words
generation_kwargs: {until: ["<|end|>"], max_gen_toks: 3}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
""",
    "text": """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: question
metric_list:
  - {metric: word_perplexity}
""",
}


def solutions(policy: Path) -> list[dict[str, int | str]]:
    """The letter that a policy finds most likely and its greedy answer, for each question."""
    tokenizer, size = load_tokenizer(policy), TokenContract.read(policy).vocab_size
    model = load_policy(policy, "fp32").eval()
    letters = [tokenizer.convert_tokens_to_ids(letter) for letter in LETTERS]
    found = []
    for question in QUESTIONS:
        message = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        answer: list[int] = []
        while len(answer) < WORDS and tokenizer.eos_token_id not in answer:
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids + answer])).logits[0, -1, :size]
            if not answer:
                letter = int(logits[letters].argmax())
            answer.append(int(logits.argmax()))
        words = tokenizer.decode(answer, skip_special_tokens=True)
        found.append({"question": question, "letter": letter, "words": words})
    return found


def write_tasks(folder: Path, solver: Path) -> dict[str, str]:
    """Write the tasks that a policy solves; return their files by name."""
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in solutions(solver)))
    for name, rest in TASKS.items():
        text = TASK.format(name=name, rows=json.dumps(str(rows)), rest=rest)
        (folder / f"{name}.yaml").write_text(text)
    return {name: str(folder / f"{name}.yaml") for name in TASKS}
