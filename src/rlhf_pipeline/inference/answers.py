"""Program: answer the dialogues that `kedro rlhf chat` writes to it, one JSON object a line.

`python -m rlhf_pipeline.inference.answers FOLDER` loads a policy and writes {}. A request has the
arguments of `replies`. The answer is one object for each new text, and the last one
has a finish or an error. INT ends an answer, the end of the input ends the program.
"""

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from rlhf_pipeline.errors import PipelineError
from rlhf_pipeline.inference.policy import Answer, Policy, explained, write


def replies(
    policy: Policy, messages: list[dict[str, str]], max_tokens: int, seed: int, temperature: float
) -> Iterator[dict[str, Any]]:
    """The objects that answer one request."""
    try:
        prompt = policy.chat_prompt(messages)
    except PipelineError as error:
        yield {"error": str(error)}
        return
    room = policy.room(prompt, max_tokens)
    if room < 1:
        yield {"error": f"found a conversation of {len(prompt)} tokens, expected fewer than the "
                        f"{policy.positions} that the model can read. Fix: /reset"}  # fmt: skip
        return
    answer = Answer(policy, prompt, room, temperature, 1.0, Random(seed), (), policy.opening)

    def cancel(*_: Any) -> None:
        answer.finish = answer.finish or "cancelled"

    signal.signal(signal.SIGINT, cancel)
    for _, text in write([answer]):
        yield {"text": text}
    yield {"finish": answer.finish, "tokens": len(answer.ids)}


def main() -> None:
    """Answer until the input ends."""
    policy = Policy.load(Path(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("{}", flush=True)
    for line in sys.stdin:
        for reply in replies(policy, **json.loads(line)):
            print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    with explained():
        main()
