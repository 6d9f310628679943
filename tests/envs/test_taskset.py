"""Tasks by number, from files and from functions."""

import json
import random

import pytest

from tandem.core.errors import ConfigError
from tandem.core.types import Role
from tandem.envs.taskset import generated, task, tasks_from


def write(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_rows_become_tasks(tmp_path):
    rows = [{"id": 7, "question": "q?", "answer": "a", "level": 3, "files": {"x.txt": "y"}}]
    path = write(tmp_path / "t.jsonl", rows)
    made = tasks_from(path, columns={"prompt": "question", "gold": "answer"}, system="S").get(0, 0)
    assert (made.id, made.files, made.private) == ("7", {"x.txt": "y"}, {"gold": "a", "level": 3})
    assert [(m.role, m.content) for m in made.messages] == [(Role.SYSTEM, "S"), (Role.USER, "q?")]


def test_other_forms(tmp_path):
    (tmp_path / "t.csv").write_text("prompt,answer\nhow?,so\nwhy?,thus\n")
    made = tasks_from(tmp_path / "t.csv", shuffle=False).first(5, seed=0)
    assert [each.id for each in made] == ["t.csv-1", "t.csv-2"]
    messages = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
    (tmp_path / "t.json").write_text(json.dumps([{"messages": messages}]))
    assert [m.role for m in tasks_from(tmp_path / "t.json").get(0, 0).messages] == ["user", "assistant", "user"]


def test_every_pass_has_its_own_order_and_the_same_one_again(tmp_path):
    taskset = tasks_from(write(tmp_path / "t.jsonl", [{"prompt": str(n), "id": n} for n in range(8)]))
    order = [taskset.get(1, index).id for index in range(16)]
    assert order == [taskset.get(1, index).id for index in range(16)]
    assert sorted(order[:8]) == sorted(order[8:]) == [str(n) for n in range(8)]
    assert order[:8] != order[8:] and order[:8] != [taskset.get(2, index).id for index in range(8)]


@pytest.mark.parametrize(
    ("content", "message", "hint"),
    [
        ('{"promt": "q"}', "t.jsonl row 1: no column 'prompt'", "did you mean 'promt'?"),
        ('{"prompt": "q"}\n{"answer": 1}', "t.jsonl row 2: no column 'prompt'", "it has answer"),
        ('{"prompt": "q"}\n{"prompt": ', "t.jsonl:2 is not JSON", ""),
        ("", "empty", ""),
        ("[1]", "not a list of rows", ""),
        ('{"prompt": "q", "id": 1}\n{"prompt": "r", "id": 1}', "two rows have the same id", ""),
        ('{"messages": [{"role": "robot", "content": "q"}]}', "row 1: its messages or files have the wrong form", ""),
    ],
)
def test_broken_files_say_what_and_where(tmp_path, content, message, hint):
    (tmp_path / "t.jsonl").write_text(content)
    with pytest.raises(ConfigError) as raised:
        tasks_from(tmp_path / "t.jsonl")
    assert message in raised.value.message and hint in raised.value.hint


def test_a_missing_file_names_the_nearest(tmp_path):
    write(tmp_path / "bugs.jsonl", [{"prompt": "q"}])
    with pytest.raises(ConfigError, match="no task file at") as raised:
        tasks_from(tmp_path / "bug.jsonl")
    assert "bugs.jsonl" in raised.value.hint
    (tmp_path / "t.txt").write_text("x")
    with pytest.raises(ConfigError, match="unknown kind"):
        tasks_from(tmp_path / "t.txt")


def drawn(seed, index):
    number = random.Random(f"{seed}/{index}").randrange(40)
    return task(f"{number}?", id=f"{seed}-{index}", files={"a.txt": str(number % 2)})


def content(made):
    return made.messages, tuple(made.files.items())


def test_generated_tasks_and_their_held_out_ones_share_no_content():
    training, held_out = generated(drawn), generated(drawn, held_out=True)
    assert training.get(5, 4) == training.get(5, 4) and training.get(5, 1) != training.get(6, 1)
    assert held_out.get(5, 1) == held_out.get(6, 1)
    trained = {content(each) for seed in range(20) for each in training.first(50, seed=seed)}
    kept = {content(each) for each in held_out.first(200, seed=0)}
    assert not trained & kept and len(trained | kept) == 40 and 1 < len(kept) < 20


def test_held_out_tasks_of_a_function_without_chance_are_an_error():
    fixed = [generated(lambda s, i, n=n: task(f"{n}", id="t"), held_out=True) for n in range(40)]
    wrong = 0
    for each in fixed:
        try:
            each.get(0, 0)
        except ConfigError as error:
            assert "same for every seed" in error.message
            wrong += 1
    assert wrong > 20


def test_tasks_that_a_function_enumerates():
    made = generated(lambda seed, index: task("q", id=f"{seed}-{index}"), size=3)
    assert made.get(5, 4) == made.get(5, 1) and made.get(5, 1) != made.get(6, 1)
    assert len(made.first(10, seed=0)) == 3
