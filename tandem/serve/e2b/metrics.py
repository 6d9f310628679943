"""Numbers for Prometheus: boxes by state, requests, what boxes use.

Owns: its own registry (nothing of the process leaks into it, several servers fit in one process).
"""

from __future__ import annotations

import time
from collections import Counter as Tally

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.serve.e2b import shapes
from tandem.serve.e2b.boxes import Boxes

MAX_BOXES = 200  # asked for what they use, at one scrape


class Metrics:
    def __init__(self, boxes: Boxes) -> None:
        self._boxes = boxes
        self._registry = CollectorRegistry()
        self._state = Gauge("tandem_sandboxes", "Boxes by state", ["state"], registry=self._registry)
        self._memory = Gauge("tandem_sandbox_memory_bytes", "Memory of a box", ["sandbox"], registry=self._registry)
        self._cpu = Gauge("tandem_sandbox_cpu_seconds", "CPU time of a box", ["sandbox"], registry=self._registry)
        self._requests = Counter(
            "tandem_sandbox_requests", "Requests of the control plane", ["method", "status"], registry=self._registry
        )
        self._took = Histogram(
            "tandem_sandbox_request_seconds", "Time to the end of a control-plane answer", ["method"],
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10), registry=self._registry,
        )  # fmt: skip

    async def text(self) -> bytes:
        records = self._boxes.records()
        tally = Tally(shapes.shown_state(record.state) for record in records)
        for state in ("running", "paused"):
            self._state.labels(state).set(tally[state])
        self._memory.clear()
        self._cpu.clear()
        for record in [one for one in records if shapes.shown_state(one.state) == "running"][:MAX_BOXES]:
            try:
                cost = await self._boxes.usage(record.id)
            except Exception:  # it ended meanwhile, or this machine does not tell: then there is no number
                continue
            if cost.memory_bytes is not None:
                self._memory.labels(record.id).set(cost.memory_bytes)
            if cost.cpu_s is not None:
                self._cpu.labels(record.id).set(cost.cpu_s)
        return generate_latest(self._registry)

    def counted(self, app: ASGIApp) -> ASGIApp:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            started = time.perf_counter()

            async def noted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    self._requests.labels(scope["method"], str(message["status"])).inc()
                await send(message)

            await app(scope, receive, noted)
            self._took.labels(scope["method"]).observe(time.perf_counter() - started)

        return answer
