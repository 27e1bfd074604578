from rlhf_pipeline.diagnosis.finding import BUDGET_S, Finding, Setup
from rlhf_pipeline.stages.launch.cluster import Cluster

START_S = BUDGET_S / 2
"""Seconds that the agents have to connect. Those that do not are ended before the check is."""
SLOW_GBIT = 1.0
"""Below this bandwidth a warning: a model of 7 billion parameters takes two minutes."""


def nodes(setup: Setup) -> Finding:
    """Every other machine connects with the same code, libraries, GPUs and time."""
    mode = setup.launch.mode
    if mode == "local":
        return Finding("nodes", "ok", "this machine trains alone")
    if mode == "rank_env":
        return Finding("nodes", "ok", "the scheduler starts them; each is checked as it connects")
    start_s = min(START_S, setup.launch.start_timeout_s)
    cluster = Cluster(setup.launch.model_copy(update={"start_timeout_s": start_s}))
    try:
        measured = [(node, *node.measure()) for node in cluster.nodes()]
    finally:
        cluster.close(0)
    found = "; ".join(
        f"{node}: {1000 * seconds:.1f} ms, {gbit:.1f} Gbit/s" for node, seconds, gbit in measured
    )
    if min(gbit for *_, gbit in measured) < SLOW_GBIT:
        fix = "set launch.address to the name of this machine in the faster network"
        return Finding("nodes", "warning", found, fix)
    return Finding("nodes", "ok", found)
