"""Every known source, by name. To add one: a module with its `SOURCES` beside this file, and a line a source below.

Modules are imported when one of their sources is used, and their code belongs to the fingerprint of that source's
records alone: a change to one adapter reads no other source again.
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
    "Dahoas/rm-static": "dahoas",
    "Dahoas/full-hh-rlhf": "dahoas",
    "Dahoas/synthetic-instruct-gptj-pairwise": "dahoas",
    "yitingxie/rlhf-reward-datasets": "yitingxie",
    "openai/webgpt_comparisons": "openai",
    "stanfordnlp/SHP": "stanfordnlp",
    "pvduy/sharegpt_alpaca_oa_vicuna_format": "pvduy",
    "wangrui6/Zhihu-KOL": "wangrui6",
    "Cohere/miracl-zh-queries-22-12": "cohere",
    "Cohere/miracl-ja-queries-22-12": "cohere",
    "Hello-SimpleAI/HC3-Chinese": "hello_simpleai",
    "mkqa-Chinese": "mkqa",
    "mkqa-Japanese": "mkqa",
    "lmqg/qg_jaquad": "lmqg",
    "lmqg/qag_jaquad": "lmqg",
    "Anthropic/hh-rlhf": "anthropic",
    "HuggingFaceH4/ultrafeedback_binarized": "huggingfaceh4",
    "OpenAssistant/oasst1": "openassistant",
    "nvidia/HelpSteer2": "nvidia",
    "argilla/dpo-mix-7k": "argilla",
    "argilla/ultrafeedback-binarized-preferences-cleaned": "argilla",
    "argilla/distilabel-capybara-dpo-7k-binarized": "argilla",
    "argilla/distilabel-intel-orca-dpo-pairs": "argilla",
    "databricks/databricks-dolly-15k": "databricks",
    "tatsu-lab/alpaca": "tatsu_lab",
    "trl-lib/tldr": "trl_lib",
    "trl-lib/tldr-preference": "trl_lib",
    "Salesforce/wikitext": "salesforce",
}
"""Source to module in this package, in the order of the documentation."""


def adapter_module(name: str) -> str:
    """Full name of the module that defines the source; ConfigError with the nearest known names where there is none."""
    if name in MODULES:
        return f"{_PACKAGE}.{MODULES[name]}"
    folded = {known.casefold(): known for known in MODULES}
    nearest = get_close_matches(name.casefold(), folded, n=1)
    suggestion = f" Did you mean {folded[nearest[0]]!r}?" if nearest else ""
    raise ConfigError(
        f"unknown source {name!r}.{suggestion} Known sources: {', '.join(sorted(MODULES))}. "
        "For data of your own use 'files' with a column map."
    )


def find_source(name: str) -> Source:
    """The source of that name; ConfigError as for `adapter_module`."""
    sources: tuple[Source, ...] = import_module(adapter_module(name)).SOURCES
    return next(source for source in sources if source.name == name)
