"""Where in the user's own code an exception came from, for messages that name file and line."""

from __future__ import annotations

import traceback
from pathlib import Path

from tandem.core.wire import storable

_OURS = str(Path(__file__).resolve().parents[1])


def place_of(error: BaseException) -> str:
    """``file.py:12`` of the innermost frame outside this package (the innermost of all if there is none)."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "unknown place"
    users = [frame for frame in frames if not frame.filename.startswith((_OURS, "<"))]
    frame = (users or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"


def describe(error: BaseException) -> str:
    """Type, message and short place of a foreign exception, in one line."""
    text = storable(str(error)).strip().splitlines()
    place = place_of(error).rsplit("/", 1)[-1]
    return f"{type(error).__name__}: {text[0] if text else 'no message'} ({place})"
