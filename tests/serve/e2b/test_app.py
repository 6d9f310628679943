"""One port for three faces: who may reach what."""

import base64
import time

import httpx
import pytest
from e2b_pieces import KEY, Client, Message, RunningServer, note

from tandem.sandbox.audit import read, verify
from tandem.serve.e2b.access import Access, kept_secret


def test_every_guarded_route_is_documented(client: Client):
    shown = httpx.get(f"{client.base_url}/openapi.json").json()
    assert shown["openapi"].startswith("3.1")
    paths = {(method.upper(), path) for path, methods in shown["paths"].items() for method in methods}
    wanted = {("POST", "/sandboxes"), ("POST", "/v2/sandboxes"), ("PUT", "/sandboxes/{sandbox_id}/network"),
              ("POST", "/v3/templates"), ("DELETE", "/templates/tags")}  # fmt: skip
    assert wanted <= paths
    body = shown["paths"]["/v2/sandboxes"]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    fields = shown["components"]["schemas"][body.rpartition("/")[2]]["properties"]
    assert {"templateID", "autoPause", "envVars", "allowInternetAccess"} <= set(fields)


def test_health_and_numbers_need_no_key(client: Client, box: Message):
    assert httpx.get(f"{client.base_url}/health").json()["status"] == "ok"
    assert 'tandem_sandboxes{state="running"} 1.0' in httpx.get(f"{client.base_url}/metrics").text


def test_a_box_wants_its_own_token(client: Client, box: Message):
    other = client.start_box()
    for token in ("", "x", other["envdAccessToken"], box["trafficAccessToken"]):
        headers = client.to(box) | {"X-Access-Token": token}
        for method, path in (("GET", "/files?path=x"), ("POST", "/process.Process/List"), ("GET", "/envs")):
            assert client.request(method, path, headers=headers).status_code == 401, (token, path)
    client.delete(f"/sandboxes/{other['sandboxID']}")


def test_the_interpreter_wants_a_token_too(client: Client, box: Message):
    headers = client.to(box, port=49999) | {"X-Access-Token": ""}
    assert client.get("/contexts", headers=headers).status_code == 401
    headers["E2B-Traffic-Access-Token"] = box["trafficAccessToken"]
    assert client.get("/contexts", headers=headers).json() == []


def test_a_box_that_is_gone_is_told_in_the_words_of_clients(client: Client):
    made = client.start_box()
    assert client.get("/health", headers=client.to(made)).status_code == 204
    client.delete(f"/sandboxes/{made['sandboxID']}")
    for answer in (client.get("/health", headers=client.to(made)), client.call(made, "process.Process/List", {}),
                   client.get("/", headers=client.to(made, port=80))):  # fmt: skip
        assert answer.status_code == 502 and "was not found" in answer.json()["message"]


def test_tokens_never_enter_a_box(client: Client, box: Message):
    seen = client.run(box, "env; cat /proc/*/environ /proc/*/cmdline 2>/dev/null")["stdout"]
    assert seen
    for secret in (KEY, box["envdAccessToken"], box["trafficAccessToken"]):
        assert secret.encode() not in seen


def test_signed_links(client: Client, box: Message):
    client.post("/files", params={"path": "signed.txt"}, content=b"words", headers=client.to(box))
    access = Access([], b"")
    access.box_token = lambda sandbox_id: box["envdAccessToken"]  # type: ignore[method-assign]

    def link(path: str, operation: str, expiration: str, *, signed_path: str = "") -> dict[str, str]:
        signature = access.signature("", signed_path or path, operation, "", expiration)
        words = {"path": path, "signature": signature}
        return words | ({"signature_expiration": expiration} if expiration else {})

    address = f"{client.base_url}/files"
    later, before = str(int(time.time()) + 60), str(int(time.time()) - 60)
    assert httpx.get(address, params=link("signed.txt", "read", later)).content == b"words"  # it names no box
    assert httpx.get(address, params=link("signed.txt", "read", "")).status_code == 200
    assert httpx.get(address, params=link("signed.txt", "read", before)).status_code == 401
    assert httpx.get(address, params=link("signed.txt", "write", later)).status_code == 401
    assert httpx.get(address, params=link("other", "read", later, signed_path="signed.txt")).status_code == 401
    assert httpx.post(address, params=link("up.txt", "write", later), content=b"in").status_code == 200
    assert httpx.get(address, params={"path": "signed.txt"}).status_code == 404
    as_root = {"Authorization": "Basic " + base64.b64encode(b"root:").decode()}  # the link is for the box's user
    up = link("/root/up.txt", "write", later)
    assert httpx.post(address, params=up, content=b"", headers=as_root).status_code == 403
    assert httpx.get(address, params=link("signed.txt", "read", "9" * 5000)).status_code == 400
    for wrong in ({"signature": "v1_\u00e9"}, {"signature_expiration": ""}, {"username": "root"}):
        assert httpx.get(address, params=link("signed.txt", "read", later) | wrong).status_code == 401, wrong


@pytest.mark.parametrize("port", ["0", "65536", "9" * 5000, "\u0663", "-1", "80.0"])
def test_a_port_that_is_none_is_a_bad_request(client: Client, box: Message, port: str):
    headers = {"E2b-Sandbox-Id": box["sandboxID"], "E2b-Sandbox-Port": port.encode()}
    assert httpx.get(f"{client.base_url}/", headers=headers).status_code == 400


def test_a_key_that_is_sent_to_a_port_stays_outside(client: Client, box: Message):
    server = (
        "import http.server as h\n"
        "class H(h.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200); self.end_headers(); self.wfile.write(str(self.headers).encode())\n"
        "h.HTTPServer(('127.0.0.1', 8077), H).serve_forever()"
    )
    client.run(box, f"python3 -c \"{server}\" >/dev/null 2>&1 & echo")
    headers = client.to(box, port=8077) | {"X-Other": "seen", "Authorization": f"Bearer {KEY}"}
    deadline = time.monotonic() + 30
    while (answer := client.get("/", headers=headers)).status_code == 502 and time.monotonic() < deadline:
        time.sleep(0.05)
    if answer.status_code == 400:
        pytest.skip("this backend reaches no ports")
    assert "seen" in answer.text
    for secret in (KEY, box["envdAccessToken"], box["trafficAccessToken"]):
        assert secret not in answer.text
    own = client.get("/", headers=headers | {"X-API-Key": "of the server inside", "Authorization": "Bearer its own"})
    assert "of the server inside" in own.text and "Bearer its own" in own.text


def test_users(client: Client, box: Message):
    answer = client.get("/files", params={"path": "x"}, headers=client.to(box, user="nobody-known"))
    assert answer.status_code == 401 and "nobody-known" in answer.json()["message"]
    assert client.get("/files", params={"path": "none"}, headers=client.to(box, user="user")).status_code == 404
    root = client.to(box, user="root")
    client.post("/files", params={"path": "/etc/passwd"}, headers=root, content=(
        b"root:x:0:0::/root:/bin/sh\nagent:x:1000:1000::/home/agent:/bin/sh\nworker:x:2000:2001::/srv:/bin/sh\n"
    ))  # fmt: skip
    client.post("/files", params={"path": "/etc/group"}, headers=root, content=b"worker:x:2001:\ndocker:x:27:worker\n")
    started = {"process": {"cmd": "/bin/sh", "args": ["-c", "id -u; id -g; id -G; echo $HOME $USER; cd; pwd"]}}
    told: Message = {"stdout": b"", "stderr": b"", "end": None, "error": None}
    with client.streaming(box, "process.Process/Start", started, **client.to(box, user="worker")) as messages:
        for message in messages:
            note(told, message)
    assert told["stdout"].split() == b"2000 2001 2001 27 /srv worker /srv".split(), told
    client.post("/files", params={"path": "/tmp/own"}, headers=client.to(box, user="2000"), content=b"x")
    assert client.run(box, "stat -c '%u %g' /tmp/own")["stdout"] == b"2000 2001\n"
    assert client.run(box, "cat /proc/self/status | grep CapEff; id -u; echo $HOME")["stdout"].split()[2:] == [
        b"1000", b"/home/agent"
    ]


def test_a_port_where_nothing_listens(client: Client, box: Message):
    answer = client.get("/", headers=client.to(box, port=8099))
    assert answer.status_code in (400, 502), answer.text  # 400: this backend reaches no ports


def test_who_did_what_is_in_the_audit_log(server: RunningServer, client: Client):
    name = Access([KEY], kept_secret(server.state / "secret")).name_of(KEY)
    made = client.start_box()
    one = made["sandboxID"]
    client.run(made, "true")
    client.post("/files", params={"path": "f"}, content=b"x", headers=client.to(made))
    client.get("/files", params={"path": "f"}, headers=client.to(made))
    client.call(made, "filesystem.Filesystem/Stat", {"path": "f"})
    client.call(made, "filesystem.Filesystem/Remove", {"path": "f"})
    client.post(f"/sandboxes/{one}/timeout", json={"timeout": 60})
    client.put(f"/sandboxes/{one}/network", json={"allowOut": ["a.org"]})
    httpx.post(f"{client.base_url}/process.Process/List", json={}, headers=client.to(made) | {"X-Access-Token": "x"})
    client.delete(f"/sandboxes/{one}")
    client.post("/v3/templates", json={"name": "told"})
    told = [line for line in read(server.state / "audit") if line.subject == one]
    assert [line.action for line in told] == [
        "create", "POST process.Process/Start", "POST files", "POST filesystem.Filesystem/Remove", "set timeout",
        "network", "kill",
    ]
    assert {line.actor for line in told} == {f"{name} from 127.0.0.1"}
    assert told[2].detail == {"path": "f"}
    (built,) = [line for line in read(server.state / "audit") if line.action == "POST /v3/templates"]
    assert built.actor == f"{name} from 127.0.0.1"
    assert KEY not in (server.state / "audit" / "audit.jsonl").read_text()
    assert verify(server.state / "audit").bad is None
