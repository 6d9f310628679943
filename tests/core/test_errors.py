"""Errors travel between processes whole, and foreign ones become ours."""

import errno
import pickle
from pathlib import Path

import pytest

from tandem.core import errors
from tandem.core.errors import PluginError, RecordError, SandboxGone, TandemError, boundary, writing

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


def test_an_exit_of_foreign_code_is_its_error():
    with pytest.raises(PluginError, match="loading x: SystemExit: 3"), boundary(PluginError, "loading x"):
        raise SystemExit(3)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "full"), "no space left at a/b"),
        (OSError(errno.ENOSPC, "full", "a/c"), "no space left at a/c"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), "no space left at a/b"),
        (OSError(errno.EACCES, "Permission denied", "a/c"), "a/c cannot be written: Permission denied"),
    ],
)
def test_what_cannot_be_written_is_named(error, said):
    with pytest.raises(RecordError) as raised, writing(Path("a/b"), RecordError):
        raise error
    assert str(raised.value) == said
    with pytest.raises(ValueError, match="ours"), writing(Path("a/b"), RecordError):
        raise ValueError("ours")
