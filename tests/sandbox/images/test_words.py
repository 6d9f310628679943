import pytest

from tandem.core.errors import ConfigError
from tandem.sandbox.images.words import expand, split

VARIABLES = {"a": "1", "empty": "", "path": "/x y"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$a${a}b", "11b"), ("$missing.", "."), ("${missing:-two}", "two"), ("${empty:-two}", "two"),
        ("${empty-two}", ""), ("${a:+yes}${missing:+no}", "yes"), ("${missing:-${a}-$a}", "1-1"), ("'$a'", "$a"),
        ('"$a \'$a\'"', "1 '1'"), (r"\$a", "$a"), (r'"\$a\n"', r"$a\n"), ("$path", "/x y"), ("$", "$"), ("5$", "5$"),
        ("$1", "$1"), ("a\\ b", "a b"),
    ],
)  # fmt: skip
def test_variables_and_quotes(text, value):
    assert expand(text, VARIABLES) == value


@pytest.mark.parametrize("text", ["${a", "'a", '"a', "${a%b}", "${}"])
def test_what_never_ends_or_is_unknown_is_refused(text):
    with pytest.raises(ConfigError):
        expand(text, VARIABLES)


def test_words_are_split_outside_quotes():
    assert split("a  'b c' d\\ e \"f 'g\" h=\"i j\"") == ["a", "'b c'", "d\\ e", "\"f 'g\"", 'h="i j"']
    with pytest.raises(ConfigError):
        split("a 'b")


def test_the_other_escape():
    assert expand("`$a", VARIABLES, escape="`") == "$a" and expand("\\$a", VARIABLES, escape="`") == "\\1"
