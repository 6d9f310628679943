"""Every event goes to JSON and back, under its own name."""

import msgspec
import pytest

from tandem.core import events
from tandem.core.events import AnyEvent, Envelope, Event

KINDS = [kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, Event) and kind != Event]
SAMPLES = {str: "x", int: 3, float: 0.5, bool: True}


def make(kind):
    values = {}
    for field in msgspec.structs.fields(kind):
        text = str(field.type)
        values[field.name] = SAMPLES.get(field.type, None if "None" in text else {} if "dict" in text else [])
    return kind(**values)


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(kind):
    envelope = Envelope(sequence=1, time=2.0, process=3, cause=-1, previous="", event=make(kind))
    line = msgspec.json.encode(envelope)
    assert f'"type":"{kind.__name__}"'.encode() in line
    assert msgspec.json.decode(line, type=Envelope) == envelope


def test_every_kind_is_in_the_union():
    assert set(AnyEvent.__args__) == set(KINDS)


def test_events_are_frozen():
    event = make(events.WarningRaised)
    with pytest.raises(AttributeError):
        event.message = "other"
