"""The registry of sources: what a source is, where its rows come from, and its records.

The names are known without the modules of the sources, which are imported when they are needed.
"""

import tomllib
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

from rlhf_pipeline.config.doors import Door
from rlhf_pipeline.config.split import TASKS, ColumnMap, SourceConfig
from rlhf_pipeline.data.files import data_set_rows, find_files, origin, read_rows
from rlhf_pipeline.data.records import Example, Record, RowCounts, Text, Unused, is_utf8
from rlhf_pipeline.data.sources.adapter import (
    CONVERTED,
    MalformedRowError,
    Records,
    Row,
    Source,
    columns_of,
    outcome,
    parser,
)
from rlhf_pipeline.errors import ConfigError, DataError, suggestion
from rlhf_pipeline.runtime.hub import commit_of, is_commit

_FOLDER = "rlhf_pipeline.data.sources"
_HUB, _TABLE = (
    tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text(encoding="utf-8"))
    for name in ("column_maps", "registry")
)
MODULES: dict[str, str] = {
    "synthetic": f"{_FOLDER}.synthetic",
    TASKS: f"{_FOLDER}.generated_tasks",
    "files": f"{_FOLDER}.adapter",
    **{name: f"{_FOLDER}.column_maps" for rows in _HUB.values() for name in rows},
}
"""Name of each source -> full name of its module, in the order of docs/data.md. After a change to
one of them, only its sources are read again."""
SOURCE = Door("source", {name: f"{module}:SOURCES" for name, module in MODULES.items()})
"""A `Source`, or a tuple in which it has the name."""


def find_source(config: SourceConfig) -> Source:
    """The source of a configuration, whose `columns` replace those of the source.

    Raises ConfigError if there is none; with `columns`, each name with a slash is one on the hub.
    """
    name = config.name
    if _is_new(name):
        if config.columns is None:
            raise ConfigError(
                f"found source {name!r}{suggestion(name, MODULES)}, expected {', '.join(MODULES)}. "
                "Fix: correct the name, or set `columns`, with which any data set of the hub is one"
            )
        return Source(name, "any", columns=config.columns)
    found = SOURCE.load(name)
    source = next(each for each in found if each.name == name) if name in MODULES else found
    if not isinstance(source, Source):
        raise ConfigError(f"found {source!r} at {SOURCE.place(name)}, expected a Source")
    if config.columns is None:
        return source
    return replace(source, kind="any", columns=config.columns, parse=None, assemble=None)


def adapter_module(name: str) -> str:
    """Full name of the module that defines a source; raises ConfigError if there is none."""
    return MODULES["files"] if _is_new(name) else SOURCE.place(name).partition(":")[0]


def _is_new(name: str) -> bool:
    """Whether only the hub may know a name."""
    return "/" in name and name not in SOURCE.names()


def carried(config: SourceConfig) -> tuple[str, ...]:
    """The further columns of a source for rewards and judges."""
    return (config.columns.extra or ()) if config.columns else find_source(config).extra


def source_origin(config: SourceConfig) -> tuple[dict[str, Path], dict[str, str]]:
    """What decides the rows besides the configuration: local files, and identities of remote ones
    or the commit on the hub.

    Raises ConfigError if the source is unknown or a field does not fit it; DataError if a file is
    missing, or the hub is unreachable.
    """
    source = find_source(config)
    if source.generate is not None:
        for field in ("path", "revision", "subset", "split"):
            found, known = getattr(config, field), source.accepts.get(field, ())
            if found not in (None, *known):
                raise ConfigError(
                    f"source {config.name!r}: found {field} {found!r}, expected "
                    f"{' or '.join((*known, 'none'))}. Fix: correct or remove {field}"
                )
        return {}, {}
    if config.path is not None:
        if config.split is not None and find_files(config.path).saved is None:
            raise ConfigError(
                f"source {config.name!r}: found split {config.split!r} with path {config.path}, "
                "expected a folder written by `save_to_disk`. Fix: remove `split`, and set `path` "
                "to the files of the split."
            )
        return origin(config.path)
    if source.local_only:
        raise ConfigError(
            f"source {config.name!r}: path is not set. Fix: set it, for example to "
            "data/01_raw/pairs.jsonl."
        )
    try:
        revision = config.revision or source.revision
        return {}, {"revision": commit_of("dataset", source.name, revision)}
    except LookupError as error:
        raise DataError(
            f"source {source.name!r}: {error}. Fix: check the network, set the source's `revision` "
            "to a downloaded commit, or set its `path`."
        ) from error


def read(config: SourceConfig, seed: int, revision: str | None = None) -> Records:
    """Yield every row's place with its record, or with the reason why it has none, in fixed order.

    A place is "file.jsonl:17" or "Anthropic/hh-rlhf:train:17". Memory is constant. `seed` is for
    generated sources; `revision` is the commit from `source_origin`.
    """
    source = find_source(config)
    if source.generate is not None:
        yield from source.generate(config, seed)
        return
    split, parse = config.split or source.split, source.parse
    columns = _columns(source, config)
    if isinstance(columns, ColumnMap):
        parse, columns = parser(columns, strip=source.strip), columns_of(columns)
    if config.path is None:
        rows = _hub_rows(source, config, columns, revision)
    else:
        rows = read_rows(config.path, columns, split)
    rows = islice(rows, config.samples)
    if parse is not None:
        records: Records = ((place, outcome(parse, row)) for place, row in rows)
    else:
        assert source.assemble is not None, f"{source.name} has no function to parse rows"
        records = source.assemble(rows)
    for place, record in records:
        yield place, (record_fault(record) or record)


class FirstRows(dict[str, Example]):
    """The examples in a source's first rows, by place; none of those on the hub or in a store."""

    is_whole = False
    """Whether the source has no other rows, or others of the same generator."""
    is_uniform = False
    """Whether no other row of the source can have a form, such as two answers, that these lack."""


def first_rows(config: SourceConfig, max_bad_fraction: float) -> FirstRows:
    """The examples in a source's first rows. Raises DataError if a file is missing, empty or
    damaged, or too many of the rows are bad."""
    limit, source, found = 1000, find_source(config), FirstRows()
    if source.generate is not None:
        limit = len(config.tasks or range(8))
    elif config.path is None or "://" in config.path:
        return found
    samples, counts = min(config.samples or limit, limit), RowCounts()
    rows = read(config.model_copy(update={"samples": samples}), seed=0)
    for counts.rows, (place, record) in enumerate(rows, start=1):
        if isinstance(record, Unused):
            counts.add_unused(place, record)
        elif isinstance(record, Example):
            found[place] = record
    is_bad = max_bad_fraction == 0 or counts.bad.total() == counts.rows
    if is_bad or counts.rows < samples:  # else the other rows may make up for them
        counts.check_bad_fraction(max_bad_fraction, config.label())
    in_file = counts.rows < limit or config.samples == samples
    found.is_whole = found.is_uniform = source.generate is not None or in_file
    columns = _columns(source, config) if found else ()
    if isinstance(columns, ColumnMap) and not found.is_whole:
        found.is_uniform = not (columns.messages or columns.label or columns.reference)
    return found


def _columns(source: Source, config: SourceConfig) -> ColumnMap | tuple[str, ...]:
    """The columns of a source; those of a format of TRL if nothing names any. Raises DataError if
    the first sound row fits none of the formats."""
    if source.columns or source.parse or source.assemble or config.path is None:
        return source.columns
    rows = read_rows(config.path, (), config.split or source.split)
    sound = (row for _, row in rows if not isinstance(row, Unused))
    try:
        return known_columns(next(sound, {"prompt": None}))  # without a sound row, any map will do
    except MalformedRowError as error:
        raise DataError(f"source {config.label()}: {error}") from None


def known_columns(names: Collection[str]) -> ColumnMap:
    """The column map of a table in one of TRL's formats, by the names of its columns. Raises
    MalformedRowError with the line to add if the names fit none of the formats, or several."""
    if {*names} - {"tools"} == {"prompt"}:  # beside it, another column may be the answer
        return ColumnMap(prompt="prompt", tools="tools" if "tools" in names else None)
    if {*names} == {"text"}:
        raise MalformedRowError(
            "column 'text' is a document, not a prompt. Fix: list the source in "
            "split.pretraining.sources, with the line columns: {text: text}"
        )
    found = [form for form in _TABLE["formats"] if {*form.values()} <= {*names}]
    whole = [form for form in found if not any({*form} < {*other} for other in found)]
    # `label` marks bad answers, so a form without it would learn them.
    if len(whole) == 1 and ("label" in whole[0] or "label" not in names):
        tools = {"tools": "tools"} if "tools" in names else {}
        return ColumnMap.model_validate(whole[0] | tools)
    others = next(each["maps"] for each in _TABLE["examples"] if {*each["columns"]} <= {*names})
    lines = [f"columns: {form}".replace("'", "") for form in found or others]
    raise MalformedRowError(
        f"the columns do not say which of them to read; they are {', '.join(map(repr, names))}. "
        f"Fix: add to the source a line such as {' or '.join(lines)}"
    )


def _hub_rows(
    source: Source, config: SourceConfig, columns: tuple[str, ...], revision: str | None
) -> Iterator[tuple[str, Row | Unused]]:
    import datasets  # imported late: the import takes a second

    split, named = config.split or source.split, config.revision or source.revision
    revision = revision or named
    # The hub's conversion has one folder per subset, and no metadata about them.
    subset_by = "data_dir" if CONVERTED in (source.revision, named) else "name"
    where = {subset_by: config.subset or source.subset}
    try:
        builder = datasets.load_dataset_builder(source.name, revision=revision, **where)
        if is_commit(revision) and builder.hash != revision:
            # If `datasets` cannot download a revision, it silently uses another one of its cache.
            only = f"the local cache contains only {builder.hash}"
            raise FileNotFoundError(f"not available on the hub; {only}")
        builder.download_and_prepare()
        rows = builder.as_dataset(split=split)
    # `datasets` raises RuntimeError for a repository with a loading script.
    except (OSError, RuntimeError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"source {source.name!r} (revision {revision or 'newest'}) cannot be loaded from the "
            f"hub: {error}. Fix: check subset, split, revision and the "
            "network, or download the data and set the source's `path`."
        ) from error
    for number, row in data_set_rows(rows, columns):
        yield f"{source.name}:{split}:{number - 1}", row


def record_fault(record: Record | Unused) -> Unused | None:
    """The fault of a record by the rules for all sources, or None."""
    if isinstance(record, Unused):
        return None
    if isinstance(record, Text):
        if not record.text.strip():
            return Unused("the text is blank", bad=False)
        texts = [record.text]
    else:
        if reason := _example_fault(record):
            return Unused(reason)
        turns = (text for turn in record.prompt for text in (turn.content, turn.further))
        others = (record.chosen, record.rejected, record.reference, record.tools)
        texts = [text for text in (*turns, *others) if text]
    if any("\0" in text for text in texts):
        return Unused("a NUL character in the text")
    return None if all(map(is_utf8, texts)) else Unused("half a surrogate pair, not a character")


def _example_fault(example: Example) -> str | None:
    roles = [message.role for message in example.prompt]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if not turns or turns[-1] not in ("user", "tool"):
        return "the prompt does not end with a user's turn"
    follows = {"user": ["assistant"], "assistant": ["user", "tool"], "tool": ["assistant", "tool"]}
    pairs = pairwise(["assistant", *turns])
    if turns[0] == "tool" or any(last not in follows.get(role, ()) for last, role in pairs):
        return "the prompt's turns are not user and assistant in alternation"
    if not all(message.content.strip() or message.further for message in example.prompt):
        return "a turn of the prompt is empty"
    for name, answer in (("chosen", example.chosen), ("rejected", example.rejected)):
        if answer is not None and not answer.strip():
            return f"the {name} answer is empty"
    if example.chosen and example.rejected and example.chosen.strip() == example.rejected.strip():
        return "the two answers are equal"
    return None
