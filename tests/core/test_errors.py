"""Errors travel between processes whole, and foreign ones become ours."""

import pickle

import pytest

from tandem.core import errors
from tandem.core.errors import PluginError, SandboxGone, TandemError, boundary

ALL = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TandemError)]


@pytest.mark.parametrize("kind", ALL)
def test_every_error_pickles(kind):
    error = pickle.loads(pickle.dumps(kind("box 3 failed", hint="try again")))
    assert type(error) is kind and (str(error), error.hint) == ("box 3 failed", "try again")
    assert error.retryable is kind.retryable


def test_the_boundary_names_foreign_errors_and_lets_ours_pass():
    with pytest.raises(PluginError, match="loading x: ZeroDivisionError: division by zero") as raised, boundary(
        PluginError, "loading x", hint="mend it"
    ):
        print(1 / 0)
    assert raised.value.hint == "mend it" and isinstance(raised.value.__cause__, ZeroDivisionError)
    with pytest.raises(SandboxGone), boundary(PluginError, "loading x"):
        raise SandboxGone("gone")
    with pytest.raises(KeyboardInterrupt), boundary(PluginError, "loading x"):
        raise KeyboardInterrupt
