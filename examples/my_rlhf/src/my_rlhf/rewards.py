def concise(prompts, responses):
    """0 for up to 20 words, less for more."""
    return [-max(0, len(response.split()) - 20) / 20 for response in responses]
