"""Sizes of DeepSpeed's collectives. Memory and traffic depend on them."""

BUCKET = 50_000_000
"""Elements in one collective: of gradients to reduce, or of weights to gather."""
LIVE = 1_000_000_000
"""Weights that a rank keeps whole at ZeRO-3, because the next pass uses them again."""
