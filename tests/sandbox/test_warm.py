"""Commands that are forks of a process with its imports done, in one box and in live copies of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from tandem.core.errors import SandboxError, SandboxGone, SandboxUnavailable
from tandem.sandbox.backends.live_fork import obstacle
from tandem.sandbox.face import Sandbox
from tandem.sandbox.warm import WarmPython


@contextlib.asynccontextmanager
async def warmed(*modules: str) -> AsyncIterator[tuple[Sandbox, WarmPython]]:
    try:
        async with Sandbox.create(lifetime_s=120) as box:
            yield box, await WarmPython.start(box.commands, modules)
    except SandboxUnavailable as error:
        pytest.skip(f"no boxes here: {error.message}")


def test_it_does_what_python_does_and_has_the_imports() -> None:
    script = "import sys\nprint(sys.argv, __name__, 'decimal' in sys.modules)\nsys.exit('bad')\n"

    async def main() -> None:
        async with warmed("decimal", "random") as (box, warm):
            await box.files.write("work/tool.py", script)
            one = await warm.run(["work/tool.py", "a"], timeout_s=30)
            real = await box.commands.run(["python3", "work/tool.py", "a"], timeout_s=30)
            assert one.stdout == real.stdout.replace("False", "True") and one.stderr == real.stderr == "bad\n"
            assert one.exit_code == real.exit_code == 1
            words = {"cwd": "/tmp", "environment": {"A": "b"}, "stdin": b"in"}
            two = await warm.run(["-c", "import os, sys; print(os.getcwd(), os.environ['A'], sys.stdin.read())"],
                                 timeout_s=30, **words)
            assert two.stdout == "/tmp b in\n" and two.exit_code == 0
            assert (await warm.run(["-m", "base64", "-t"], timeout_s=30)).exit_code == 0
            drawn = [await warm.run(["-c", "import random; print(random.random())"], timeout_s=30) for _ in range(2)]
            assert drawn[0].stdout != drawn[1].stdout
            failed = await warm.run(["-c", "1 / 0"], timeout_s=30)
            assert failed.exit_code == 1 and failed.stderr.endswith("ZeroDivisionError: division by zero\n")
            assert (await warm.run(["-c", "x = 1; import os; os.abort()"], timeout_s=30)).exit_code == 134

    asyncio.run(main())


def test_commands_run_at_once_within_their_limits() -> None:
    async def main() -> None:
        async with warmed() as (box, warm):
            forever = "import os; print('begun', flush=True); os.system('sleep 4711 & sleep 4711')"
            late = asyncio.create_task(warm.run(["-c", forever], timeout_s=0.5))
            quick = await warm.run(["-c", "print('x' * 5000)"], timeout_s=30, output_bytes=100)
            assert (quick.stdout, quick.dropped_bytes, quick.truncated) == ("x" * 100, 4901, True)
            result = await late
            assert (result.exit_code, result.timed_out, result.stdout) == (None, True, "begun\n")
            count = "sleep 0.1; cat /proc/*/cmdline | tr '\\0' ' ' | grep -c 'sleep 471[1]'"
            assert (await box.commands.run(count, timeout_s=30)).stdout == "0\n"
            leaves = "import os; os.fork() or os.execlp('sleep', 'sleep', '30'); print('done')"
            kept = await warm.run(["-c", leaves], timeout_s=30)
            assert kept.stdout == "done\n" and not kept.timed_out

    asyncio.run(main())


def test_a_live_fork_copies_the_imports_too() -> None:
    if obstacle():
        pytest.skip(f"no live fork: {obstacle()}")

    async def main() -> None:
        async with warmed("decimal") as (box, warm):
            await warm.run(["-c", ""], timeout_s=30)
            children = await box.fork(3, live=True)
            for child in children:
                assert isinstance(child, Sandbox), child
                copy = WarmPython.copied(child.commands)
                await child.files.write("f", child.id)
                code = "import sys; print('decimal' in sys.modules, open('f').read())"
                assert (await copy.run(["-c", code], timeout_s=30)).stdout == f"True {child.id}\n"
            assert (await warm.run(["-c", "print(1)"], timeout_s=30)).stdout == "1\n"
            with pytest.raises(SandboxError, match="no warm Python"):
                WarmPython.copied(box.commands)

    asyncio.run(main())


def test_its_end_is_told() -> None:
    async def main() -> None:
        async with warmed() as (box, warm):
            with pytest.raises(SandboxError, match="No module named 'nowhere'"):
                await WarmPython.start(box.commands, ["nowhere"])
            running = asyncio.create_task(warm.run(["-c", "import time; time.sleep(60)"], timeout_s=60))
            await warm.run(["-c", ""], timeout_s=30)
            await warm.process.signal(9)
            with pytest.raises(SandboxError, match="the warm Python ended"):
                await running
            with pytest.raises(SandboxError):
                await warm.run(["-c", ""], timeout_s=30)
            again = await WarmPython.start(box.commands, [])
            await box.kill()
            with pytest.raises((SandboxGone, SandboxError)):
                await again.run(["-c", ""], timeout_s=30)

    asyncio.run(main())
