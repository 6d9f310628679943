"""Reading a run back.

Owns: the order of events, what a resume superseded, and the check of the chain. Refuses: writing.
Invariant: readers see each step once, however often the run was killed and resumed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tandem.core import wire
from tandem.core.errors import RecordError
from tandem.core.events import CheckpointSaved, Envelope, EpisodeFinished, RunFinished, RunResumed
from tandem.core.types import Episode
from tandem.record.blobs import BlobStore
from tandem.record.log import BLOBS, EVENTS, GENESIS, read_head


def read_all(folder: Path) -> Iterator[Envelope]:
    """Every whole event of a run in order, superseded ones too.

    Raises:
        RecordError: no log there, or a line is no event.
    """
    path = folder / EVENTS
    if not path.is_file():
        raise RecordError(f"no run in {folder}", hint="tandem runs list names the runs of a folder")
    decoder = msgspec.json.Decoder(Envelope)
    with path.open("rb") as file:
        for number, line in enumerate(file):
            if not line.endswith(b"\n"):
                return  # torn by a crash; the next writer cuts it off and says so
            try:
                yield decoder.decode(line[:-1])
            except msgspec.DecodeError as error:
                hint = f"tandem runs verify {folder} names the first bad event"
                raise RecordError(f"{path}:{number + 1} is no event: {error}", hint=hint) from error


def read(folder: Path) -> list[Envelope]:
    """The events that count: what a resume went back behind is left out."""
    kept: list[Envelope] = []
    for envelope in read_all(folder):
        if isinstance(envelope.event, RunResumed):
            kept = [each for each in kept if _stays(each, envelope.event)]
        kept.append(envelope)
    return kept


def _stays(each: Envelope, resumed: RunResumed) -> bool:
    """A checkpoint is told of while the steps after it run already; that it is there stays true."""
    if isinstance(each.event, CheckpointSaved) and each.event.step <= resumed.step:
        return True
    return each.sequence <= resumed.keep_sequence or isinstance(each.event, RunResumed)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of ``verify``: how many events are good, and what is wrong with the first bad one. ``ended`` says whether
    the last one is the end of the run; if not it is still running, was killed, or lost lines that were never synced."""

    num_events: int
    problem: str = ""
    ended: bool = False


def verify(folder: Path) -> Verdict:
    """Walk the hash chain up to its end, and check that every episode's blob holds what its name says.

    Raises:
        RecordError: no log there.
    """
    path = folder / EVENTS
    if not path.is_file():
        raise RecordError(f"no run in {folder}", hint="tandem runs list names the runs of a folder")
    previous, count, ended = GENESIS, 0, False
    head, blobs = read_head(folder), BlobStore(folder / BLOBS)
    decoder = msgspec.json.Decoder(Envelope)
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return Verdict(count, "the last line is torn")
            try:
                envelope = decoder.decode(line[:-1])
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                return Verdict(count, f"event {count} is broken: {error}")
            if envelope.sequence != count or envelope.previous != previous:
                return Verdict(count, f"event {count} does not follow from the one before it")
            previous = wire.digest(line[:-1])
            if head is not None and head.num_events == count + 1 and head.digest != previous:
                return Verdict(count, f"event {count} is not the one that was written")
            if isinstance(envelope.event, EpisodeFinished):
                try:
                    blobs.get(envelope.event.blob)
                except RecordError as error:
                    return Verdict(count, f"event {count}: {error.message}")
            ended = isinstance(envelope.event, RunFinished)
            count += 1
    if head is not None and head.num_events > count:
        return Verdict(count, f"the end is lost: {head.num_events} events were there, {count} are left")
    return Verdict(count, ended=ended)


def episodes(folder: Path) -> dict[str, EpisodeFinished]:
    """The finished attempts that count, by episode id."""
    return {
        each.event.episode_id: each.event for each in read(folder) if isinstance(each.event, EpisodeFinished)
    }


def load_episode(folder: Path, episode_id: str) -> Episode:
    """The whole record of one attempt.

    Raises:
        RecordError: the run has no such episode.
    """
    known = episodes(folder)
    if episode_id not in known:
        near = [name for name in known if episode_id in name][:5]
        raise RecordError(
            f"run {folder.name} has no episode {episode_id!r}",
            hint=f"such as: {', '.join(near or list(known)[:5])}",
        )
    return wire.decode(BlobStore(folder / BLOBS).get(known[episode_id].blob), Episode)
