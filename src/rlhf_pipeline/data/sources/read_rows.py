"""Reading a source: where its rows come from, and the one loop that turns them into checked records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from rlhf_pipeline.config.split import SourceConfig
from rlhf_pipeline.data.files.location import find
from rlhf_pipeline.data.files.origin import Origin, origin
from rlhf_pipeline.data.files.rows import read_rows
from rlhf_pipeline.data.records import Example, Record, Text, Unused
from rlhf_pipeline.data.sources.adapter import CONVERTED, Row, Source, outcome
from rlhf_pipeline.data.sources.lookup import find_source
from rlhf_pipeline.errors import ConfigError, DataError
from rlhf_pipeline.hub import commit_of, is_commit

_HUB_BATCH_ROWS = 1_000


def source_origin(config: SourceConfig) -> Origin:
    """What decides a source's rows beside its configuration: the files it reads, or the commit on the hub.

    Raises:
        ConfigError: the source is unknown, is given a field it cannot honour, or lacks its path.
        DataError: a file is missing, or the hub cannot be asked.
    """
    source = find_source(config.name)
    if source.generate is not None:
        _refuse(config, "path", "revision", "subset", "split")
        return Origin({}, {})
    if config.path is not None:
        if config.split is not None and find(config.path).saved is None:
            raise ConfigError(
                f"source {config.name!r}: split {config.split!r} is for folders written by `save_to_disk`, and "
                f"{config.path} is none. Remove `split`, and name the split's own files in `path`."
            )
        return origin(config.path)
    if source.local_only:
        raise ConfigError(
            f"source {config.name!r} reads files: set its `path`, for example to data/01_raw/pairs.jsonl."
        )
    return Origin({}, {"revision": _hub_commit(source, config)})


def read(
    config: SourceConfig, seed: int, revision: str | None = None
) -> Iterator[tuple[str, Record | Unused]]:
    """Every row's place ("file.jsonl:17", "Anthropic/hh-rlhf:train:17") with its record, or why it has none.

    The order is fixed, and memory does not grow with the number of rows. `seed` decides generated sources only;
    `revision` is the commit that `source_origin` found.
    """
    source = find_source(config.name)
    if source.generate is not None:
        yield from source.generate(config, seed)
        return
    parse = source.parser(config.columns) if source.parser is not None else source.parse
    rows = islice(_rows(source, config, revision), config.samples)
    if parse is not None:
        records = _parsed(rows, parse)
    else:
        assert source.assemble is not None, f"{source.name} has no way to read a row"
        records = _assembled(rows, source.assemble)
    for place, record in records:
        yield place, (_fault(record) or record)


def _parsed(
    rows: Iterable[tuple[str, Row | Unused]], parse: Callable[[Row], Record]
) -> Iterator[tuple[str, Record | Unused]]:
    for place, row in rows:
        yield place, row if isinstance(row, Unused) else outcome(parse, row)


def _assembled(
    rows: Iterable[tuple[str, Row | Unused]],
    assemble: Callable[[Iterable[tuple[str, Row]]], Iterator[tuple[str, Record | Unused]]],
) -> Iterator[tuple[str, Record | Unused]]:
    """Sound rows through `assemble`; broken ones, met on the way, as they are."""
    broken: list[tuple[str, Unused]] = []

    def sound() -> Iterator[tuple[str, Row]]:
        for place, row in rows:
            if isinstance(row, Unused):
                broken.append((place, row))
            else:
                yield place, row

    for placed in assemble(sound()):
        yield from broken
        broken.clear()
        yield placed
    yield from broken


# --- rows -----------------------------------------------------------------------------------------


def _rows(
    source: Source, config: SourceConfig, revision: str | None
) -> Iterator[tuple[str, Row | Unused]]:
    split = config.split or source.split
    if config.path is not None:
        return read_rows(config.path, source.columns_read(config.columns), split)
    return _hub_rows(source, config, split, revision)


def _hub_rows(
    source: Source, config: SourceConfig, split: str, revision: str | None
) -> Iterator[tuple[str, Row]]:
    import datasets  # takes a second to import, and only the hub needs it

    revision = revision or config.revision or source.revision
    # The hub's own conversion has a folder for each subset, and nothing that says so.
    subset_by = "data_dir" if source.revision == CONVERTED else "name"
    where = {subset_by: config.subset or source.subset}
    try:
        builder = datasets.load_dataset_builder(
            source.hub or source.name, revision=revision, **where
        )
        if is_commit(revision) and builder.hash != revision:
            # Where `datasets` cannot get what is asked for, it takes whatever else of the repository it finds in its cache.
            raise FileNotFoundError(
                f"the hub does not give it, and the local cache holds only {builder.hash}"
            )
        builder.download_and_prepare()
        rows = builder.as_dataset(split=split)
    # A RuntimeError tells of a repository with a loading script.
    except (OSError, RuntimeError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"source {source.name!r} (revision {revision or 'newest'}) cannot be loaded from the hub: {error}. "
            "Check subset, split, revision and the network, or download the data and set the source's `path`."
        ) from error
    columns = [column for column in source.columns if column in rows.column_names]
    index = 0
    for batch in rows.select_columns(columns).with_format("arrow").iter(_HUB_BATCH_ROWS):
        for row in batch.to_pylist():
            yield f"{source.name}:{split}:{index}", row
            index += 1


def _hub_commit(source: Source, config: SourceConfig) -> str:
    try:
        return commit_of("dataset", source.hub or source.name, config.revision or source.revision)
    except LookupError as error:
        raise DataError(
            f"source {source.name!r}: {error}. Check the network, set the source's `revision` to a commit that was downloaded "
            "before, or set its `path`."
        ) from error


# --- checks ---------------------------------------------------------------------------------------


def _fault(record: Record | Unused) -> Unused | None:
    """What is wrong with a record by the rules that hold for every source."""
    match record:
        case Example():
            reason = _example_fault(record)
            texts = [
                *(message.content for message in record.prompt),
                record.chosen or "",
                record.rejected or "",
            ]
        case Text():
            if not record.text.strip():
                return Unused("the text is blank", bad=False)
            reason, texts = None, [record.text]
        case _:
            return None
    return Unused(reason) if (reason := reason or _encoding_fault("".join(texts))) else None


def _example_fault(example: Example) -> str | None:
    roles = [message.role for message in example.prompt]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if not turns or turns[-1] != "user":
        return "the prompt does not end with a user's turn"
    if turns != ["user" if index % 2 == 0 else "assistant" for index in range(len(turns))]:
        return "the prompt's turns are not user and assistant in alternation"
    if not all(message.content.strip() for message in example.prompt):
        return "a turn of the prompt is empty"
    for name, answer in (("chosen", example.chosen), ("rejected", example.rejected)):
        if answer is not None and not answer.strip():
            return f"the {name} answer is empty"
    if example.chosen and example.rejected and example.chosen.strip() == example.rejected.strip():
        return "the two answers are equal"
    return None


def _encoding_fault(text: str) -> str | None:
    if "\0" in text:
        return "a NUL character in the text"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "half a surrogate pair, which is no character"
    return None


def _refuse(config: SourceConfig, *fields: str) -> None:
    """ConfigError where a source is given a field that it cannot honour."""
    for field in fields:
        if getattr(config, field) is not None:
            raise ConfigError(
                f"source {config.name!r} has no use for {field}: {getattr(config, field)!r}. "
                "Remove it, or use another source."
            )
