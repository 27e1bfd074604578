"""Rewards of this project."""


def brief(prompts: list[list[dict[str, str]]], responses: list[str]) -> list[float]:
    """1 for an answer of at most five words, less for a longer one."""
    return [min(1.0, 5 / max(1, len(response.split()))) for response in responses]
