from __future__ import annotations

import pytest
from pydantic import ValidationError

from rlhf_pipeline.config.block import Block, operational
from rlhf_pipeline.config.split import (
    PHASES,
    BlendedSourceConfig,
    ColumnMap,
    PretrainingConfig,
    SourceConfig,
    SplitConfig,
)


class Inner(Block):
    size: int = 1
    """How many."""

    port: int = operational(29500, ge=1024)
    """Where it listens."""


class Outer(Block):
    rate: float = 0.5
    workers: int = operational(2)
    one: Inner = Inner()
    several: tuple[Inner, ...] = (Inner(size=2), Inner(size=3))
    named: dict[str, Inner] = {"a": Inner(size=4)}  # noqa: RUF012 - pydantic copies it
    maybe: Inner | None = None


def split(**changes: object) -> SplitConfig:
    return SplitConfig(
        **{"sources": [{}], "max_prompt_tokens": 8, "max_response_tokens": 9} | changes
    )


class TestBlock:
    def test_recipe_leaves_out_operational_fields_at_every_depth(self) -> None:
        assert Outer().recipe() == {
            "rate": 0.5,
            "one": {"size": 1},
            "several": [{"size": 2}, {"size": 3}],
            "named": {"a": {"size": 4}},
            "maybe": None,
        }

    def test_recipe_ignores_operational_changes_alone(self) -> None:
        assert Outer(workers=7, one=Inner(port=2000)).recipe() == Outer().recipe()
        assert Outer(one=Inner(size=5)).recipe() != Outer().recipe()

    def test_an_operational_field_keeps_its_default_and_its_limits(self) -> None:
        assert Inner().port == 29500
        with pytest.raises(ValidationError, match="port"):
            Inner(port=80)

    def test_unknown_keys_and_later_changes_are_refused(self) -> None:
        with pytest.raises(ValidationError, match="sise"):
            Inner(sise=1)
        with pytest.raises(ValidationError, match="frozen"):
            Inner().size = 2

    def test_the_docstring_under_a_field_is_its_description(self) -> None:
        assert Inner.model_fields["size"].description == "How many."


class TestColumnMap:
    @pytest.mark.parametrize(
        "columns",
        [
            {"prompt": "p", "chosen": "c", "rejected": "r"},
            {"chosen": "c", "rejected": "r"},
            {"prompt": "p", "answers": ("a", "b"), "scores": ("s", "t")},
            {"prompt": "p", "response": "r"},
            {"response": "r"},
            {"messages": "m"},
            {"text": "t"},
            {"prompt": "question.full_text"},
            {"prompt": "p", "reference": "a"},
            {"prompt": "p", "chosen": "c", "rejected": "r", "reference": "c"},
        ],
    )
    def test_each_form_of_data(self, columns: dict[str, object]) -> None:
        assert ColumnMap(**columns).model_dump(exclude_none=True) == columns

    @pytest.mark.parametrize(
        ("columns", "named"),
        [
            ({}, "no column"),
            ({"chosen": "c"}, "chosen"),
            ({"prompt": "p", "chosen": "c"}, "chosen, prompt"),
            ({"prompt": "p", "answers": ("a", "b")}, "answers, prompt"),
            ({"prompt": "p", "text": "t"}, "prompt, text"),
            ({"reference": "a"}, "reference"),
            ({"text": "t", "reference": "a"}, "reference, text"),
            ({"response": "r", "messages": "m"}, "messages, response"),
        ],
    )
    def test_other_combinations_are_refused_with_the_known_ones(
        self, columns: dict[str, object], named: str
    ) -> None:
        with pytest.raises(
            ValidationError,
            match=f"found {named}; expected one of: chosen, prompt, rejected; ",
        ):
            ColumnMap(**columns)

    def test_answers_and_scores_come_in_pairs(self) -> None:
        with pytest.raises(ValidationError, match="answers"):
            ColumnMap(prompt="p", answers=("a",), scores=("s", "t"))


class TestSourceConfig:
    def test_default_needs_neither_network_nor_files(self) -> None:
        assert SourceConfig().name == "synthetic"

    def test_file_and_hub_revision_exclude_each_other(self) -> None:
        with pytest.raises(ValidationError, match="expected only one of them"):
            SourceConfig(name="Anthropic/hh-rlhf", path="a.jsonl", revision="main")

    def test_columns_are_for_your_own_files(self) -> None:
        assert SourceConfig(
            name="files", path="a.csv", columns={"text": "body"}
        ).columns == ColumnMap(text="body")
        with pytest.raises(
            ValidationError,
            match=r"source 'Anthropic/hh-rlhf' has fixed columns\. Fix: remove columns",
        ):
            SourceConfig(name="Anthropic/hh-rlhf", columns={"text": "body"})

    @pytest.mark.parametrize("samples", [0, -1])
    def test_samples_are_positive(self, samples: int) -> None:
        with pytest.raises(ValidationError, match="samples"):
            SourceConfig(samples=samples)

    @pytest.mark.parametrize(
        ("path", "label"),
        [
            (None, "files"),
            ("own.jsonl", "files (own.jsonl)"),
            ("/data/own/*.jsonl.gz", "files (*.jsonl.gz)"),
            ("s3://bucket/folder/", "files (folder)"),
            ("s3://bucket/part-?.csv", "files (part-?.csv)"),
            ("https://host/own.csv?$QUERY", "files (own.csv)"),
        ],
    )
    def test_label_contains_the_file_and_not_the_folder(self, path: str | None, label: str) -> None:
        assert SourceConfig(name="files", path=path).label() == label

    def test_label_contains_subset_and_split(self) -> None:
        assert (
            SourceConfig(name="stanfordnlp/SHP", subset="askbaking").label()
            == "stanfordnlp/SHP (askbaking)"
        )
        assert (
            SourceConfig(name="files", path="a/saved", split="test").label()
            == "files (test, saved)"
        )

    def test_path_and_hub_do_not_mix(self) -> None:
        for field in ("revision", "subset"):
            with pytest.raises(
                ValidationError,
                match=rf"found path \(files\) and {field} \(hub\); expected only one",
            ):
                SourceConfig(name="stanfordnlp/SHP", path="own.jsonl", **{field: "x"})

    def test_no_password_in_a_path(self) -> None:
        assert SourceConfig(name="files", path="s3://bucket/a@b.csv").path == "s3://bucket/a@b.csv"
        with pytest.raises(
            ValidationError, match="set the credentials of the store in the environment"
        ):
            SourceConfig(name="files", path="https://me:secret@host/own.csv")
        with pytest.raises(
            ValidationError, match="set the credentials of the store in the environment"
        ):
            SourceConfig(name="files", path="s3://me:sec/ret@bucket/own.csv")
        assert (
            SourceConfig(name="files", path="http://host:80/a@b.csv").path
            == "http://host:80/a@b.csv"
        )

    def test_no_query_in_a_path(self) -> None:
        for path in (
            "https://host/own.csv?Signature=secret",
            "https://host/own.csv?$NAME&sig=secret",
        ):
            with pytest.raises(
                ValidationError,
                match=r"export the query as an environment variable, and write \?\$NAME",
            ):
                SourceConfig(name="files", path=path)

    def test_the_folder_of_files_is_not_part_of_the_recipe(self) -> None:
        assert (
            SourceConfig(name="files", path="a/x.csv").recipe()
            == SourceConfig(name="files", path="b/x.csv").recipe()
        )


class TestBlendedSourceConfig:
    def test_by_default_all_rows_serve_all_phases(self) -> None:
        source = BlendedSourceConfig()
        assert (source.fraction, source.phases) == (1.0, None)

    @pytest.mark.parametrize("fraction", [0, -0.5, 1.001])
    def test_fraction_is_a_positive_share(self, fraction: float) -> None:
        with pytest.raises(ValidationError, match="fraction"):
            BlendedSourceConfig(fraction=fraction)

    def test_phases_are_known_ones(self) -> None:
        assert BlendedSourceConfig(phases=("ppo", "sft")).phases == ("ppo", "sft")
        with pytest.raises(ValidationError, match="phases"):
            BlendedSourceConfig(phases=("dpo",))

    def test_records_do_not_depend_on_the_blend(self) -> None:
        fields = {"name": "files", "path": "a.csv", "columns": {"prompt": "p"}, "samples": 7}
        assert BlendedSourceConfig(
            **fields, fraction=0.5, phases=("ppo",)
        ).records() == SourceConfig(**fields)
        assert type(BlendedSourceConfig(**fields).records()) is SourceConfig


class TestPretrainingConfig:
    def test_needs_text_and_a_length(self) -> None:
        with pytest.raises(ValidationError, match="sources"):
            PretrainingConfig(sources=[], block_tokens=8)
        with pytest.raises(ValidationError, match="block_tokens"):
            PretrainingConfig(
                sources=[{"name": "files", "path": "a.txt"}], block_tokens=1
            )  # one token has no next token
        with pytest.raises(ValidationError, match="block_tokens"):
            PretrainingConfig(sources=[{"name": "files", "path": "a.txt"}])


class TestSplitConfig:
    def test_defaults(self) -> None:
        config = split()
        assert config.sources == (BlendedSourceConfig(name="synthetic"),)
        assert config.weights == (2, 4, 4)
        assert (config.validation_fraction, config.test_fraction) == (0.02, 0.02)
        assert (config.over_long_prompts, config.over_long_responses) == ("error", "error")
        assert (config.sft_loss, config.pretraining, config.max_bad_fraction) == (
            "response",
            None,
            0.0,
        )

    @pytest.mark.parametrize(
        "weights", [(0, 0, 0), (1, -1, 1), (1, float("nan"), 1), (1, float("inf"), 1)]
    )
    def test_invalid_weights_are_refused(self, weights: tuple[float, ...]) -> None:
        with pytest.raises(
            ValidationError, match="expected finite, non-negative numbers, at least one positive"
        ):
            split(weights=weights)

    def test_a_phase_can_be_switched_off(self) -> None:
        assert split(weights=(1, 0, 0)).weights == (1, 0, 0)

    def test_held_out_fractions_must_leave_training_data(self) -> None:
        with pytest.raises(ValidationError, match="leave no prompt to train on"):
            split(validation_fraction=0.5, test_fraction=0.5)

    @pytest.mark.parametrize("field", ["max_prompt_tokens", "max_response_tokens"])
    def test_limits_are_required_and_positive(self, field: str) -> None:
        for value in (0, None):
            with pytest.raises(ValidationError, match=field):
                split(**{field: value})

    @pytest.mark.parametrize("field", ["over_long_prompts", "over_long_responses", "sft_loss"])
    def test_choices_are_known_ones(self, field: str) -> None:
        with pytest.raises(ValidationError, match=field):
            split(**{field: "cut"})

    def test_a_test_source_serves_no_phase(self) -> None:
        (source,) = split(sources=[{"phases": ["test"]}]).sources
        assert source.is_test
        assert not any(source.may_serve(phase) for phase in PHASES)
        (plain,) = split(sources=[{}]).sources
        assert not plain.is_test
        with pytest.raises(ValidationError, match=r"found test beside other phases in \['ppo', 't"):
            split(sources=[{"phases": ["ppo", "test"]}])

    def test_a_source_cannot_be_listed_twice(self) -> None:
        with pytest.raises(ValidationError, match="'synthetic' is listed twice"):
            split(
                sources=[{"fraction": 0.5, "phases": ["sft"]}, {"fraction": 0.7, "phases": ["ppo"]}]
            )
        files = [{"name": "files", "path": name} for name in ("a.jsonl", "b.jsonl")]
        assert split(sources=files).records() == [SourceConfig(**source) for source in files]
        assert (
            len(
                split(
                    sources=[{"name": "trl-lib/tldr", "split": name} for name in ("train", "test")]
                ).sources
            )
            == 2
        )

    def test_at_least_one_source(self) -> None:
        with pytest.raises(ValidationError, match="sources"):
            split(sources=[])
