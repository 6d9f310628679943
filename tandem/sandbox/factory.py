"""From a recipe's backend name to the backend.

Owns: how a backend's factory is called, the same for built-ins and plug-ins (entry points ``tandem.sandbox``).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

from tandem.config.sections.sandbox import SandboxSection
from tandem.core.errors import PluginError, boundary
from tandem.core.registry import Registry
from tandem.sandbox.abilities import OFFERS
from tandem.sandbox.backend import SandboxBackend

BackendFactory = Callable[[SandboxSection, Path | None], SandboxBackend]


def backends() -> Registry:
    """All backends by name."""
    return Registry("sandbox", {name: offer.target for name, offer in OFFERS.items()})


def make_backend(section: SandboxSection, state: Path | None = None) -> SandboxBackend:
    """The backend that the section names: a short name, ``module:attribute`` or ``file.py:attribute``. Its factory
    is called with the section and the folder of what may outlive this process (None: nothing does).

    Raises:
        PluginError: there is none, or it cannot be made. SandboxUnavailable, ConfigError: from the backend.
    """
    factory = cast("BackendFactory", backends().resolve(section.backend))
    with boundary(PluginError, f"sandbox backend {section.backend!r} cannot be made"):
        return factory(section, state)
