"""The episode's box, as a reward sees it from its own process: each call is a frame to the parent, which owns it.

One call at a time, because there is one pipe. Refuses: streaming callbacks and ``kill``; a reward reads and runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from tandem.core.boxes import ExecResult, SandboxState
from tandem.core.errors import RewardError
from tandem.core.protocols import Sandbox


class RunCommand(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    command: str | list[str]
    timeout_s: float
    cwd: str | None
    environment: dict[str, str] | None
    stdin: bytes


class WriteFile(msgspec.Struct, frozen=True, kw_only=True, tag="write"):
    path: str
    data: bytes


class ReadFile(msgspec.Struct, frozen=True, kw_only=True, tag="read"):
    path: str
    max_bytes: int


class ListFiles(msgspec.Struct, frozen=True, kw_only=True, tag="list"):
    path: str


BoxRequest = RunCommand | WriteFile | ReadFile | ListFiles


class BoxReply(msgspec.Struct, frozen=True, kw_only=True):
    """One of the values is set, or none after a write; ``not_found`` stands for ``FileNotFoundError``."""

    result: ExecResult | None = None
    data: bytes | None = None
    names: list[str] | None = None
    not_found: str | None = None


Ask = Callable[[BoxRequest], BoxReply]


async def serve(request: BoxRequest, box: Sandbox) -> BoxReply:
    """Do in the box what a reward asked for. Raises what the box raises."""
    try:
        match request:
            case RunCommand():
                result = await box.commands.run(
                    request.command,
                    timeout_s=request.timeout_s,
                    cwd=request.cwd,
                    environment=request.environment,
                    stdin=request.stdin,
                )
                return BoxReply(result=result)
            case WriteFile():
                await box.files.write(request.path, request.data)
                return BoxReply()
            case ReadFile():
                return BoxReply(data=await box.files.read(request.path, max_bytes=request.max_bytes))
            case ListFiles():
                return BoxReply(names=await box.files.list(request.path))
    except FileNotFoundError as error:
        return BoxReply(not_found=str(error))


class RemoteBox:
    """Implements ``core.protocols.Sandbox`` with what the parent answers."""

    state = SandboxState.RUNNING

    def __init__(self, sandbox_id: str, ask: Ask) -> None:
        self.id = sandbox_id
        self.commands = _Commands(ask)
        self.files = _Files(ask)

    async def kill(self) -> None:
        raise RewardError("a reward cannot kill the box: it belongs to the episode")


class _Commands:
    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def run(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float,
        cwd: str | None = None,
        environment: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        on_stdout: Callable[[bytes], None] | None = None,
        on_stderr: Callable[[bytes], None] | None = None,
    ) -> ExecResult:
        if on_stdout is not None or on_stderr is not None:
            raise RewardError("a reward cannot stream a command's output; read the result")
        reply = self._ask(
            RunCommand(
                command=command if isinstance(command, str) else list(command),
                timeout_s=timeout_s,
                cwd=cwd,
                environment=None if environment is None else dict(environment),
                stdin=stdin,
            )
        )
        assert reply.result is not None
        return reply.result


class _Files:
    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    async def write(self, path: str, data: bytes | str) -> None:
        self._found(self._ask(WriteFile(path=path, data=data.encode() if isinstance(data, str) else data)))

    async def read(self, path: str, *, max_bytes: int = 16 * 2**20) -> bytes:
        data = self._found(self._ask(ReadFile(path=path, max_bytes=max_bytes))).data
        assert data is not None
        return data

    async def list(self, path: str) -> list[str]:
        names = self._found(self._ask(ListFiles(path=path))).names
        assert names is not None
        return names

    @staticmethod
    def _found(reply: BoxReply) -> BoxReply:
        if reply.not_found is not None:
            raise FileNotFoundError(reply.not_found)
        return reply
