"""Why nothing passes between a box and what it asked for."""


class Refused(Exception):
    """The policy says no."""


class Unreachable(Exception):
    """The policy says yes, the network no."""
