"""Fixtures of the E2B face, for its tests and those below."""

from e2b_pieces import box, client, server  # noqa: F401
