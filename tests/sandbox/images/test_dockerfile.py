import pytest

from tandem.core.errors import ConfigError
from tandem.sandbox.images.dockerfile import parse


def kinds(text: str) -> list[tuple[str, str]]:
    return [(item.kind, item.text) for item in parse(text).instructions]


def test_lines_comments_and_continuations():
    text = (
        "# syntax=x\n# escape=\\\nARG v=1\n\nfrom a AS b\n"
        "RUN one \\\n  # between\n\n  && two\\\n three\n  # end\nCMD [\"a\", \"b c\"]"
    )
    assert kinds(text) == [
        ("ARG", "v=1"), ("FROM", "a AS b"), ("RUN", "one   && two three"), ("CMD", '["a", "b c"]')]
    found = parse(text).instructions
    assert found[2].line == 6 and found[2].words is None and found[3].words == ("a", "b c")


def test_flags_are_apart_from_the_text():
    item = parse("FROM a\nCOPY --from=b --chown=1:2 --chmod=644 x y").instructions[1]
    assert item.flags == {"from": ["b"], "chown": ["1:2"], "chmod": ["644"]} and item.text == "x y"
    assert parse("FROM --platform=linux/arm64 a").instructions[0].flags == {"platform": ["linux/arm64"]}


def test_here_documents():
    text = "FROM a\nRUN <<EOF\none\n# kept\n\n two\nEOF\nCOPY <<-'A' <<B /to/\n\tx $y\n\tA\nb\nB\n"
    first, second = parse(text).instructions[1:]
    assert [document.text for document in first.documents] == ["one\n# kept\n\n two\n"]
    assert [(document.name, document.text, document.literal) for document in second.documents] == [
        ("A", "x $y\n", True), ("B", "b\n", False)]


def test_the_escape_directive():
    assert kinds("# escape=`\nFROM a\nRUN dir c:\\ `\n /s") == [("FROM", "a"), ("RUN", "dir c:\\  /s")]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("RUN x", "must be FROM"), ("", "must be FROM"), ("FROM a\nFETCH b", "line 2: 'FETCH'"),
        ("FROM a\nRUN", "says nothing"), ("FROM a\nCOPY --wrong=1 a b", "no --wrong"), ("# escape=x\nFROM a", "escape"),
        ("FROM a\nRUN <<E\nx", "line 2: the here-document E never ends"),
    ],
)  # fmt: skip
def test_mistakes_are_named_by_line(text, said):
    with pytest.raises(ConfigError, match=said):
        parse(text)
