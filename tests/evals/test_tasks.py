"""What is asked of a document: prompts, token counts and choices, against what others count."""

import hashlib
import os
import pathlib
import random

import pytest

from depthjax.data import load_tokenizer
from depthjax.errors import InputError
from depthjax.evals import TASKS, Document, encode_documents, encode_pairs, read_rows, task_named
from depthjax.evals.sources import default_folder

DOCUMENTS = str(pathlib.Path(__file__).parent / "documents")

# Tokens in all, and of the context, of each document in DOCUMENTS under DepthBench's prompts and
# tokenizer, counted by a program that shares nothing with depthjax but the tokenizers library.
COUNTED = {
    "humaneval": "181 122, 242 129, 96 87, 151 118, 156 121, 149 92, 219 118, 120 104",
    "gsm8k": "119 68, 74 30, 177 53, 72 36, 197 110, 204 57, 126 46, 216 68",
    "math500": "246 52, 434 103, 140 54, 150 19, 440 360, 234 46, 151 26, 363 78",
}


@pytest.fixture(scope="module")
def neox():
    return load_tokenizer("neox")


@pytest.mark.parametrize("name", COUNTED)
def test_tokens_of_real_documents(neox, name):
    task = task_named(name)
    pairs = encode_documents(neox, task.documents(read_rows(task, DOCUMENTS)))
    assert ", ".join(f"{len(pair.ids)} {pair.start}" for pair in pairs) == COUNTED[name]


# documents, tokens of all completions, tokens of the longest pair, of whole datasets, by the same
# program.
WHOLE = {
    "mbpp": (500, 35_747, 2739),
    "humaneval": (164, 10_444, 618),
    "sciq_validation": (1000, 89_415, 587),
    "gsm8k": (1319, 129_391, 405),
    "math500": (500, 101_533, 1484),
    "arc_easy": (2376, 42_720, None),
}


@pytest.mark.proof
@pytest.mark.parametrize("name", WHOLE)
def test_tokens_of_whole_datasets(neox, name):
    """After `depthjax eval fetch`; DEPTHJAX_EVALS names another folder."""
    folder = os.environ.get("DEPTHJAX_EVALS", str(default_folder()))
    if not (pathlib.Path(folder) / f"{name}.jsonl.gz").exists():
        pytest.skip(f"no {name} in {folder}: run `depthjax eval fetch`")
    task = task_named(name)
    documents = task.documents(read_rows(task, folder))
    pairs = encode_documents(neox, documents)
    found = len(documents), sum(pair.targets for pair in pairs)
    assert found == WHOLE[name][:2]
    longest = max(len(pair.ids) for pair in pairs)
    assert WHOLE[name][2] in (longest, None)


def asked(name: str, **row) -> Document:
    return TASKS[name].documents([row])[0]


def test_mbpp_has_three_test_lines_and_ends_its_code():
    code = "def one():\r\n    return 1"
    document = asked("mbpp", text="Return one.", code=code, test_list=["assert one() == 1"])
    prompt = (
        "You are an expert Python programmer, and here is your task: Return one. Your code should "
        "pass these tests:\n\nassert one() == 1\n\n\n[BEGIN]\n"
    )
    assert document.pairs == ((prompt, code + "\n"),)
    ended = asked("mbpp", text="", code=code + "\n", test_list=[])
    assert ended.pairs[0][1] == code + "\n"


def test_a_space_stands_between_prompt_and_completion_unless_there_is_one():
    row = {"question": "Why?", "correct_answer": "air", "support": "It is."}
    expected = ("Question: Why?\nAnswer:", " air\nExplanation: It is.")
    assert asked("sciq", **row).pairs == (expected,)
    assert asked("gsm8k", question="2?", answer="\n2").pairs[0][1] == "\n2"
    assert asked("humaneval", prompt="a:", canonical_solution="b").pairs == (("a:", "b"),)
    math = asked("math500", problem="1+1", solution="", answer="2")
    assert math.pairs == (("Problem:\n1+1\n\nSolution:", " 2"),)


def gpqa_row(**changes) -> dict:
    """A question of ours in GPQA's columns: the real ones are not to be published."""
    row = {
        "Record ID": "recInvented01",
        "Question": " Which gas do plants take in? ",
        "Correct Answer": "carbon dioxide\n",
        "Incorrect Answer 1": "argon",
        "Incorrect Answer 2": " helium",
        "Incorrect Answer 3": "neon",
        "Explanation": "Photosynthesis fixes it.",
    }
    return row | changes


def test_gpqa_orders_its_choices_by_the_id_of_the_record():
    prompt, completion = asked("gpqa_diamond", **gpqa_row()).pairs[0]
    order = ["carbon dioxide", "argon", "helium", "neon"]
    digest = hashlib.sha256(b"recInvented01").hexdigest()[:16]
    random.Random(int(digest, 16)).shuffle(order)
    lines = prompt.split("\n")
    assert lines[:2] == ["Question: Which gas do plants take in?", "Choices:"]
    assert lines[2:] == [f"{letter}. {c}" for letter, c in zip("ABCD", order, strict=True)] + [
        "Answer:"
    ]
    assert completion == " carbon dioxide\nExplanation: Photosynthesis fixes it."
    orders = {asked("gpqa_diamond", **gpqa_row(**{"Record ID": str(i)})).pairs[0] for i in range(9)}
    assert len(orders) > 1
    bare = asked("gpqa_diamond", **gpqa_row(Explanation=None))
    assert bare.pairs[0][1] == " carbon dioxide"


ARC = {"choices": {"text": ["ice", "fog"], "label": ["1", "2"]}, "answerKey": "2"}
CHOICES = {  # rows of ours in the hub's columns -> (contexts, completions, gold)
    "arc_easy": (
        {"question": "What floats?", **ARC},
        (["Question: What floats?\nAnswer:"] * 2, [" ice", " fog"], 1),
    ),
    "openbookqa": (
        {"question_stem": "Clouds are", **ARC},
        (["Clouds are"] * 2, [" ice", " fog"], 1),
    ),
    "hellaswag": (
        {
            "activity_label": "Skating",
            "ctx_a": "A man stands [step] on ice.",
            "ctx_b": "he",
            "endings": ["[header] Falls.", "sings [title] loudly"],
            "label": "0",
        },
        (["Skating: A man stands on ice. He"] * 2, ["  Falls.", " sings. loudly"], 0),
    ),
    "piqa": (
        {"goal": "cool", "sol1": "ice ", "sol2": "fire", "label": 0},
        (["Question: cool\nAnswer:"] * 2, [" ice ", " fire"], 0),
    ),
    "social_iqa": (
        {
            "context": "Al left.",
            "question": "Why?",
            **{f"answer{x}": x.lower() for x in "ABC"},
            "label": "3",
        },
        (["Q: Al left. Why?\nA:"] * 3, [" a", " b", " c"], 2),
    ),
    "winogrande": (
        {"sentence": "Al beat Bo as _ ran. ", "option1": "Al", "option2": "Bo", "answer": "1"},
        (["Al beat Bo as Al", "Al beat Bo as Bo"], [" ran.", " ran."], 0),
    ),
}


@pytest.mark.parametrize("name", CHOICES)
def test_choices(name):
    row, (contexts, completions, gold) = CHOICES[name]
    document = asked(name, **row)
    assert document.pairs == tuple(zip(contexts, completions, strict=True))
    assert document.gold == gold
    if "acc_norm" in TASKS[name].measures:
        assert document.sizes == tuple(len(completion) - 1 for completion in completions)


def test_a_choice_row_may_be_made_already():
    document = asked("hellaswag", query="So: it", choices=[" is", "was"], gold=1)
    assert document == Document((("So: it", "  is"), ("So: it", " was")), 1, (3, 3))


@pytest.mark.parametrize(
    ("name", "row", "words"),
    [
        ("gsm8k", {"question": "1"}, ["document 1 of gsm8k", "'answer'", "openai/gsm8k"]),
        ("mbpp", {"text": "", "code": 3, "test_list": []}, ["document 1 of mbpp"]),
        ("humaneval", {"prompt": "a", "canonical_solution": 3}, ["3 where text belongs"]),
        ("arc_easy", {"query": "", "choices": ["a"], "gold": 1}, ["answer 1 of 1"]),
        ("arc_easy", {"query": "", "choices": "ab", "gold": 1}, ["choices is 'ab'", "a list"]),
        ("mbpp", {"text": "", "code": "", "test_list": "ab"}, ["test_list is 'ab'", "a list"]),
        ("arc_easy", {"question": "", **ARC, "answerKey": "E"}, ["'E'"]),
        ("winogrande", {"sentence": "no gap", "answer": "1"}, ["gap"]),
    ],
)
def test_a_wrong_row_is_refused(name, row, words):
    with pytest.raises(InputError) as error:
        asked(name, **row)
    for word in words:
        assert word in str(error.value)


def test_an_unknown_task_is_refused():
    with pytest.raises(InputError, match=r"arc_esay.*arc_easy"):
        task_named("arc_esay")


def test_white_space_moves_to_the_completion(neox):
    """So that " world", the token of mid-text, is what is scored."""
    moved, plain = encode_pairs(neox, [("Hello ", "world"), ("Hello", " world")])
    assert moved == plain == ([12092, 1533], 1)  # as the tokenizer's authors number them


def test_the_cut_is_where_the_context_alone_ends(neox):
    context, whole = neox.encode_plain(["def f", "def foo():"])
    assert whole[: len(context)] != context  # the two are not the same tokens
    assert encode_pairs(neox, [("def f", "oo():")]) == [(whole, len(context))]


@pytest.mark.parametrize("context", ["", "\n "])
def test_the_end_of_text_stands_for_an_empty_context(neox, context):
    (pair,) = encode_pairs(neox, [(context, "Hello")])
    assert pair == ([neox.eos_id, *neox.encode_plain([context + "Hello"])[0]], 1)


def test_an_empty_completion_has_no_tokens(neox):
    (pair,) = encode_pairs(neox, [("Hello", "")])
    assert pair.targets == 0
