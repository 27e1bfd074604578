"""The registry of sources.

To add a source, write a module with `SOURCES` in this folder, and add each source to MODULES. A
module is imported when one of its sources is used. Its code is part of the fingerprint of these
sources alone, so a change to one module does not read the sources of other modules again.
"""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module

from rlhf_pipeline.data.sources.adapter import Source
from rlhf_pipeline.errors import ConfigError

_PACKAGE = "rlhf_pipeline.data.sources"

MODULES: dict[str, str] = {
    "synthetic": "synthetic",
    "files": "own_files",
    "local/jsonfile": "own_files",
    "Dahoas/rm-static": "dialogues",
    "Dahoas/full-hh-rlhf": "dialogues",
    "Dahoas/synthetic-instruct-gptj-pairwise": "comparisons",
    "yitingxie/rlhf-reward-datasets": "dialogues",
    "openai/webgpt_comparisons": "comparisons",
    "stanfordnlp/SHP": "comparisons",
    "pvduy/sharegpt_alpaca_oa_vicuna_format": "dialogues",
    "wangrui6/Zhihu-KOL": "demonstrations",
    "Cohere/miracl-zh-queries-22-12": "comparisons",
    "Cohere/miracl-ja-queries-22-12": "comparisons",
    "Hello-SimpleAI/HC3-Chinese": "demonstrations",
    "mkqa-Chinese": "demonstrations",
    "mkqa-Japanese": "demonstrations",
    "lmqg/qg_jaquad": "demonstrations",
    "lmqg/qag_jaquad": "demonstrations",
    "Anthropic/hh-rlhf": "dialogues",
    "HuggingFaceH4/ultrafeedback_binarized": "comparisons",
    "OpenAssistant/oasst1": "openassistant",
    "nvidia/HelpSteer2": "nvidia",
    "argilla/dpo-mix-7k": "comparisons",
    "argilla/ultrafeedback-binarized-preferences-cleaned": "comparisons",
    "argilla/distilabel-capybara-dpo-7k-binarized": "comparisons",
    "argilla/distilabel-intel-orca-dpo-pairs": "comparisons",
    "databricks/databricks-dolly-15k": "demonstrations",
    "tatsu-lab/alpaca": "demonstrations",
    "trl-lib/tldr": "demonstrations",
    "trl-lib/tldr-preference": "comparisons",
    "Salesforce/wikitext": "salesforce",
}
"""Source -> module in this package, in the order of docs/data.md."""


def adapter_module(name: str) -> str:
    """Full name of the module that defines a source.

    Raises:
        ConfigError: the source is unknown; the message suggests the nearest name.
    """
    if name in MODULES:
        return f"{_PACKAGE}.{MODULES[name]}"
    folded = {known.casefold(): known for known in MODULES}
    nearest = get_close_matches(name.casefold(), folded, n=1)
    suggestion = f" Did you mean {folded[nearest[0]]!r}?" if nearest else ""
    raise ConfigError(
        f"unknown source {name!r}.{suggestion} Known sources: {', '.join(sorted(MODULES))}. "
        "For your own data, use 'files' with a column map."
    )


def find_source(name: str) -> Source:
    """The source with this name; raises like `adapter_module`."""
    sources: tuple[Source, ...] = import_module(adapter_module(name)).SOURCES
    return next(source for source in sources if source.name == name)
