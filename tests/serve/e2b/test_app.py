"""One port for three faces: who may reach what."""

import time

import httpx
from e2b_pieces import KEY, Client, Message

from tandem.serve.e2b.access import Access


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


def test_users(client: Client, box: Message):
    answer = client.get("/files", params={"path": "x"}, headers=client.to(box, user="nobody-known"))
    assert answer.status_code == 401 and "nobody-known" in answer.json()["message"]
    assert client.get("/files", params={"path": "none"}, headers=client.to(box, user="user")).status_code == 404


def test_a_port_where_nothing_listens(client: Client, box: Message):
    answer = client.get("/", headers=client.to(box, port=8099))
    assert answer.status_code in (400, 502), answer.text  # 400: this backend reaches no ports
