"""`depthjax plan --pipeline`, as a user meets it."""

import pytest

from depthjax.cli import main


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--pipeline", *arguments])
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


def test_the_table_and_the_schedule(capsys, tmp_path):
    picture = tmp_path / "schedule.png"
    code, out, _ = run(capsys, "2,2,4,4", "--picture", str(picture))
    assert not code
    lines = [line.replace("│", " ").split() for line in out.splitlines()]
    held = {"nothing": "20", "sent": "22", "too": "24"}  # 4 x 3, 2 that wait of 0, 1, 2, and 2 x 4
    for keeps, sent in (("nothing", "6"), ("sent", "5"), ("too", "3")):
        line = next(line for line in lines if keeps in line and "rows" in line)
        formula, counted = line[line.index(keeps) + 1 :][:2]
        assert (formula, counted) == (sent, sent)
        assert line[-2:] == [held[keeps], "rows"]
    stages = [line[2:] for line in lines if line[:1] == ["stage"]]
    assert stages == [
        ["0a", "1a", "0b", "1b", "2a", "3a", "2b", "3b", "."],
        [".", "0a", "1a", "0b", "1b", "2a", "3a", "2b", "3b"],
    ]
    assert "a stage waits in 11.1% of them" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("4,2",), "pipeline is '4,2': give stages, passes and blocks, such as 4,2,8"),
        (("4,0,8",), "pipeline is 4,0,8: give positive numbers"),
        (("4,2,8,6",), "microbatches is 6, which 4 stages do not divide: use 4"),
        (("4,2,8", "--mesh.stage", "4"), "--mesh.stage is given beside pipeline"),
    ],
)
def test_bad_numbers_are_one_sentence(capsys, arguments, sentence):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert sentence in err
