"""The index of what boxes can start from: names with tags, builds, and the cached steps of builds.

Owns: one SQLite file, safe for several processes; a name always leads to a whole record. Refuses: bytes of layers
(the store has them). A build is known as ``name``, ``name:tag`` and ``name:buildID``.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tandem.core.errors import ConfigError, SandboxError, SandboxUnavailable
from tandem.sandbox.images.manifest import ImageConfig
from tandem.sandbox.images.reference import TAG, ImageReference

NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._/:-]*[A-Za-z0-9])?")
HOST = "host"
DEFAULT_TAGS = ("default", "latest")
BUSY_TIMEOUT_S = 30.0
SCHEMA = """
CREATE TABLE IF NOT EXISTS builds (build_id TEXT PRIMARY KEY, record BLOB NOT NULL, created REAL, used REAL);
CREATE TABLE IF NOT EXISTS tags (name TEXT, tag TEXT, build_id TEXT NOT NULL, PRIMARY KEY (name, tag));
CREATE TABLE IF NOT EXISTS steps (key TEXT PRIMARY KEY, layer TEXT NOT NULL, used REAL);
"""


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """What a box starts from. ``layers`` are digests, lowest first; ``start_command`` runs when a box is made and
    ``ready_command`` says by its success when that is done (both '' for none). ``warm`` are Python modules that the
    interpreter of a server's box has imported when the box is there; its live forks share them."""

    build_id: str
    layers: list[str] = []
    host_base: bool = False
    config: ImageConfig = ImageConfig()
    start_command: str = ""
    ready_command: str = ""
    warm: list[str] = []
    source: str = ""
    created_s: float = 0.0


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    tag: str
    template: Template
    used_s: float


class TemplateIndex:
    """The index in one file. Blocking, each call its own transaction."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._open() as database:
            database.execute("PRAGMA journal_mode=WAL")
            database.executescript(SCHEMA)

    def put(self, template: Template, *names: str) -> None:
        """Keep a build under ``name:tag`` names (a name without tag: ``default``); a tag moves from its old build.

        Raises:
            ConfigError: a name that is none, or ``host``.
        """
        pairs = [split_name(name) for name in names]
        now = time.time()
        with self._open() as database:
            data = msgspec.json.encode(template)
            database.execute(
                "INSERT OR REPLACE INTO builds VALUES (?, ?, ?, ?)", (template.build_id, data, template.created_s, now)
            )
            for name, tag in pairs:
                database.execute(
                    "INSERT OR REPLACE INTO tags VALUES (?, ?, ?)", (name, tag or DEFAULT_TAGS[0], template.build_id)
                )

    def find(self, text: str, *, use: bool = True) -> Template | None:
        """By ``name``, ``name:tag``, ``name:buildID``, a build id alone, or an image's short name (``python:3.12``)."""
        if text == HOST:
            return Template(build_id=HOST, host_base=True, source=HOST)
        with self._open() as database:
            row = None
            for name, tag in _readings(text):
                if tag:
                    row = database.execute(
                        "SELECT build_id FROM tags WHERE name = ? AND (tag = ? OR build_id = ?)", (name, tag, tag)
                    ).fetchone()
                else:
                    row = database.execute(
                        "SELECT build_id FROM tags WHERE name = ? ORDER BY tag = ? DESC, tag = ? DESC LIMIT 1",
                        (name, *DEFAULT_TAGS),
                    ).fetchone()
                if row:
                    break
            build_id = row[0] if row else text
            found = database.execute("SELECT record FROM builds WHERE build_id = ?", (build_id,)).fetchone()
            if found is None:
                return None
            if use:
                database.execute("UPDATE builds SET used = ? WHERE build_id = ?", (time.time(), build_id))
        return msgspec.json.decode(found[0], type=Template)

    def get(self, text: str) -> Template:
        """As ``find``. Raises SandboxUnavailable, with near names."""
        found = self.find(text)
        if found is None:
            known = sorted({item.name for item in self.list()} | {HOST})
            raise SandboxUnavailable(
                f"there is no template {text!r}", hint=f"pull or build it; known: {', '.join(known[:20])}"
            )
        return found

    def list(self) -> list[Listed]:
        """Every name, by name and tag."""
        with self._open() as database:
            rows = database.execute(
                "SELECT name, tag, record, used FROM tags JOIN builds USING (build_id) ORDER BY name, tag"
            ).fetchall()
        return [
            Listed(name=name, tag=tag, template=msgspec.json.decode(record, type=Template), used_s=used)
            for name, tag, record, used in rows
        ]

    def remove(self, text: str) -> bool:
        """Take a name (all its tags), or a name and tag, away; a build that no name leads to goes with it."""
        with self._open() as database:
            gone = 0
            for name, tag in _readings(text):
                gone = database.execute(
                    "DELETE FROM tags WHERE name = ? AND (? = '' OR tag = ? OR build_id = ?)", (name, tag, tag, tag)
                ).rowcount
                if gone:
                    break
            database.execute("DELETE FROM builds WHERE build_id NOT IN (SELECT build_id FROM tags)")
        return gone > 0

    def layers(self) -> set[str]:
        """All layers that some template needs."""
        return {digest for item in self.list() for digest in item.template.layers}

    def oldest(self) -> Iterator[Template]:
        """Builds, the longest unused first."""
        with self._open() as database:
            rows = database.execute("SELECT record FROM builds ORDER BY used").fetchall()
        for (record,) in rows:
            yield msgspec.json.decode(record, type=Template)

    def remove_build(self, build_id: str) -> None:
        with self._open() as database:
            database.execute("DELETE FROM tags WHERE build_id = ?", (build_id,))
            database.execute("DELETE FROM builds WHERE build_id = ?", (build_id,))

    def step(self, key: str) -> str | None:
        """The layer that a step of an earlier build made."""
        with self._open() as database:
            row = database.execute("SELECT layer FROM steps WHERE key = ?", (key,)).fetchone()
            if row:
                database.execute("UPDATE steps SET used = ? WHERE key = ?", (time.time(), key))
        return row[0] if row else None

    def keep_step(self, key: str, layer: str) -> None:
        with self._open() as database:
            database.execute("INSERT OR REPLACE INTO steps VALUES (?, ?, ?)", (key, layer, time.time()))

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        try:
            database = sqlite3.connect(self._path, timeout=BUSY_TIMEOUT_S)
            try:
                with database:
                    yield database
            finally:
                database.close()
        except sqlite3.Error as error:
            raise SandboxError(
                f"the index of templates {self._path} failed: {error}", hint="is the disk full?"
            ) from error


def split_name(text: str) -> tuple[str, str]:
    """``name`` and tag ('' for none). Raises ConfigError."""
    name, colon, tag = text.rpartition(":")
    if not colon or "/" in tag:
        name, tag = text, ""
    if not NAME.fullmatch(name) or (tag and not TAG.fullmatch(tag)) or name == HOST:
        raise ConfigError(f"{text!r} is no name for a template", hint="write it as name or name:tag; not host")
    return name, tag


def _readings(text: str) -> list[tuple[str, str]]:
    """What a name may mean: as it stands, or as an image of a registry."""
    readings = []
    try:
        readings.append(split_name(text))
        reference = ImageReference.parse(text)
        readings.append((reference.name, reference.tag or reference.digest))
    except ConfigError:
        pass
    return readings
