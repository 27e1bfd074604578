from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from rlhf_pipeline.config.split import SplitConfig
from rlhf_pipeline.data.phase_files import TABLES, PhaseFile, Row, RowMaker, summary
from rlhf_pipeline.data.tokenization import Limited, Tokenized
from rlhf_pipeline.errors import DataError

QUESTION = [{"role": "user", "content": "Why?"}]
EXAMPLE = {"id": "own:1", "prompt": QUESTION, "reference": None}
TABLE = {table.path: table for table in TABLES}


def limits(prompt: int = 100, response: int = 100, **changes: str) -> SplitConfig:
    return SplitConfig(
        sources=[{}], max_prompt_tokens=prompt, max_response_tokens=response, **changes
    )


def make(config: SplitConfig, tokens: Tokenized, bos_id: int | None = None) -> Row:
    return RowMaker(config, bos_id).make("own", EXAMPLE, tokens, "sft")


def row(name: str = "own:1", prompt: Limited | None = None, **answers: Limited) -> Row:
    prompt = prompt or Limited([5, 6])
    example = EXAMPLE | {"id": name}
    return Row("own", example, prompt, answers, prompt, [False] * len(prompt.ids))


class TestRowMaker:
    def test_a_comparison(self) -> None:
        made = make(limits(), Tokenized("own:1", [5, 6], [7, 1], [8, 1], None))
        assert made == row(chosen=Limited([7, 1]), rejected=Limited([8, 1]))

    def test_a_dialogue_has_its_own_limit_check(self) -> None:
        turns = ([5, 7, 7, 1, 6], [False, True, True, True, False])
        tokens = Tokenized("own:1", [5, 7, 1, 6], [8, 1], None, turns)
        made = make(limits(prompt=4, over_long_prompts="drop"), tokens)
        assert (made.prompt.dropped, made.dialogue.dropped) == (
            None,
            "prompt over max_prompt_tokens=4",
        )
        with pytest.raises(DataError, match="own:1: the prompt has 5 tokens"):
            make(limits(prompt=4), tokens)


class TestPhaseFile:
    @staticmethod
    def write(
        tmp_path, path: str, *batches: list[Row], config: SplitConfig | None = None
    ) -> tuple[PhaseFile, dict]:
        wanted = np.arange(100) % 10 == 0
        file = PhaseFile(TABLE[path], tmp_path, wanted, duplicates_merged=3)
        start = 0
        for rows in batches:
            file.add(rows, np.arange(start, start + len(rows)) * 10, config or limits())
            start += len(rows)
        file.close()
        return file, pa.ipc.open_stream(pa.memory_map(str(tmp_path / path))).read_all().to_pydict()

    @pytest.mark.parametrize("path", ["ppo/train.arrow", "evaluation/test.arrow"])
    def test_ppo_and_the_evaluation(self, tmp_path, path) -> None:
        solved = row("own:2", Limited([7]))
        solved.example["reference"] = "4"
        _, columns = self.write(tmp_path, path, [row()], [], [solved])
        assert columns == {
            "id": ["own:1", "own:2"],
            "prompt_ids": [[5, 6], [7]],
            "source": ["own"] * 2,
            "messages": [QUESTION] * 2,
            "reference": [None, "4"],
        }

    def test_dropped_rows_are_counted_once_by_their_first_fault(self, tmp_path) -> None:
        fits, cut, long = (
            Limited([8, 1]),
            Limited([8], cut="cut"),
            Limited([8, 8, 1], dropped="long answer"),
        )
        file, columns = self.write(
            tmp_path,
            "reward_model/train.arrow",
            [
                row("own:1", chosen=fits, rejected=fits),
                row("own:2", Limited([5, 5], dropped="long prompt"), chosen=long, rejected=fits),
                row("own:3", chosen=fits, rejected=long),
            ],
            [
                row("own:4", chosen=cut, rejected=long),  # None, so not counted as cut
                row("own:5", chosen=cut, rejected=cut),
            ],
        )
        assert columns["id"] == ["own:1", "own:5"]
        assert np.concatenate(file.written).tolist() == [0, 40]
        assert file.describe() == {
            "rows": 2,
            "duplicates_merged": 3,
            "dropped": {"long prompt": 1, "long answer": 2},
            "truncated": {"cut": 2},
            "tokens": {
                "prompt_ids": {"total": 4, "max": 2, "p50": 2, "p90": 2, "p99": 2},
                "chosen_ids": {"total": 3, "max": 2, "p50": 1, "p90": 2, "p99": 2},
                "rejected_ids": {"total": 3, "max": 2, "p50": 1, "p90": 2, "p99": 2},
            },
        }

    def test_sft_measures_the_dialogue_and_the_others_the_prompt(self, tmp_path) -> None:
        long, sound = Limited([5, 5], dropped="long"), row("own:2", chosen=Limited([1]))
        mixed = replace(row(prompt=Limited([5]), chosen=Limited([1])), dialogue=long)
        for path, ids in (("sft/train.arrow", ["own:2"]), ("ppo/train.arrow", ["own:1", "own:2"])):
            assert self.write(tmp_path, path, [mixed, sound])[1]["id"] == ids

    def test_a_file_that_loses_all_its_rows_is_an_error(self, tmp_path) -> None:
        long = row(chosen=Limited([8, 8, 1], dropped="chosen answer over max_response_tokens=2"))
        with pytest.raises(DataError) as error:
            self.write(tmp_path, "sft/train.arrow", [long, long])
        assert str(error.value) == (
            "sft/train.arrow: all 2 rows were dropped ({'chosen answer over "
            "max_response_tokens=2': 2}). Fix: raise split.max_prompt_tokens or "
            "split.max_response_tokens."
        )


def test_percentiles_are_lengths_that_occur() -> None:
    # 10 lengths: 1 1 1 1 1 2 2 2 2 9; the 5th is the median, the 9th the 90th percentile
    assert summary(Counter({2: 4, 9: 1, 1: 5})) == {
        "total": 22,
        "max": 9,
        "p50": 1,
        "p90": 2,
        "p99": 9,
    }
    assert summary(Counter({1: 99, 7: 1}))["p99"] == 1
    assert summary(Counter({1: 98, 7: 1}))["p99"] == 7  # 99 rows: the 99th
    assert summary(Counter({3: 1})) == {"total": 3, "max": 3, "p50": 3, "p90": 3, "p99": 3}
