"""Model and data repositories of a Hugging Face hub, as folders of this machine.

Owns: what a repository's name looks like, and fetching one. Refuses: reading what is in it.
Invariants: a name that is a file or folder here never goes to the network; what was fetched is kept in the hub
library's own cache, and serves without a network.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tandem.core.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


def is_repository(name: str) -> bool:
    """Whether this is ``owner/name`` or ``owner/name@revision``, and no place on this machine."""
    return _NAME.fullmatch(name) is not None and not Path(name).exists()


def fetch_repository(
    name: str, *, kind: Literal["model", "dataset"], files: Sequence[str], endpoint: str | None = None
) -> Path:
    """Bring the files of a repository that match ``files`` (glob patterns) here; shows progress on stderr.

    ``endpoint`` is the hub's address, None that of ``HF_ENDPOINT``; this, ``HF_TOKEN``, ``HF_HOME`` and
    ``HF_HUB_OFFLINE`` mean what they mean everywhere.

    Raises:
        ConfigError: no such repository or revision, no right to it, no network and nothing in the cache.
    """
    import huggingface_hub as hub

    repository, _, revision = name.partition("@")
    try:
        folder = hub.snapshot_download(
            repository,
            repo_type=kind,
            revision=revision or None,
            allow_patterns=list(files),
            endpoint=endpoint,
        )
    except Exception as error:  # the library's own tree, that of its transport, and OSError
        what = "model" if kind == "model" else "data set"
        said = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"the {what} {name} is neither a place on this machine nor to be had from the hub: "
            f"{type(error).__name__}: {said}",
            hint="check the name, HF_TOKEN where it needs one, and the network; or give a folder",
        ) from error
    return Path(folder)
