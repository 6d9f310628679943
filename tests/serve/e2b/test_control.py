"""The control plane over real boxes."""

from datetime import datetime

from e2b_pieces import Client


def seconds_left(shown):
    return (datetime.fromisoformat(shown["endAt"]) - datetime.fromisoformat(shown["startedAt"])).total_seconds()


def test_create_of_both_eras_detail_and_kill(client: Client):
    old = client.post("/sandboxes", json={"templateID": "base"})
    new = client.post("/v2/sandboxes", json={"templateID": "base", "metadata": {"a": "b"}})
    assert (old.status_code, new.status_code) == (201, 201)
    for made, lifetime_s in ((old.json(), 15), (new.json(), 300)):
        shown = client.get(f"/sandboxes/{made['sandboxID']}").json()
        assert shown["state"] == "running" and round(seconds_left(shown)) == lifetime_s
        assert shown["envdAccessToken"] == made["envdAccessToken"] != made["trafficAccessToken"]
    assert shown["metadata"] == {"a": "b"} and shown["alias"] == "base"
    for made in (old.json(), new.json()):
        path = f"/sandboxes/{made['sandboxID']}"
        assert client.delete(path).status_code == 204
        assert client.delete(path).status_code == 404 == client.get(path).status_code


def test_without_a_key_nothing(client: Client):
    for headers in ({"X-API-Key": ""}, {"X-API-Key": "e2b_wrong"}):
        for method, path in (("POST", "/sandboxes"), ("GET", "/v2/sandboxes"), ("DELETE", "/sandboxes/x")):
            assert client.request(method, path, headers=headers).status_code == 401


def test_the_same_idempotency_key_makes_one_box(client: Client):
    words = {"json": {"timeout": 60}, "headers": {"Idempotency-Key": "k1"}}
    first, again = client.post("/v2/sandboxes", **words).json(), client.post("/v2/sandboxes", **words).json()
    assert first == again
    client.delete(f"/sandboxes/{first['sandboxID']}")


def test_pages_and_metadata(client: Client):
    made = [client.start_box(metadata={"set": "pages", "n": str(n), "a b": "c&d"})["sandboxID"] for n in range(3)]
    try:
        found, token = [], ""
        for _ in range(3):
            page = client.get("/v2/sandboxes", params={"metadata": "set=pages", "limit": "1", "nextToken": token})
            assert len(page.json()) == 1
            found += [one["sandboxID"] for one in page.json()]
            token = page.headers.get("x-next-token", "")
        assert found == made[::-1] and token == ""
        oldest = client.get("/v2/sandboxes", params={"metadata": "set=pages", "order": "asc", "limit": "1"})
        assert oldest.json()[0]["sandboxID"] == made[0]
        one = client.get("/v2/sandboxes", params={"metadata": "n=1&set=pages&a%2520b=c%2526d"}).json()
        assert [each["sandboxID"] for each in one] == [made[1]]
        assert client.get("/v2/sandboxes", params={"metadata": "set=nothing"}).json() == []
        assert client.get("/v2/sandboxes", params={"nextToken": "?"}).status_code == 400
    finally:
        for each in made:
            client.delete(f"/sandboxes/{each}")


def test_timeout_and_refresh(client: Client):
    made = client.start_box(timeout=100)
    path = f"/sandboxes/{made['sandboxID']}"

    def left():
        return round(seconds_left(client.get(path).json()), -1)

    assert client.post(f"{path}/timeout", json={"timeout": 500}).status_code == 204 and left() == 500
    assert client.post(f"{path}/refreshes", json={"duration": 50}).status_code == 204 and left() == 500
    assert client.post(f"{path}/connect", json={"timeout": 50}).status_code == 200 and left() == 500
    assert client.post(f"/v2{path}/connect", json={"timeout": 900}).status_code == 200 and left() == 900
    assert client.post(f"{path}/timeout", json={"timeout": -1}).status_code == 400
    assert client.post(f"{path}/resume", json={}).status_code == 409
    client.delete(path)
    assert client.post(f"{path}/timeout", json={"timeout": 5}).status_code == 404


def test_bad_bodies_name_the_field(client: Client):
    for body, word in (({"timeout": "x"}, "timeout"), ({"envVars": {"a": 1}}, "envVars"), ({"timeout": 10**9}, "86400"),
                       ({"volumeMounts": [{}]}, "volumeMounts"),
                       ({"network": {"rules": {"x": []}}}, "rules")):  # fmt: skip
        answer = client.post("/v2/sandboxes", json=body)
        assert answer.status_code == 400 and word in answer.json()["message"], answer.text
    assert client.post("/v2/sandboxes", content=b"[").status_code == 400
    assert client.post("/sandboxes/none/fork", json={"count": 101}).status_code == 400


def test_a_template_that_is_none(client: Client):
    answer = client.post("/v2/sandboxes", json={"templateID": "no-such-template"})
    assert 400 <= answer.status_code < 500 and "no-such-template" in answer.json()["message"]


def test_logs_tell_what_was_done(client: Client):
    made = client.start_box()
    told = client.get(f"/v2/sandboxes/{made['sandboxID']}/logs").json()["logs"]
    assert all({"timestamp", "message", "level", "fields"} == set(one) for one in told)
    assert set(client.get(f"/sandboxes/{made['sandboxID']}/logs").json()) == {"logs", "logEntries"}
    client.delete(f"/sandboxes/{made['sandboxID']}")
