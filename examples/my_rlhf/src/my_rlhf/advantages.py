def normalized(returns, moments):
    """Returns in units of their spread in the step (Hu et al. 2025)."""
    mean, variance = moments(returns)
    return (returns - mean) / (variance.sqrt() + 1e-8)
