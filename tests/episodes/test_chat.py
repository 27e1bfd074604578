"""A conversation with a policy that calls tools."""

from episodes_fixtures import TOOLS, Scripted, call

from rlhf_pipeline.config.episodes import EpisodesConfig
from rlhf_pipeline.config.training import SamplingConfig
from rlhf_pipeline.data.token_contract import Reader, TokenContract
from rlhf_pipeline.episodes.chat import talk


class Answers(Scripted):
    """Says the turns in their order, whatever the seeds."""

    def generate(self, prompts, sampling, seeds, prompt_numbers=None):
        self.said = [self.said[0]] if not self.asked else [self.said[0][1:]]
        return super().generate(prompts, sampling, [(0, 0, 0)], prompt_numbers)


def test_tools_are_called_and_shown_and_the_next_question_follows_the_conversation(
    tokenizer, capsys
):
    reader = Reader(tokenizer, TokenContract.of(tokenizer))
    policy = Answers(reader, [[call("add", a=2, b=3), " It is 5.", " You are welcome."]])
    questions = iter(["What is 2 + 3?", "Thanks!", ""])
    config = EpisodesConfig(tools=[f"{TOOLS}:add"], max_turns=4)
    talk(
        policy, reader, config, SamplingConfig(max_response_tokens=200), 1, lambda: next(questions)
    )
    shown = capsys.readouterr().out
    assert "\n\nTool: 5\nAssistant: It is 5.\n" in shown
    assert shown.endswith("Assistant: You are welcome.\n")
    asked = [tokenizer.decode(prompts[0]) for prompts in policy.asked]
    assert asked[1].startswith(asked[0]) and asked[1].endswith("\n\nTool: 5\n\nAssistant:")
    assert asked[2].endswith("It is 5.<|end|>\n\nHuman: Thanks!\n\nAssistant:")
