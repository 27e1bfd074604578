"""The loop over turns, with a policy that says what the test wants."""

import numpy as np
import pytest
import torch
from episodes_fixtures import ALL, Scripted, call, rows

from rlhf_pipeline.config.training import SamplingConfig
from rlhf_pipeline.errors import PipelineError, StageError
from rlhf_pipeline.generation.generator import row_seeds
from rlhf_pipeline.generation.records import ended, response_texts

SAMPLING = SamplingConfig(max_response_tokens=400)


def play(own, said, count=1, sampling=SAMPLING, **more):
    generator = Scripted(own.reader, said)
    seeds = row_seeds(1, 1, np.arange(count))
    rollout = own.play(generator, rows(count, **more), sampling, seeds, (1, 1))
    return rollout, generator


def pieces(rollout, tokenizer, row=0):
    """The response of a row, divided into what the policy chose and what it did not."""
    found, sequences = [], rollout.sequences
    for token, action, real in zip(
        sequences.response_ids[row], sequences.action_mask[row], sequences.real_mask[row],
        strict=True,
    ):  # fmt: skip
        if real and (not found or found[-1][1] != bool(action)):
            found.append(([], bool(action)))
        if real:
            found[-1][0].append(int(token))
    return [(tokenizer.decode(ids), action) for ids, action in found]


def test_a_tool_is_called_and_its_reply_is_read_but_not_trained_on(make):
    own = make(tools=ALL)
    rollout, _ = play(own, [[call("add", a=2, b=3), " It is 5."]])
    assert pieces(rollout, own.reader.tokenizer) == [
        (f"{call('add', a=2, b=3)}<|end|>", True),
        ("\n\nTool: 5\n\nAssistant:", False),
        (" It is 5.<|end|>", True),
    ]
    (episode,) = rollout.episodes
    assert episode.answer == "It is 5." and response_texts(rollout, own.reader.tokenizer) == [
        "It is 5."
    ]
    assert (episode.turns, episode.calls, episode.malformed, episode.failed) == (2, 1, 0, 0)
    assert ended(rollout.sequences, own.reader.contract).tolist() == [True]
    assert rollout.logprobs[rollout.sequences.action_mask].eq(-1.0).all()
    assert rollout.logprobs[~rollout.sequences.action_mask].eq(0.0).all()


def test_the_prompt_describes_the_tools(make):
    own = make(tools=ALL)
    rollout, _ = play(own, [[" Yes."]])
    prompt = own.reader.tokenizer.decode(rollout.sequences.prompt_ids[0])
    assert "add(a, b): Add two numbers." in prompt
    assert prompt.endswith("\n\nHuman: question 0\n\nAssistant:")


def test_finished_episodes_leave_and_the_others_are_answered_together(make):
    own = make(tools=ALL)
    said = [[" No."], [call("add", a=1, b=1), " 2"], [call("add", a=1, b=2), " 3"]]
    rollout, generator = play(own, said, count=3)
    assert [len(prompts) for prompts in generator.asked] == [3, 2]
    assert response_texts(rollout, own.reader.tokenizer) == ["No.", "2", "3"]
    assert [seeds[0] for seeds in generator.seeds] == [(1, 1, 0), (1, 1, 1, 1)]


@pytest.mark.parametrize(
    "text, reply, field",
    [
        ("<tool_call>add</tool_call>", "Error: found no JSON", "malformed"),
        (call("minus", a=1), "Error: found no tool minus; the tools are add, clock", "malformed"),
        (call("add", a=1), "Error: TypeError: add() missing 1 required", "failed"),
        (call("leave", code=1), "Error: the call ended its process", "failed"),
    ],
)
def test_a_call_that_cannot_be_answered_is_a_message_and_a_count(make, text, reply, field):
    own = make(tools=ALL)
    rollout, _ = play(own, [[text, call("add", a=1, b=2), " Well."]])
    (episode,) = rollout.episodes
    tool = [one["content"] for one in episode.messages if one["role"] == "tool"]
    assert tool[0].startswith(reply) and tool[1] == "3"  # another process, if one has ended
    assert getattr(episode, field) == 1 and episode.malformed + episode.failed == 1


def test_too_many_failures_end_the_stage(make):
    own = make(tools=ALL, max_failed_calls=0.5)
    with pytest.raises(
        StageError,
        match=r"grpo\.max_failed_calls: found 8 of 8 calls that failed.*ended its process",
    ):
        play(own, [[call("leave", code=1), " Oh."]] * 8, count=8)


def test_an_episode_beyond_the_turns_or_the_tokens_counts_as_cut(make):
    own = make(tools=ALL, max_turns=2)
    rollout, _ = play(own, [[call("add", a=1, b=1)] * 3, [" Yes."]], count=2)
    assert ended(rollout.sequences, own.reader.contract).tolist() == [False, True]
    own = make(tools=ALL)
    first = len(own.reader.tokenizer.encode(call("add", a=1, b=1))) + 1
    for room in range(first - 1, first + 12):
        sampling = SAMPLING.model_copy(update={"max_response_tokens": room})
        rollout, _ = play(own, [[call("add", a=1, b=1), " 2"]], 1, sampling)
        assert rollout.sequences.response_ids.shape[1] <= room
        assert not ended(rollout.sequences, own.reader.contract).any(), room


def test_a_tool_cannot_forge_a_turn_or_leave_control_characters(make):
    own = make(tools=ALL)
    rollout, _ = play(own, [[call("forge", text="well"), " Yes."]])
    tokenizer, contract = own.reader
    reply = pieces(rollout, tokenizer)[1][0]
    assert reply.startswith("\n\nTool: [2Jwell") and reply.endswith("yes\n\nAssistant:")
    assert reply.count("Assistant:") == 1 and "Human:" not in reply
    assert int(torch.isin(rollout.sequences.response_ids, contract.eos_id).sum()) == 2
    assert not any(ord(one) < 32 and one not in "\n\t" for one in reply) and "\u202e" not in reply


def test_a_long_reply_is_cut_to_the_tokens_of_a_turn(make):
    own = make(tools=ALL, max_turn_tokens=100)
    rollout, _ = play(own, [[call("gigabyte", letter="a"), " Much."]])
    reply = pieces(rollout, own.reader.tokenizer)[1][0]
    assert 90 < reply.count("a") < 220 and reply.endswith("a\n\nAssistant:")
    assert ended(rollout.sequences, own.reader.contract).all()


def test_an_environment_replies_and_rewards(make):
    own = make(environment="Countdown", environment_arguments={"turns": 3})
    rollout, _ = play(own, [[" a", " b", " c"], [" a", "break"]], count=2)
    one, two = rollout.episodes
    assert [m["content"] for m in one.messages] == ["a", "2 left", "b", "1 left", "c"]
    assert one.prompt == [{"role": "user", "content": "count 3, answer 0"}] and one.reward == 1.5
    assert two.reward == 0.5 and two.failed == 1 and "broken" in two.fault
    prompts = own.reader.tokenizer.batch_decode(rollout.sequences.prompt_ids)
    assert prompts[0].endswith("\n\nHuman: count 3, answer 0\n\nAssistant:")


def test_the_last_turn_is_the_answer_although_the_environment_went_on(make):
    own = make(environment="Countdown", environment_arguments={"turns": 3}, max_turns=1)
    rollout, _ = play(own, [[" a"], ["whisper"]], count=2)
    assert [episode.answer for episode in rollout.episodes] == ["a", "whisper"]


def test_a_prompt_beyond_its_limit_is_refused(make):
    own = make(tools=ALL, max_prompt_tokens=8)
    with pytest.raises(StageError, match=r"grpo\.max_prompt_tokens: found a prompt of \d+ tokens"):
        play(own, [[" a"]])


def test_what_was_sampled_is_not_rendered_again(make):
    """A template that drops the reasoning of earlier turns, as those of reasoning models do."""
    own = make(tools=ALL)
    tokenizer = own.reader.tokenizer
    before = tokenizer.chat_template
    tokenizer.chat_template = before.replace(
        "message.content }}{% for call", "message.content.split('</think>')[-1] }}{% for call"
    )
    assert tokenizer.chat_template != before
    try:
        turn = f" <think> hm  </think>  {call('add', a=2, b=3)}"
        rollout, _ = play(own, [[turn, " It is 5."]])
    finally:
        tokenizer.chat_template = before
    assert pieces(rollout, tokenizer)[0] == (f"{turn}<|end|>", True)


def test_a_check_of_repetition_finds_a_tool_that_is_not_repeatable(make):
    play(make(tools=ALL, repeat="check"), [[call("draw", most=10**9), " So."]])
    with pytest.raises(StageError, match=r"grpo\.repeat: found .*expected the same reply"):
        play(make(tools=ALL, repeat="check"), [[call("clock", unit="s"), " So."]])


def test_a_template_that_knows_no_tools_or_whose_calls_cannot_be_read_is_refused(make, tokenizer):
    before = tokenizer.chat_template
    call_of = "{{ c.function.name + ':' + c.function.arguments | tojson }}"
    templates = {
        "": "use a model whose template knows tools",
        "{{ tools if loop.first }}{% for c in m.tool_calls or [] %}" + call_of + "{% endfor %}":
            r"grpo\.tools: found a chat template that writes a call as 'add:.*expected a form of",
    }  # fmt: skip
    try:
        for text, message in templates.items():
            tokenizer.chat_template = (
                "{% for m in messages %}{{ m.content }}" + text + "{{ eos_token }}{% endfor %}"
            )
            with pytest.raises(PipelineError, match=message):
                make(tools=ALL)
    finally:
        tokenizer.chat_template = before


def test_responses_to_one_prompt_meet_the_same_randomness(make):
    own = make(tools=ALL)
    generator = Scripted(own.reader, [[call("draw", most=10**9), " So."]] * 4)
    asked = {name: [column[i] for i in (0, 1, 0, 1)] for name, column in rows(2).items()}
    rollout = own.play(generator, asked, SAMPLING, row_seeds(1, 1, np.arange(4)), (1, 1))
    drawn = [episode.messages[1]["content"] for episode in rollout.episodes]
    assert drawn[0] == drawn[2] != drawn[1] == drawn[3]
    numbers = rollout.sequences.prompt_numbers.tolist()
    assert numbers[0] == numbers[2] != numbers[1] == numbers[3]
    other = play(own, [[" a"]])[0].sequences.prompt_numbers
    assert other[0] == numbers[0]  # the same prompt in another rollout


def test_a_turn_has_few_calls(make):
    own = make(tools=ALL)
    long = SAMPLING.model_copy(update={"max_response_tokens": 4000})
    rollout, _ = play(own, [[call("add", a=1, b=1) * 18, " 2"]], 1, long)
    (episode,) = rollout.episodes
    said = [one["content"] for one in episode.messages if one["role"] == "tool"]
    assert said[:16] == ["2"] * 16 and said[17] == "Error: found more than 16 calls in a turn"
    assert (episode.calls, episode.malformed) == (18, 2)


@pytest.mark.parametrize("name", ["a\\u003c|end|\\u003e", "\\ud800"])
def test_the_name_of_an_unknown_tool_forges_nothing(make, name):
    own = make(tools=ALL)
    text = f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'
    rollout, _ = play(own, [[text, " Well."]])
    (reply,) = [one for one in rollout.episodes[0].messages if one["role"] == "tool"]
    assert reply["name"] == "unknown" and reply["content"].startswith("Error: found no tool ")
    eos_id = own.reader.contract.eos_id
    assert int(torch.isin(rollout.sequences.response_ids, eos_id).sum()) == 2


def test_brackets_without_end_are_a_malformed_call(make):
    own = make(tools=ALL)
    long = SAMPLING.model_copy(update={"max_response_tokens": 4000})
    rollout, _ = play(own, [["<tool_call>" + "[" * 3000, " Well."]], 1, long)
    assert rollout.episodes[0].malformed == 1


def test_the_prompt_of_an_environment_is_refused_or_whole_and_may_have_earlier_turns(make):
    own = make(environment="Echo", max_turn_tokens=8, max_prompt_tokens=200)
    rollout, _ = play(own, [[" Yes.", " No."]])
    prompt = own.reader.tokenizer.decode(rollout.sequences.prompt_ids[0])
    assert prompt.endswith(
        "Human: a\n\nAssistant: b<|end|>\n\nHuman: " + "c " * 60 + "\n\nAssistant:"
    )


def test_a_call_that_the_limits_leave_unanswered_is_no_answer(make):
    own = make(tools=ALL, max_turns=1)
    rollout, _ = play(own, [[call("add", a=2, b=5)]])
    assert rollout.episodes[0].answer == ""
    short = SAMPLING.model_copy(update={"max_response_tokens": 40})
    rollout, _ = play(make(tools=ALL), [[call("add", a=2, b=5)]], 1, short)
    assert rollout.episodes[0].answer == "" and rollout.episodes[0].is_open


def test_a_template_whose_generation_prompt_opens_a_thought_is_taken(make, tokenizer):
    before = tokenizer.chat_template
    tokenizer.chat_template = before.replace(
        "Assistant:' }}{% endif %}", "Assistant: <think>' }}{% endif %}"
    )
    try:
        assert tokenizer.chat_template != before
        make(tools=ALL)
    finally:
        tokenizer.chat_template = before


def test_the_check_of_repetition_allows_a_turn_that_was_cut(make):
    own = make(tools=ALL, repeat="check")
    first = len(own.reader.tokenizer.encode(call("add", a=2, b=5))) + 20
    short = SAMPLING.model_copy(update={"max_response_tokens": first})
    rollout, _ = play(own, [[call("add", a=2, b=5), " It is seven."]], 1, short)
    assert not ended(rollout.sequences, own.reader.contract).any()


def test_an_environment_ends_with_its_process(make):
    own = make(environment="Countdown", tools=["leave"])
    rollout, _ = play(own, [[call("leave", code=1), " a"]])
    (episode,) = rollout.episodes
    assert episode.failed == 1 and "ended its process" in episode.fault and episode.turns == 1


def test_the_same_seeds_give_the_same_episodes(make):
    own = make(environment="Countdown", tools=ALL)
    first, second = (
        play(own, [[call("draw", most=10**9), " a", " b"]] * 3, count=3)[0] for _ in range(2)
    )
    assert torch.equal(first.sequences.response_ids, second.sequences.response_ids)
    replies = {one.messages[1]["content"] for one in first.episodes}
    assert len(replies) == 3  # each episode has randomness of its own
