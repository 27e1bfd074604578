"""A reward that anyone can check: docs/smollm2.md."""

LIMIT = 12


def brief(prompts, responses):
    """1 for an answer of at most LIMIT words that ends with a full stop, else 0."""
    return [
        float(0 < len(response.split()) <= LIMIT and response.endswith((".", "!", "?")))
        for response in responses
    ]
