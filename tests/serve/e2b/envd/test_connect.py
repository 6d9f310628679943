"""The Connect protocol, by a service of a few lines over a real server."""

import asyncio
import gzip
import json

import httpx
from e2b_pieces import envelope, serving
from starlette.requests import Request

from tandem.serve.e2b.envd.connect import MAX_MESSAGE_BYTES, STREAM_TYPE, Service, answer, with_keepalive
from tandem.serve.e2b.faults import Fault

STREAM = {"Content-Type": STREAM_TYPE}


class Parts:
    """What happened to the service's streams."""

    def __init__(self):
        self.left = asyncio.Event()

    def service(self):
        async def echo(call, message):
            return message | {"user": call.user}

        async def slow(call, message):
            await asyncio.sleep(30)
            return {}

        async def fails(call, message):
            raise Fault(404, "it is not there")

        async def broken(call, message):
            raise RuntimeError("a secret of ours")

        async def count(call, message):
            for number in range(message["to"]):
                yield {"number": number}
            if message.get("fail"):
                raise FileNotFoundError(2, "No such file or directory", "/x")

        async def forever(call, message):
            try:
                yield {"on": True}
                await asyncio.sleep(30)
            finally:
                self.left.set()

        async def total(call, messages):
            return {"total": sum([message["n"] async for message in messages])}

        return Service(unary={"Echo": echo, "Slow": slow, "Fails": fails, "Broken": broken},
                       server_stream={"Count": count, "Forever": forever}, client_stream={"Total": total})  # fmt: skip


def over(work):
    """Run ``work(client, parts)`` against the service."""

    async def main():
        parts = Parts()

        async def app(scope, receive, send):
            request = Request(scope, receive)
            await answer(parts.service(), scope["path"].strip("/"), request, "agent", send)

        async with serving(app) as url, httpx.AsyncClient(base_url=url, timeout=10) as client:
            await work(client, parts)

    asyncio.run(main())


def parsed(data):
    found = []
    while data:
        size = int.from_bytes(data[1:5], "big")
        found.append((data[0], json.loads(data[5 : 5 + size])))
        data = data[5 + size :]
    return found


def test_unary_and_its_errors():
    async def work(client, parts):
        assert (await client.post("/Echo", json={"a": 1})).json() == {"a": 1, "user": "agent"}
        packed = gzip.compress(b'{"a": 2}')
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        assert (await client.post("/Echo", content=packed, headers=headers)).json()["a"] == 2
        for method, words, status, code in (
            ("/Fails", {"json": {}}, 404, "not_found"),
            ("/Broken", {"json": {}}, 500, "internal"),
            ("/None", {"content": b"", "headers": STREAM}, 404, "unimplemented"),
            ("/Echo", {"content": b"x", "headers": {"Content-Type": "application/proto"}}, 415, "unimplemented"),
            ("/Echo", {"content": b"[1]", "headers": {"Content-Type": "application/json"}}, 400, "invalid_argument"),
            ("/Slow", {"json": {}, "headers": {"Connect-Timeout-Ms": "50"}}, 504, "deadline_exceeded"),
            ("/Echo", {"json": {}, "headers": {"Connect-Timeout-Ms": "soon"}}, 400, "invalid_argument"),
        ):
            told = await client.post(method, **words)
            assert (told.status_code, told.json()["code"]) == (status, code), method
            assert "secret" not in told.text
        assert (await client.get("/Echo")).status_code == 405

    over(work)


def test_streams_of_the_server():
    async def work(client, parts):
        whole = await client.post("/Count", content=envelope({"to": 3}), headers=STREAM)
        assert parsed(whole.content) == [(0, {"number": 0}), (0, {"number": 1}), (0, {"number": 2}), (2, {})]
        failed = parsed((await client.post("/Count", content=envelope({"to": 1, "fail": 1}), headers=STREAM)).content)
        assert failed[0] == (0, {"number": 0}) and failed[1][0] == 2
        assert failed[1][1]["error"]["code"] == "not_found"
        for body in (b"", envelope({"to": 1}) * 2, envelope({"to": 1})[:-1], b"\0" + (2**31).to_bytes(4, "big")):
            (only,) = parsed((await client.post("/Count", content=body, headers=STREAM)).content)
            assert only[0] == 2 and only[1]["error"]["code"] in ("invalid_argument", "resource_exhausted")

    over(work)


def test_a_client_that_leaves_ends_the_stream():
    async def work(client, parts):
        async with client.stream("POST", "/Forever", content=envelope({}), headers=STREAM) as response:
            assert await anext(response.aiter_raw())
        await asyncio.wait_for(parts.left.wait(), 30)

    over(work)


def test_streams_of_the_client():
    async def work(client, parts):
        async def body():
            for number in range(4):
                yield envelope({"n": number})[:3]
                yield envelope({"n": number})[3:]

        told = parsed((await client.post("/Total", content=body(), headers=STREAM)).content)
        assert told == [(0, {"total": 6}), (2, {})]

    over(work)


def test_a_message_that_unpacks_beyond_the_bound_is_refused():
    async def work(client, parts):
        bomb = gzip.compress(b'{"a": "' + b"x" * (MAX_MESSAGE_BYTES + 10) + b'"}')
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        assert (await client.post("/Echo", content=bomb, headers=headers)).status_code == 429

    over(work)


def test_keepalive_loses_nothing_and_ends_with_its_source():
    async def source():
        for number in range(3):
            await asyncio.sleep(0.05)
            yield {"n": number}

    async def main():
        return [one async for one in with_keepalive(source(), 0.01, {"alive": True})]

    seen = asyncio.run(main())
    assert [one["n"] for one in seen if "n" in one] == [0, 1, 2] and {"alive": True} in seen
