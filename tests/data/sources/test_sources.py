"""Every source of the hub: its published rows, and what becomes of them."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from rlhf_pipeline.config.split import TASKS, ColumnMap, SourceConfig
from rlhf_pipeline.data.records import Example, Message, Text, Unused
from rlhf_pipeline.data.sources.adapter import columns_of
from rlhf_pipeline.data.sources.registry import MODULES, adapter_module, carried, find_source, read
from rlhf_pipeline.errors import ConfigError

SHARED = Path(__file__).parents[3] / ".." / "shared" / "data"
HH, DAHOAS, YITINGXIE = "Anthropic/hh-rlhf", "Dahoas/rm-static", "yitingxie/rlhf-reward-datasets"
WEBGPT, SHP = "openai/webgpt_comparisons", "stanfordnlp/SHP"
DPO_MIX, ULTRAFEEDBACK = "argilla/dpo-mix-7k", "HuggingFaceH4/ultrafeedback_binarized"
CLEANED = "argilla/ultrafeedback-binarized-preferences-cleaned"
CAPYBARA = "argilla/distilabel-capybara-dpo-7k-binarized"
HELPSTEER, WIKITEXT = "nvidia/HelpSteer2", "Salesforce/wikitext"
ALPACA, GSM8K = "tatsu-lab/alpaca", "openai/gsm8k"


def asked(*turns, system=None):
    """A prompt of user, assistant, user ..."""
    start = () if system is None else (Message("system", system),)
    said = (Message("assistant" if n % 2 else "user", turn) for n, turn in enumerate(turns))
    return (*start, *said)


def skipped(reason):
    return Unused(reason, bad=False)


TIE = skipped("the two answers have the same score")
FISH = asked("How do I clean fish?", "With a sharp knife.", "And then?")
PRIMES = asked("Name a prime.", "Seven.", "A greater one.")
POST = asked(
    "SUBREDDIT: r/relationships\n\nTITLE: My friend is late\n\nPOST: He is always late.\n\nTL;DR:"
)
NOBEL = asked("In an interview right before receiving the 2013 Nobel prize, what did he say?")
NOTE = Example(asked("c#"), "C# is a language of Microsoft.", "A musical note.")
DIALOGUE = Example(asked("What is C#?", "A language.", "By whom?"), "Microsoft.", "Unknown.")
VALKYRIA = Text(
    "= Valkyria =\nValkyria is a <unk> game .\nIt sold well .\n= = Plot = =\nx = 3 and y = 4 ."
)
TOWER = Text("= Tower Building =\nThe Tower Building is in Little Rock .")

RECORDS = {
    HH: [Example(FISH, "Rinse it.", "Who cares?"),
         Unused("the dialogues differ before the last answer")],
    DAHOAS: [Example(FISH, "Rinse it in cold water.", "I don't know.")],
    "Dahoas/full-hh-rlhf": [Example(FISH, "Wash your hands.", "Nothing more\nto do.")],
    YITINGXIE: [Example(FISH, "Rinse it in cold water.", "I don't know.")],
    "Dahoas/synthetic-instruct-gptj-pairwise": [
        Example(asked("Describe the steps to change a tire."),
                "Loosen the nuts, jack up the car, swap the wheel.",
                "Call a friend. I am not sure.")],
    "trl-lib/tldr-preference": [Example(POST, "Friend is always late.", "I have a friend.")],
    WEBGPT: [Example(asked("Why is the sky blue?"),
                     "Air scatters blue light (Rayleigh) more than red.", "Because of the sea."),
             TIE],
    SHP: [Example(NOBEL, "That he would not get a job today.", "Who knows?"),
          Example(NOBEL, "Who knows?", "That he would not get a job today.")],
    ULTRAFEEDBACK: [Example(asked("Name a prime."), "Seven.", "Eight."), TIE],
    DPO_MIX: [Example(PRIMES, "Eleven.", "Nine."), TIE],
    CLEANED: [Example(asked("Name a prime."), "Seven.", "Eight.")],
    CAPYBARA: [Example(PRIMES, "Eleven.", "Nine.")],
    "argilla/distilabel-intel-orca-dpo-pairs": [
        Example(asked("Name a prime.", system="You are an AI assistant."), "Seven.", "Eight."),
        Example(asked("Name a prime."), "Seven.", "Eight."), TIE],
    "databricks/databricks-dolly-15k": [
        Example(asked("When did Virgin Australia start operating?\n\nIt commenced services on 31 "
                      "August 2000."), "On 31 August 2000."),
        Example(asked("Which is a species of fish? Tope or Rope"), "Tope")],
    ALPACA: [Example(asked("Identify the odd one out.\n\nTwitter, Instagram, Telegram"),
                     "Telegram"),
             Example(asked("Name a colour."), "Blue."), Example(asked("Draw a tree."), "")],
    GSM8K: [
        Example(asked("Natalia sold clips to 48 of her friends in April, and then she sold half as "
                      "many clips in May. How many clips did Natalia sell altogether in April and "
                      "May?"),
                "Natalia sold 48/2 = 24 clips in May.\nNatalia sold 48+24 = 72 clips altogether in "
                "April and May.\n#### 72", reference="72"),
        Example(asked("A car costs $1,000 and a van costs $350 more. What does the van cost?"),
                "The van costs $1000 + $350 = $1350.\n#### 1,350", reference="1350")],
    "trl-lib/tldr": [Example(POST, "My friend is always late, what now?")],
    "wangrui6/Zhihu-KOL": [Example(asked("怎么说服男朋友买烤箱"), "先请他吃一次烤鸡。")],
    "Cohere/miracl-zh-queries-22-12": [
        Example(asked("第一个发现太阳系的人是谁"), "哥白尼提出了日心说。", "月球是地球的卫星。"),
        skipped("the list of column 'positive_passages.0.text' is shorter")],
    "Cohere/miracl-ja-queries-22-12": [
        skipped("the list of column 'negative_passages.0.text' is shorter")],
    "Hello-SimpleAI/HC3-Chinese": [
        Example(asked("什么是通货膨胀"), "就是东西越来越贵。"),
        skipped("the list of column 'human_answers.0' is shorter")],
    "lmqg/qg_jaquad": [
        Example(asked("富士山の標高は何メートルか。"), "標高は3776メートルである。")],
    "lmqg/qag_jaquad": [Example(asked("富士山の標高は何メートルか。"),
                                "富士山は日本の山である。標高は3776メートルである。")],
    HELPSTEER: [NOTE, DIALOGUE, TIE],
    WIKITEXT: [VALKYRIA, TOWER],
}  # fmt: skip
"""The records of the rows in rows.json."""


@pytest.mark.parametrize("name", RECORDS)
def test_records(records, source_rows, name):
    """From all columns, and from those that the source declares; each of these is needed."""
    assert records(name) == RECORDS[name]
    read = find_source(SourceConfig(name=name)).columns
    names = columns_of(read) if isinstance(read, ColumnMap) else read
    columns = dict.fromkeys(column.partition(".")[0] for column in names)
    declared = [{column: row[column] for column in columns} for row in source_rows[name]]
    assert records(name, *declared) == RECORDS[name]
    for column in columns:
        without = [{key: row[key] for key in columns if key != column} for row in declared]
        reasons = [found.reason for found in records(name, *without) if isinstance(found, Unused)]
        assert any(reason.startswith(f"column '{column}") for reason in reasons)


def missing(column, found, expected="a string"):
    return Unused(f"column {column!r} is {found}, not {expected}")


ENDS = Unused("the dialogue does not end with the assistant")
DIFFER = Unused("the dialogues differ before the last answer")
STARTS = Unused("the dialogue does not start with a turn")
HUMAN = "\n\nHuman: a\n\nAssistant: b"
CHANGED = [
    (HH, {"chosen": HUMAN, "rejected": None}, missing("rejected", "NoneType")),
    (HH, {"chosen": HUMAN, "rejected": "\n\nHuman: c\n\nAssistant: d"}, DIFFER),
    (HH, {"chosen": HUMAN, "rejected": "\n\nHuman: a"}, ENDS),
    (HH, {"chosen": HUMAN.strip(), "rejected": HUMAN}, STARTS),
    (HH, {"chosen": "", "rejected": ""}, STARTS),
    # White space within a turn stays.
    (HH, {"chosen": "\n\nHuman: Why?\nHuman: he said.\n\nAssistant: Because.",
          "rejected": "\n\nHuman: Why?\nHuman: he said.\n\nAssistant:No\n\nand no\n"},
     Example(asked("Why?\nHuman: he said."), "Because.", "No\n\nand no")),
    (DAHOAS, {"prompt": "How do I clean fish?"}, STARTS),
    (DAHOAS, {"prompt": "\n\nHuman: Hi"}, ENDS),
    (DAHOAS, {"chosen": " Sure.\n\nHuman: And?\n\nAssistant: So."}, DIFFER),
    (DAHOAS, {"rejected": 3}, missing("rejected", "int")),
    (YITINGXIE, {"chosen": "Assistant: Rinse it.\n\nHuman: Why?\n\nAssistant: For health."},
     DIFFER),
    (YITINGXIE, {"rejected": "I don't know."}, ENDS),
    (WEBGPT, {"question": "Why?"}, missing("question", "str", "an object")),
    (WEBGPT, {"question": {"id": "5p3xkw"}}, Unused("column 'full_text' is missing")),
    (WEBGPT, {"score_0": None}, Unused("column 'score_0' is not a finite number")),
    *((WEBGPT, {"answer_1": cited}, Example(asked("Why is the sky blue?"), plain,
                                            "Because of the sea."))
      for cited, plain in (("So it is [1][2].", "So it is."),
                           ("So it is [1,2, 13] today.", "So it is today."),
                           ("[4] says so.", " says so."),
                           ("x[0] (see [note]) [a1] f(1)", "x (see [note]) [a1] f(1)"))),
    # A rating never turns a comparison round.
    *((name, {better: 1.0, worse: 9.0}, RECORDS[name][0]) for name, better, worse in (
        (ULTRAFEEDBACK, "score_chosen", "score_rejected"),
        (DPO_MIX, "chosen_rating", "rejected_rating"),
        (CLEANED, "chosen-rating", "rejected-rating"),
        (CAPYBARA, "rating_chosen", "rating_rejected"))),
    (SHP, {"labels": "0"}, RECORDS[SHP][1]),  # from CSV
    (SHP, {"labels": 2}, Unused("column 'labels' is neither 0 nor 1")),
    (SHP, {"labels": "A"}, Unused("column 'labels' is not a finite number")),
    *((GSM8K, {"answer": answer}, Unused("the answer has no result after ####"))
      for answer in ("It is 72.", "It is 72.\n####", "#### ,")),
    (GSM8K, {"answer": "72.5% of it\n#### -72.50 "},
     Example(RECORDS[GSM8K][0].prompt, "72.5% of it\n#### -72.50", reference="-72.50")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "expected"), CHANGED)
def test_a_changed_row(records, source_rows, name, changes, expected):
    assert records(name, source_rows[name][0] | changes) == [expected]


@pytest.mark.parametrize("space", ["", " ", "\n\n"])
def test_white_space_where_a_dialogue_is_cut_does_not_matter(records, space):
    prompt = "Human: How do I clean fish?\n\nAssistant: With a sharp knife.\n\nHuman: And then?"
    water, ignorance = "Rinse it in cold water.", "I don't know."
    before, after = (
        {"prompt": f"{space}{prompt}\n\nAssistant:", "chosen": water, "rejected": f" {ignorance}"},
        {"prompt": f"{space}{prompt}{space}", "chosen": f"\n\nAssistant: {water}",
         "rejected": f" Assistant:{ignorance}"},
    )  # fmt: skip
    assert records(YITINGXIE, before) == records(YITINGXIE, after) == RECORDS[YITINGXIE]


NEXT = Unused("the next row answers another prompt")


@pytest.mark.parametrize(("name", "places"), [(HELPSTEER, "024"), (WIKITEXT, ["1", "10"])])
def test_a_record_has_the_place_of_its_first_row(source_rows, name, places):
    placed = [(str(index), row) for index, row in enumerate(source_rows[name])]
    assemble = find_source(SourceConfig(name=name)).assemble
    assert [place for place, _ in assemble(placed)] == [*places]
    broken = Unused("not JSON")
    assert list(assemble([("a:1", broken)])) == [("a:1", broken)]


def test_pairs_of_answers(records, source_rows):
    """A missing or broken row affects only its partner; a broken one does not divide a pair."""
    rows = source_rows[HELPSTEER]
    assert records(HELPSTEER, rows[0], *rows[2:]) == [NEXT, DIALOGUE, TIE]
    assert records(HELPSTEER, *rows[:3]) == [NOTE, skipped("no row follows")]
    broken = rows[0] | {"helpfulness": None}
    assert records(HELPSTEER, broken, *rows[1:]) == [
        Unused("column 'helpfulness' is not a finite number"), NEXT, DIALOGUE, TIE,
    ]  # fmt: skip
    assert records(HELPSTEER, rows[0], Unused("not JSON"), rows[1]) == [Unused("not JSON"), NOTE]


def test_articles(records, source_rows):
    rows = source_rows[WIKITEXT]
    content = "\n".join(row["text"].rstrip("\n") for row in rows)
    cut = content.index(" It sold well")  # a text file is a few long rows
    assert records(WIKITEXT, {"text": content[:cut]}, {"text": content[cut:]}) == [VALKYRIA, TOWER]
    plot = Text("= = Plot = =\nx = 3 and y = 4 .")
    assert records(WIKITEXT, *rows[6:]) == [plot, TOWER]  # before the first title
    assert records(WIKITEXT, *rows[:5], {"text": None}) == [
        missing("text", "NoneType"),
        Text("= Valkyria =\nValkyria is a <unk> game .\nIt sold well ."),
    ]
    assert records(WIKITEXT, {"text": ""}, {"text": " \n"}) == []


def test_each_source_of_the_hub_has_records_here():
    assert RECORDS.keys() == MODULES.keys() - {"synthetic", TASKS, "files"}


def test_columns_make_a_source_of_any_data_set_of_the_hub():
    """They replace those of a named one, which keeps its split."""
    columns = {"prompt": "q", "chosen": "a.0", "rejected": "a.1", "extra": ["level"]}
    splits = {"lab/pairs": "train", ULTRAFEEDBACK: "train_prefs", HELPSTEER: "train"}
    for name, split in splits.items():
        config = SourceConfig(name=name, columns=columns)
        source = find_source(config)
        assert (source.name, source.kind, source.split) == (name, "any", split)
        assert source.columns == config.columns and source.assemble is None
        assert carried(config) == ("level",)
        assert adapter_module(name) == MODULES.get(name, MODULES["files"])


def test_an_unknown_name():
    hint = r"found source 'antropic/HH-rlhf'.*\(did you mean Anthropic/hh-rlhf\?\)"
    with pytest.raises(ConfigError, match=hint) as error:
        find_source(SourceConfig(name="antropic/HH-rlhf"))
    assert all(known in str(error.value) for known in MODULES)


@pytest.mark.parametrize("module", ["registry", "synthetic", "generated_tasks"])
def test_sources_are_named_and_made_without_heavy_libraries(module):
    folder = "rlhf_pipeline.data.sources"
    unused = {*MODULES.values()} - {f"{folder}.{module}", MODULES["files"]}
    heavy = {"datasets", "deepspeed", "kedro", "mlflow", "numpy", "pyarrow", "torch"} | unused
    program = f"import sys, {folder}.{module}\nassert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_real_dialogues():
    path = SHARED / "hh-rlhf" / "harmless-base-test.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"the real data is not there: {path}")
    rows = list(read(SourceConfig(name=HH, path=str(path)), 0))
    assert len(rows) == 2312 and rows[0][0] == f"{path.name}:1"
    # Checked by hand: four empty answers; in nine rows the Assistant speaks twice in a row, in
    # five of these in only one of the two dialogues.
    assert Counter(row.reason for _, row in rows if isinstance(row, Unused)) == {
        "the chosen answer is empty": 4,
        "the dialogues differ before the last answer": 5,
        "the prompt's turns are not user and assistant in alternation": 4,
    }
