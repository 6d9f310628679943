"""The engine's side of the socket: what it does with calls that nobody waits for any more."""

from __future__ import annotations

import asyncio
import socket
import warnings

import torch
from serve_pieces import ScriptedEngine, say

from tandem.core.types import GenerateRequest, SamplingParams, ids
from tandem.engine.process import messages as m
from tandem.engine.process.host import host
from tandem.engine.transports.transport import find_transport, layout_of


class Hosted(ScriptedEngine):
    """The scripted engine as one whose weights come from elsewhere."""

    async def adopt(self, tensors, version): ...
    async def sleep(self): ...
    async def wake(self): ...


def generate(call: int) -> m.Generate:
    request = GenerateRequest(id=f"r{call}", prompt_ids=ids([1, 2]), params=SamplingParams(max_tokens=3), seed=call)
    return m.Generate(call=call, request=request, is_guided=False)


def test_calls_that_are_cancelled_before_they_begin_leave_nothing_behind():
    """Both messages come in one read, so that the task of the call has had no turn when it is cancelled."""

    async def body():
        engine = Hosted(lambda _: say("ABCD"))
        tensors = {"w": torch.ones(4)}
        layout = layout_of(tensors)
        sender = find_transport("shared_memory").sender(layout, tensors)
        ours, theirs = socket.socketpair()

        async def make(start):
            return engine

        hosting = asyncio.ensure_future(host(theirs.detach(), make))
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        start = m.Start(settings="", transport="shared_memory", layout=layout, files=sender.files)
        writer.write(m.frame(start))
        assert isinstance(await m.read_message(reader), m.Ready)
        messages = [part for call in range(5) for part in (generate(call), m.Cancel(call=call))]
        messages += [m.Sleep(call=6), m.Cancel(call=6), generate(7)]
        writer.write(b"".join(map(m.frame, messages)))
        heard = []
        while not (heard and isinstance(heard[-1], m.Done)):
            heard.append(await m.read_message(reader))
        writer.close()
        await hosting
        sender.close()
        return engine, heard

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        engine, heard = asyncio.run(asyncio.wait_for(body(), 60))
    assert not [str(each.message) for each in told if "never awaited" in str(each.message)]
    assert [request.id for request in engine.requests] == ["r7"] and heard[-1].call == 7
    assert not engine.running
