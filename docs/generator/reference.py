"""Writes the generated parts of the manual: parameters, commands, and the graph of the stages.

`make reference` calls it. A part stands between the lines `<!-- NAME: make reference -->` and
`<!-- end -->`, where NAME is one of `PARTS`.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
import graph
from pydantic_core import PydanticUndefined

from rlhf_pipeline.cli import cli
from rlhf_pipeline.commands.command import CONFIGURATION
from rlhf_pipeline.commands.params import Parameter, Part, top_parts
from rlhf_pipeline.config.block import Block
from rlhf_pipeline.config.reward_blocks import RewardSource
from rlhf_pipeline.config.training import SavingConfig

DOCS = Path(__file__).parents[1]
PART = re.compile(r"(?<=<!-- )(\w+)(: make reference -->\n).*?(?=<!-- end -->)", re.DOTALL)
OWN, KINDS, SHARED = "", "Kinds of rewards and judges", "Shared blocks"
INHERITED: dict[type[Block], str] = {RewardSource: KINDS, SavingConfig: SHARED}
"""Classes without a place of their own that have a section, and where it stands."""
SKIPPED = {"--traceback", "--help", *(name for each in CONFIGURATION for name in each.opts)}
"""Options of many commands, which the page explains once."""


def filled(text: str) -> str:
    """The text of a page with its generated parts as the code has them now."""
    return PART.sub(lambda match: f"{match[1]}{match[2]}\n{PARTS[match[1]]()}\n\n", text)


def parameters() -> str:
    """The list of the top-level blocks, and a section for each block: first those that have one
    place, then the kinds of one parameter, then those that occur in several places."""
    parts: dict[type[Block], list[Part]] = {}
    for part in top_parts():
        visit(part, parts)
    alternatives = Counter(part.place for found in parts.values() for part in found)
    groups, titles = dict.fromkeys(parts, ""), dict[type[Block], str]()
    for block, found in parts.items():
        is_kind = alternatives[found[0].place] > 1
        groups[block] = KINDS if is_kind else SHARED if len(found) > 1 else OWN
        titles[block] = words(block) if groups[block] else f"`{found[0].place}`"
    for block, group in INHERITED.items():
        heirs = [found[0] for each, found in parts.items() if issubclass(each, block)]
        parts[block], groups[block], titles[block] = heirs, group, words(block)
    texts = {OWN: ["These are the blocks:", "\n".join(map(summary, top_parts()))]}
    for group in (OWN, KINDS, SHARED):
        texts.setdefault(group, [f"## {group}"])
        for block in parts:
            if groups[block] == group:
                texts[group] += section(block, parts, titles, groups)
    return "\n\n".join(text for found in texts.values() for text in found)


def visit(part: Part, parts: dict[type[Block], list[Part]]) -> None:
    """Note where a block occurs, and the blocks of its parameters."""
    parts.setdefault(part.block, []).append(part)
    for parameter in part.parameters():
        for inner in part.inside(parameter.name):
            visit(inner, parts)


def summary(part: Part) -> str:
    """A top-level block as an item of the list."""
    return wrapped(f"- [`{part.place}`](#{part.place}): {part.summary}")


def words(block: type[Block]) -> str:
    """The name of a class in words: `Frozen DeepSpeed` of FrozenDeepSpeedConfig."""
    text = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", block.__name__.removesuffix("Config"))
    text = text.replace("Deep Speed", "DeepSpeed").replace("Lo RA", "LoRA")
    return text[0] + re.sub(r"\b[A-Z](?=[a-z]+\b)", lambda m: m[0].lower(), text[1:])


def section(
    block: type[Block],
    parts: Mapping[type[Block], list[Part]],
    titles: Mapping[type[Block], str],
    groups: Mapping[type[Block], str],
) -> Iterator[str]:
    """The section of a block: its parameters, but for those that a related block has, too."""
    found = parts[block]
    part = found[0] if len(found) == 1 else Part("", block, {})
    is_top = not groups[block] and "." not in part.place
    yield f"{'##' if is_top else '###'} {titles[block]}"
    yield linked(inspect.cleandoc(block.__doc__ or ""))
    if groups[block]:
        yield wrapped(f"In {', '.join(f'`{each.place}`' for each in found)}.")
    own, same, base = part.parameters(), [], None
    for each in related(block, list(parts), groups):
        known = parts[each][0].parameters() if each not in INHERITED else of_class(each)
        equal = [parameter for parameter in own if parameter in known]
        if len(equal) > len(same):
            same, base = equal, each
    if items := [item(each, part, titles) for each in own if each not in same]:
        yield "\n".join(items)
    if base is not None:
        names = ", ".join(f"`{each.name}`" for each in same)
        goal = f"[{titles[base]}](#{anchor(titles[base])})"
        yield wrapped(
            f"{'Also those' if items else 'Those'} of {goal}, with its defaults: {names}."
        )


def of_class(block: type[Block]) -> list[Parameter]:
    """The parameters of a block with the defaults of its class."""
    return Part("", block, {}).parameters()


def related(
    block: type[Block], blocks: list[type[Block]], groups: Mapping[type[Block], str]
) -> Iterator[type[Block]]:
    """The blocks to which the section of this one may refer: those that it extends, and of those
    before it with a place of their own also one that extends it."""
    for each in blocks:
        is_before = blocks.index(each) < blocks.index(block) or each in INHERITED
        is_extended = groups[block] == groups[each] == OWN and issubclass(each, block)
        if is_before and block is not each and (is_extended or issubclass(block, each)):
            yield each


def item(parameter: Parameter, part: Part, titles: Mapping[type[Block], str]) -> str:
    """A parameter as an item of a list."""
    inner = part.inside(parameter.name)
    if inner:
        goal = titles[inner[0].block] if len(inner) == 1 else KINDS
        kind = parameter.type.replace("block", f"[block](#{anchor(goal)})")
    else:
        kind = parameter.type
    if parameter.default is PydanticUndefined:
        kind += ", required"
    return wrapped(f"- `{parameter}` ({kind}): {linked(parameter.meaning)}")


def linked(text: str) -> str:
    """The text, in which the name of a page is a link."""
    return re.sub(r"docs/([\w-]+\.md)", r"[docs/\1](\1)", text)


def wrapped(text: str) -> str:
    """The text in lines of at most 100 characters, none of which begins like an item of a list."""
    for width in range(100, 80, -1):
        indent = "  " if text.startswith("- ") else ""
        lines = textwrap.wrap(
            text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        if not any(re.match(r" *([-+*#>|]|\d+[.)] )", line) for line in lines[1:]):
            return "\n".join(lines)
    raise ValueError(f"found no width for {text}")


def anchor(heading: str) -> str:
    """The anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def commands() -> str:
    """A section for each command."""
    rlhf = cli.commands["rlhf"]
    assert isinstance(rlhf, click.Group)
    context = click.Context(rlhf)
    each: dict[str, click.Command] = {"kedro run": cli.commands["run"]}
    for name in rlhf.list_commands(context):
        if command := rlhf.get_command(context, name):
            each[f"kedro rlhf {name}"] = command
    return "\n\n".join(text for name, command in each.items() for text in usage(name, command))


def usage(name: str, command: click.Command) -> Iterator[str]:
    """The usage, help and options of one command."""
    context = click.Context(command, info_name=name)
    pieces = [piece for piece in command.collect_usage_pieces(context) if piece != "[OPTIONS]"]
    yield f"## `{name}`"
    yield f"`{' '.join([name, *pieces, '[OPTIONS]'])}`"
    yield inspect.cleandoc(command.help or "").replace("\b\n", "")
    items = []
    for each in command.get_params(context):
        record = each.get_help_record(context)
        if record and record[1] and (name == "kedro run" or SKIPPED.isdisjoint(each.opts)):
            option, meaning = (" ".join(part.split()) for part in record)
            items.append(wrapped(f"- `{option}`: {meaning}"))
    if name != "kedro run" and set(CONFIGURATION) <= set(command.params):
        names = ", ".join(f"`{each.opts[0]}`" for each in CONFIGURATION)
        items.append(f"- {names}: as for [`kedro run`](#kedro-run).")
    if items:
        yield "\n".join(items)


PARTS = {"graph": graph.mermaid, "parameters": parameters, "commands": commands}


def main() -> None:
    """Write the pages whose generated parts have changed."""
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text()
        if (new := filled(text)) != text:
            page.write_text(new)
            print(f"{page.relative_to(DOCS.parent)} is written")


if __name__ == "__main__":
    main()
