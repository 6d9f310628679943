"""A registry of one image for benchmarks: a process of its own, so that serving does not slow what is measured.

Run as a script it serves a folder of blobs (files named by digest, and ``manifest``) with ranges.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # as real registries do: else each answer waits 40 ms between its head and its body
    folder = Path()

    def do_GET(self) -> None:
        kind, name = self.path.split("/")[-2:]
        place = self.folder / name
        if kind == "manifests":
            special = self.folder / f"manifest-{name}"
            place = special if special.exists() else self.folder / "manifest"
        with place.open("rb") as file:
            size = file.seek(0, 2)
            start, end = 0, size
            wanted = self.headers.get("Range")
            if wanted:
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                start, end = int(first), int(last) + 1 if last else size
            self.send_response(206 if wanted else 200)
            self.send_header("Content-Length", str(end - start))
            self.end_headers()
            self.wfile.flush()
            while start < end:
                start += self.connection.sendfile(file, start, end - start)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The address of a registry that serves ``folder``."""
    with subprocess.Popen([sys.executable, __file__, str(folder)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


def main() -> None:
    Handler.folder = Path(sys.argv[1])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
