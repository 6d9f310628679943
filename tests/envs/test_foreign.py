"""Messages about the user's code name the user's line."""

from tandem.core.types import ids, same_length
from tandem.envs.foreign import describe, place_of


def raised(function):
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_the_users_frame_is_named_even_when_ours_is_deeper():
    assert "test_foreign.py:" in place_of(raised(lambda: same_length("x", a=ids([1]), b=ids())))
    assert describe(raised(lambda: 1 / 0)).startswith("ZeroDivisionError: division by zero (test_foreign.py:")


def test_syntax_errors_and_errors_without_text_or_traceback():
    assert place_of(raised(lambda: compile("x = (", "user.py", "exec"))) == "user.py:1"
    assert describe(TimeoutError()) == "TimeoutError: no message (unknown place)"
