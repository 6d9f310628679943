"""Files in and out."""

import gzip
import os

from e2b_pieces import Client, Message


def put(client: Client, box: Message, path: str, data: bytes, **words):
    return client.post("/files", params={"path": path} if path else {}, content=data, headers=client.to(box) | words)


def get(client: Client, box: Message, path: str):
    return client.get("/files", params={"path": path}, headers=client.to(box))


def test_raw(client: Client, box: Message):
    data = os.urandom(300_000)
    answer = put(client, box, "deep/folder/raw.bin", data, **{"Content-Type": "application/octet-stream"})
    assert answer.json() == [{"name": "raw.bin", "type": "file", "path": "/home/agent/deep/folder/raw.bin"}]
    assert get(client, box, "/home/agent/deep/folder/raw.bin").content == data


def test_forms(client: Client, box: Message):
    one = client.post("/files", params={"path": "named.txt"}, files=[("file", ("other", b"one"))],
                      headers=client.to(box))  # fmt: skip
    assert one.status_code == 200 and get(client, box, "named.txt").content == b"one"
    many = [("file", ("m/a", b"A")), ("file", ("/tmp/b", b"B"))]
    answer = client.post("/files", files=many, headers=client.to(box))
    assert [each["path"] for each in answer.json()] == ["/home/agent/m/a", "/tmp/b"]
    assert (get(client, box, "m/a").content, get(client, box, "/tmp/b").content) == (b"A", b"B")
    two = client.post("/files", params={"path": "x"}, files=many, headers=client.to(box))
    assert two.status_code == 400


def test_gzip(client: Client, box: Message):
    packed = gzip.compress(b"unpacked" * 1000)
    assert put(client, box, "z", packed, **{"Content-Encoding": "gzip"}).status_code == 200
    assert get(client, box, "z").content == b"unpacked" * 1000
    for broken in (packed[:-20], b"no gzip"):
        assert put(client, box, "broken", broken, **{"Content-Encoding": "gzip"}).status_code == 400
    assert put(client, box, "broken", b"", **{"Content-Encoding": "br"}).status_code == 415
    assert get(client, box, "broken").status_code == 404


def test_what_cannot_be(client: Client, box: Message):
    assert get(client, box, "nothing").status_code == 404
    assert get(client, box, "").status_code == 400
    assert get(client, box, "/tmp").status_code == 400
    assert put(client, box, "/proc/none/x", b"x").status_code in (403, 404)
    assert put(client, box, "a\0b", b"x").status_code == 400
    assert client.delete("/files", params={"path": "x"}, headers=client.to(box)).status_code == 405


def test_a_large_file_of_any_user_passes_in_parts(client: Client, box: Message):
    block = os.urandom(2**20)
    root = client.to(box, user="root") | {"Content-Type": "application/octet-stream"}
    sent = client.post("/files", params={"path": "/root/large"}, content=(block for _ in range(24)), headers=root)
    assert sent.status_code == 200, sent.text
    with client.stream("GET", "/files", params={"path": "/root/large"}, headers=root) as answer:
        assert answer.status_code == 200
        got = b"".join(answer.iter_bytes())
    assert got == block * 24
    assert client.run(box, "stat -c %U /root/large")["stdout"] == b"root\n"
    head = client.head("/files", params={"path": "/root/large"}, headers=root)
    assert head.status_code == 200 and not head.content
    assert client.head("/files", params={"path": "/root/none"}, headers=root).status_code == 404
