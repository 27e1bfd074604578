"""Episodes on the server of an OpenEnv environment, each with a session of its own."""

import json
from collections.abc import Mapping
from typing import Any

from rlhf_pipeline.errors import ConfigError, StageError

try:
    from openenv.core import GenericEnvClient
except ImportError as error:
    fix = "pip install 'openenv-core>=0.3,<0.4'"
    raise StageError(f"openenv: found {error}. Fix: {fix}") from None


class OpenEnv:
    """A session. The arguments are `action`, with {answer} where the policy's text belongs,
    `observation`, the field with the text (without: all fields as JSON), `columns` of the row that
    the server's reset gets beside the seed, and those of the client: `base_url`, timeouts."""

    def __init__(self, seed: int, environment_arguments: Mapping[str, Any]) -> None:
        client = {"action": {"message": "{answer}"}, **environment_arguments}
        self._seed, self._columns = seed % 2**31, client.pop("columns", [])  # fits numpy's seeds
        self._action, self._field = json.dumps(client.pop("action")), client.pop("observation", "")
        try:
            self._client = GenericEnvClient(**client).sync()
        except TypeError as error:
            expected = "base_url, action, observation, columns. Fix: correct the names"
            raise ConfigError(
                f"environment_arguments: found {error}, expected {expected}"
            ) from None

    def reset(self, task: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The messages of the row. The first observation ends the user's: templates may refuse two
        of them in a row."""
        chosen = {name: _at(task, name, "columns") for name in self._columns}
        text = self._text(self._client.reset(**{"seed": self._seed, **chosen}).observation)
        messages = [dict(message) for message in task["messages"]]
        if messages and messages[-1]["role"] == "user":
            text = f"{messages.pop()['content']}\n\n{text}"
        return [*messages, {"role": "user", "content": text}]

    def step(self, answer: str) -> tuple[list[dict[str, Any]], float, bool]:
        """The observation after an action, its reward, and whether the episode has ended."""
        action = self._action.replace("{answer}", json.dumps(answer)[1:-1])
        result = self._client.step(json.loads(action))
        if result.done:
            self._client.close()  # servers limit their sessions
        message = {"role": "user", "content": self._text(result.observation)}
        return [message], float(result.reward or 0), result.done

    def _text(self, fields: Mapping[str, Any]) -> str:
        found = _at(fields, self._field, "observation") if self._field else fields
        return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)


def _at(values: Mapping[str, Any], name: str, argument: str) -> Any:
    if name not in values:
        place = f"environment_arguments.{argument}: found {name}"
        raise ConfigError(f"{place}, expected one of {', '.join(values)}. Fix: correct the name")
    return values[name]
