"""Tandem: post-training of language-model agents as one continuous, verifiable loop."""

from importlib import import_module

__version__ = "0.1.0"

# Loaded when asked for: importing tandem costs nothing.
_PUBLIC = {"Sandbox": "tandem.sandbox.face", "Trainer": "tandem.app.own_loop"}


def __getattr__(name: str) -> object:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'tandem' has no attribute {name!r}")
