from typing import Any

from pydantic import Field, PositiveInt, field_validator

from rlhf_pipeline.config.block import Block, operational


class ChatConfig(Block):
    """A chat model behind an OpenAI-compatible server, and what it is asked."""

    base_url: str = Field(pattern=r"^https?://[^@?\s]+$")
    """Address of the server, for example http://localhost:8000/v1, without user and query."""
    model: str
    """Name of the model on that server."""
    api_key_env: str | None = operational(None)
    """Environment variable with the key. None: the server needs none."""
    template: str | None = None
    """The question, with {prompt}, {first} and {second}. The model answers with [[A]] if the first
    answer is better, [[B]] if the second one is, and [[C]] for a tie."""
    request: dict[str, Any] = Field(default_factory=lambda: {"temperature": 0})
    """Further fields of every request, such as max_tokens."""
    concurrency: PositiveInt = operational(8)
    """Requests at the same time."""

    @field_validator("template")
    @classmethod
    def _has_fields(cls, value: str | None) -> str | None:
        fields = "{prompt}", "{first}", "{second}"
        if value is not None and any(field not in value for field in fields):
            raise ValueError(f"expected text with {', '.join(fields)}")
        return value
