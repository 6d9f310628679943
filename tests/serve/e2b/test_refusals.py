"""Refused calls in the audit log: told, bounded, without what was shown; and refused when nothing can be written."""

import httpx
from e2b_pieces import Client, Message, RunningServer

from tandem.core.errors import RecordError
from tandem.sandbox.audit import read, verify
from tandem.serve.e2b.faults import Fault
from tandem.serve.e2b.refusals import MOST, WINDOW_S, Refusals

SCOPE = {"type": "http", "method": "GET", "path": "/sandboxes", "client": ("10.1.2.3", 5)}


def test_a_flood_is_a_number_and_what_is_no_refusal_is_not_told():
    told, now = [], [0.0]
    refusals = Refusals(lambda action, **words: told.append((action, words)), lambda: now[0])
    refusals.tell(Fault(404, "no such box"), SCOPE)
    for _ in range(MOST + 70):
        refusals.tell(Fault(401, "no valid API key"), SCOPE)
    assert len(told) == MOST
    assert told[0] == ("refused GET /sandboxes", {"actor": "nobody from 10.1.2.3", "why": "no valid API key"})
    now[0] = WINDOW_S
    refusals.tell(Fault(403, "not public"), {"type": "websocket", "path": "/" + "x" * 10_000, "client": None})
    assert told[MOST] == ("refused more calls", {"actor": "nobody", "count": "70"})
    assert len(told[MOST + 1][0]) == 200 and told[MOST + 1][1]["actor"] == "nobody from nowhere"


def test_who_is_refused_is_refused_when_nothing_can_be_written(caplog):
    def full(action: str, **words: str) -> None:
        raise RecordError("the disk is full")

    Refusals(full).tell(Fault(401, "no valid API key"), SCOPE)
    assert "could not be recorded: the disk is full" in caplog.text


def test_keys_tokens_and_signatures_that_are_wrong_are_told_and_not_written_down(
    server: RunningServer, client: Client, box: Message
):
    wrong = "wrong-and-secret"
    assert httpx.get(f"{client.base_url}/sandboxes", headers={"X-API-Key": wrong}).status_code == 401
    assert client.get("/files?path=x", headers=client.to(box) | {"X-Access-Token": wrong}).status_code == 401
    assert httpx.get(f"{client.base_url}/files", params={"path": "x", "signature": wrong}).status_code == 401
    told = [line for line in read(server.state / "audit") if line.action.startswith("refused")]
    assert [line.action for line in told] == ["refused GET /sandboxes", "refused GET /files", "refused GET /files"]
    assert all(line.actor.startswith("nobody from 127.0.0.1") and line.detail["why"] for line in told)
    assert wrong not in (server.state / "audit" / "audit.jsonl").read_text()
    assert verify(server.state / "audit").bad is None
