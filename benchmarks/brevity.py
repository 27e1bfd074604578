"""A dense reward that anyone can check: the shorter, the better."""


def brevity(prompts, responses):
    """1 for an empty answer, and a 32nd less for each word."""
    return [1 - len(response.split()) / 32 for response in responses]
