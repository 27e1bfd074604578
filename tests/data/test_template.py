from datetime import date

import pytest

from rlhf_pipeline.data.template import (
    fix_date,
    render_prompts,
    render_replies,
    render_responses,
    render_turns,
    role_marks,
)
from rlhf_pipeline.data.token_contract import Reader, TokenContract
from rlhf_pipeline.errors import ArtifactError

QUESTION = [{"role": "user", "content": "Why?"}]
DIALOGUE = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "So."},
    {"role": "user", "content": "Hm."},
]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content "
    "}}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETS_THINKING = CHATML.replace(
    "message.content }}",
    "message.content if loop.last else message.content.split('</think>')[-1] }}",
)


def use(tokenizer, template):
    """Give the tokenizer another template, which ends turns like ChatML."""
    tokenizer.chat_template = template
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})


def responses(tokenizer, *arguments):
    return render_responses(Reader(tokenizer, TokenContract.of(tokenizer)), *arguments)


def render(tokenizer, prompt, response):
    prompts = render_prompts(tokenizer, ["own.jsonl:7"], [prompt])
    return prompts[0], responses(tokenizer, ["own.jsonl:7"], [prompt], prompts, [response])[0]


def turns(tokenizer, prompt):
    (text,) = render_prompts(tokenizer, ["own.jsonl:7"], [prompt])
    reader = Reader(tokenizer, TokenContract.of(tokenizer))
    return render_turns(reader, "own.jsonl:7", prompt, text)


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        ("{{ m.content }}<|eot|>", "So.<|eot|>"),  # Llama 3
        ("{{ m.content }}<|eot|>\n", "So.<|eot|>"),  # ChatML
        ("{{ m.content }}<|eot|>\n{{ eos_token }}", "So.<|eot|>"),  # Phi-3
        ("{{ m.content }}{{ eos_token }}", "So.<|end|>"),
        ("{{ m.content }}", "So.<|end|>"),
    ],
)
def test_a_turn_ends_at_the_first_token_that_the_template_ends_it_with(tokenizer, turn, expected):
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|eot|>"]})
    user = "{% if m.role == 'user' %}{{ m.content }}{% else %}"
    tokenizer.chat_template = f"{{% for m in messages %}}{user}{turn}{{% endif %}}{{% endfor %}}"
    contract = TokenContract.of(tokenizer, tokenizer.convert_tokens_to_ids(["<|eot|>"]))
    given = ["a:1"], [QUESTION], ["Why?"], ["So."]
    assert render_responses(Reader(tokenizer, contract), *given) == [expected]


def test_a_generation_prompt_that_differs_from_the_dialogue_is_refused(tokenizer):
    tokenizer.chat_template = CHATML.replace("assistant\n{% endif", "assistant\n<think>{% endif")
    with pytest.raises(ArtifactError, match=r"own.jsonl:7: .* expected its own prompt.*<think>"):
        render(tokenizer, QUESTION, "Because.")


def test_the_error_names_the_dialogue_and_the_answer_that_the_template_rejects(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(ArtifactError, match="no chat template"):
        render_prompts(tokenizer, ["own.jsonl:7"], [QUESTION])
    rejects = "a:2: the tokenizer's chat template rejects the turns "
    tokenizer.chat_template = (
        "{{ raise_exception('no system') if messages[0].role == 'system' }}"
        "{{ raise_exception('silence') if messages[-1].content == '' }}"
    )
    with pytest.raises(ArtifactError) as error:
        render_prompts(tokenizer, ["a:1", "a:2", "a:3"], [QUESTION, DIALOGUE, QUESTION])
    assert str(error.value) == (
        f"{rejects}system, user, assistant, user: no system. Fix: correct the template, or remove "
        "such rows"
    )
    with pytest.raises(ArtifactError, match=f"{rejects}user, assistant: silence"):
        responses(tokenizer, ["a:1", "a:2"], [QUESTION, QUESTION], ["", ""], ["So.", ""])


def test_templates_that_render_todays_date_get_a_fixed_one(tokenizer):
    day, guard = date(2023, 2, 1), "{% if strftime_now is defined %}"
    call = "{{ strftime_now(\"%d %b %Y\") }}, {{ strftime_now( '%Y-%m-%d' ) }}"
    tokenizer.chat_template = f"{guard}Today: {call}{{% endif %}}"
    fix_date(tokenizer, day)
    (prompt,) = render_prompts(tokenizer, ["a:1"], [QUESTION])
    assert prompt == "Today: 01 Feb 2023, 2023-02-01"
    tokenizer.chat_template = {"default": "{{ strftime_now('%Y') }}", "tools": "no date"}
    fix_date(tokenizer, day)
    assert tokenizer.chat_template == {"default": '{{ "2023" }}', "tools": "no date"}
    for template in (
        "{% set form = '%Y' %}{{ strftime_now(form) }}",
        "{% set f = strftime_now %}{{ f('%d %b %Y') }}",
        "{{ '%Y' | map(strftime_now) }}",
    ):
        tokenizer.chat_template = template
        with pytest.raises(ArtifactError, match="uses strftime_now without a literal format"):
            fix_date(tokenizer, day)


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer):
    use(tokenizer, FORGETS_THINKING)
    thinking = [*QUESTION, {"role": "assistant", "content": "<think>hm</think>So."}, *QUESTION]
    with pytest.raises(ArtifactError) as error:
        turns(tokenizer, thinking)
    assert str(error.value) == (
        "own.jsonl:7: the chat template renders the assistant's turn "
        "'<think>hm</think>So.<|im_end|>' differently once the dialogue continues. "
        "Fix: set split.sft_loss to 'response', or use another template."
    )
    assert turns(tokenizer, DIALOGUE[1:])[1] == ("So.<|im_end|>", True)  # nothing to omit here


USER, RESULT = {"role": "user", "content": "1 + 2?"}, {"role": "tool", "content": "3"}
KNOWS_TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
) + CHATML.replace(
    "message.content }}",
    "message.content }}{% if message.tool_calls %}{{ message.tool_calls[0].name }}(){% endif %}",
)


def test_a_template_shows_schemas_and_calls_of_tools(tokenizer):
    use(tokenizer, KNOWS_TOOLS)
    calls = {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}
    asked = [USER | {"tools": [{"name": "add"}]}, calls, RESULT]
    assert turns(tokenizer, asked) == [
        ('<|im_start|>system\n[{"name": "add"}]<|im_end|>\n<|im_start|>user\n1 + 2?<|im_end|>\n'
         "<|im_start|>assistant\n", False),
        ("add()<|im_end|>", True),
        ("\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n", False),
    ]  # fmt: skip
    assert render(tokenizer, asked, "3.")[1] == "3.<|im_end|>"
    use(tokenizer, CHATML)
    with pytest.raises(ArtifactError, match=r"own\.jsonl:7: .*shows neither tools nor tool_calls"):
        render(tokenizer, asked, "3.")


def test_replies_stand_between_the_end_of_a_turn_and_the_next_one(tokenizer):
    """In a template that ends each turn of each role by the same token, and drops earlier thoughts;
    a reply with the text of the mark changes nothing."""
    use(tokenizer, FORGETS_THINKING)
    reader = Reader(tokenizer, TokenContract.of(tokenizer))
    for text in "5", "TURN", "TURNS <|im_end|>":
        found = render_replies(reader, [{"role": "user", "content": text}])
        assert found == f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def marks(tokenizer):
    return role_marks(Reader(tokenizer, TokenContract.of(tokenizer)))


def test_what_surrounds_a_turn_is_known_without_words_alone(tokenizer):
    assert marks(tokenizer) == {"\n\nHuman:", "\n\nTool:", "\n\nAssistant:"}
    use(
        tokenizer,
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content + eos_token }}{% endfor %}",
    )
    assert {"<|user|>", "<|system|>"} <= marks(tokenizer)
    use(tokenizer, CHATML.replace("message.content }}", "message.content | tojson }}"))
    assert '"' not in marks(tokenizer)
    use(tokenizer, CHATML)
    assert not {"user", "assistant", "system"} & marks(tokenizer)


def test_a_template_that_takes_a_tool_for_the_assistant_is_refused(tokenizer):
    called = [USER, {"role": "assistant", "content": "add(1, 2)"}, RESULT]
    own = (
        "{% for m in messages %}{{ m.role if m.role == 'user' else 'assistant' }}: {{ m.content }}"
    )
    use(tokenizer, own + "{{ eos_token }}{% endfor %}")
    with pytest.raises(ArtifactError, match=r"own\.jsonl:7: .*shows a tool's turn as one of the"):
        render(tokenizer, called, "3.")
