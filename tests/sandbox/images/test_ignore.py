import pytest

from tandem.sandbox.images.ignore import Ignore


@pytest.mark.parametrize(
    ("rules", "out", "kept"),
    [
        ("*.log", ["a.log"], ["d/a.log", "a.logs"]),
        ("**/*.log", ["a.log", "d/e/a.log"], ["a"]),
        ("/build/", ["build", "build/x/y"], ["d/build"]),
        ("*\n!keep\n!d/*.md", ["a", "d/x"], ["keep", "keep/x", "d/a.md"]),
        ("d\n!d/keep\nd/keep/not", ["d", "d/x", "d/keep/not"], ["d/keep", "d/keep/x"]),
        ("a?c\n[xy]1\n[!a-c]2", ["abc", "x1", "d2"], ["ac", "z1", "b2", "a/c"]),
        ("# comment\n\n./x", ["x"], ["# comment", "comment"]),
        ("a/**/b\nc/**", ["a/b", "a/x/y/b", "c/x"], ["a", "b"]),
    ],
)
def test_patterns(rules, out, kept):
    ignored = Ignore(rules.split("\n"))
    assert [path for path in out if not ignored(path)] == []
    assert [path for path in kept if ignored(path)] == []
