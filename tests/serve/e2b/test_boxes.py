"""Lives of boxes over HTTP: pause, fork, snapshots, ports; skipped where this machine has no such ability."""

import base64
import time

import pytest
from e2b_pieces import Client, Message, note, shell


def done(answer, status):
    if answer.status_code == 400 and "cannot" in answer.text:
        pytest.skip(answer.json()["message"])
    assert answer.status_code == status, answer.text
    return answer


@pytest.fixture
def own(client: Client):
    made = client.start_box()
    yield made
    client.delete(f"/sandboxes/{made['sandboxID']}")


def test_pause_is_idempotent_and_connect_goes_on(client: Client, own: Message):
    path = f"/sandboxes/{own['sandboxID']}"
    client.run(own, "echo kept > ~/f")
    done(client.post(f"{path}/pause", json={}), 204)
    assert client.post(f"{path}/pause", json={}).status_code == 409
    assert client.get(path).json()["state"] == "paused"
    assert client.get("/health", headers=client.to(own)).status_code == 502
    again = client.post(f"/v2{path}/connect", json={"timeout": 60})
    assert again.status_code == 201 and again.json()["envdAccessToken"] == own["envdAccessToken"]
    assert client.run(own, "cat ~/f")["stdout"] == b"kept\n"


def test_a_cold_pause_is_one_of_a_paused_box_too_or_says_what_is_missing(client: Client, own: Message):
    path = f"/sandboxes/{own['sandboxID']}"
    assert "memory: false" in client.post(f"{path}/pause", json={"cold": True, "memory": False}).json()["message"]
    answer = client.post(f"{path}/pause", json={"cold": True})
    if answer.status_code == 204:
        done(client.post(f"{path}/pause", json={"cold": True}), 204)
        assert client.post(f"{path}/pause", json={}).status_code == 409
        assert client.post(f"{path}/connect", json={"timeout": 60}).status_code == 201
    else:
        assert 400 <= answer.status_code < 500 and "cold" in answer.json()["message"], answer.text
        assert client.get(path).json()["state"] == "running"
    assert client.run(own, "echo up")["stdout"] == b"up\n"


def test_use_resumes_a_box_that_says_so(client: Client):
    made = client.start_box(autoPause=True, autoResume={"enabled": True})
    path = f"/sandboxes/{made['sandboxID']}"
    try:
        done(client.post(f"{path}/pause", json={}), 204)
        assert client.run(made, "echo up")["stdout"] == b"up\n"
        assert client.get(path).json()["state"] == "running"
    finally:
        client.delete(path)


def test_its_time_passes_and_it_pauses(client: Client):
    made = client.start_box(timeout=1, autoPause=True)
    path, deadline = f"/sandboxes/{made['sandboxID']}", time.monotonic() + 30
    try:
        while (shown := client.get(path)).status_code == 200 and shown.json()["state"] != "paused":
            assert time.monotonic() < deadline, shown.text
            time.sleep(0.1)
        if shown.status_code == 404:
            pytest.skip("boxes of this backend do not pause: it was killed")
        assert client.get("/v2/sandboxes", params={"state": "paused"}).json()[0]["sandboxID"] == made["sandboxID"]
    finally:
        client.delete(path)


def test_forks_and_snapshots_have_the_files_of_their_moment(client: Client, own: Message):
    path = f"/sandboxes/{own['sandboxID']}"
    client.run(own, "echo one > ~/f")
    children = [one["sandbox"] for one in done(client.post(f"{path}/fork", json={"count": 2}), 201).json()]
    snapshot = done(client.post(f"{path}/snapshots", json={"name": "moment"}), 201).json()
    assert snapshot["names"] == ["moment"]
    client.run(own, "echo two > ~/f")
    fresh = client.start_box(templateID=snapshot["snapshotID"])
    boxes = [*children, fresh]
    try:
        assert {one["sandboxID"] for one in boxes} & {own["sandboxID"]} == set()
        assert [client.run(one, "cat ~/f")["stdout"] for one in boxes] == [b"one\n"] * 3
        assert len({one["envdAccessToken"] for one in [*boxes, own]}) == 4
        listed = client.get("/snapshots", params={"sandboxID": own["sandboxID"]}).json()
        assert [one["snapshotID"] for one in listed] == [snapshot["snapshotID"]]
        assert client.delete(f"/templates/{snapshot['snapshotID']}").status_code == 204
        assert client.get("/snapshots", params={"name": "moment"}).json() == []
    finally:
        for one in boxes:
            client.delete(f"/sandboxes/{one['sandboxID']}")


def test_a_live_fork_has_the_running_command(client: Client, own: Message):
    path = f"/sandboxes/{own['sandboxID']}"
    refused = client.post(f"{path}/fork", json={"live": True})
    assert refused.status_code == 400
    process = {"process": {"cmd": "/bin/bash"}, "stdin": True}
    with client.streaming(own, "process.Process/Start", process) as messages:
        pid = next(messages)["event"]["start"]["pid"]
        words = base64.b64encode(b"x=41\n").decode()
        client.call(own, "process.Process/SendInput", {"process": {"pid": pid}, "input": {"stdin": words}})
        child = done(client.post(f"{path}/fork", json={"live": True}), 201).json()[0]["sandbox"]
        try:
            (copied,) = client.call(child, "process.Process/List", {}).json()["processes"]
            assert copied["config"]["cmd"] == "/bin/bash"
            told = {"stdout": b"", "stderr": b"", "end": None, "error": None}
            selector = {"process": {"pid": copied["pid"]}}
            with client.streaming(child, "process.Process/Connect", selector) as heard:
                words = base64.b64encode(b"echo $((x + 1)); exit 3\n").decode()
                client.call(child, "process.Process/SendInput", {**selector, "input": {"stdin": words}})
                for one in heard:
                    note(told, one)
            assert told["stdout"] == b"42\n" and told["end"]["exitCode"] == 3
        finally:
            client.delete(f"/sandboxes/{child['sandboxID']}")


def test_a_server_in_the_box_is_reached(client: Client, own: Message):
    server = shell("echo inside > index.html; exec python3 -m http.server 8088 --bind 127.0.0.1")
    headers, deadline = client.to(own, port=8088), time.monotonic() + 30
    with client.streaming(own, "process.Process/Start", server) as messages:
        next(messages)
        while (answer := client.get("/index.html", headers=headers)).status_code == 502:
            assert "port is not open" in answer.json()["message"] and time.monotonic() < deadline
            time.sleep(0.1)
        assert done(answer, 200).text == "inside\n"


def test_stdin_terminals_and_signals(client: Client, own: Message):
    told: Message = {"stdout": b"", "stderr": b"", "pty": b"", "end": None, "error": None}
    with client.streaming(own, "process.Process/Start", shell("cat; echo end") | {"stdin": True}) as messages:
        first = next(messages)
        if "trailer" in first:
            pytest.skip(first["trailer"]["error"]["message"])
        process = {"pid": first["event"]["start"]["pid"]}
        words = {"process": process, "input": {"stdin": "d29yZHMK"}}
        assert client.call(own, "process.Process/SendInput", words).status_code == 200
        wrong = client.call(own, "process.Process/SendInput", {"process": process, "input": {"pty": "eA=="}})
        assert wrong.json()["code"] == "failed_precondition"
        assert client.call(own, "process.Process/CloseStdin", {"process": process}).status_code == 200
        for one in messages:
            note(told, one)
    assert told["stdout"] == b"words\nend\n"
    asked = shell("stty size; read x; stty size; sleep 600") | {"pty": {"size": {"cols": 91, "rows": 17}}}
    with client.streaming(own, "process.Process/Start", asked) as messages:
        process = {"pid": next(messages)["event"]["start"]["pid"]}
        for one in messages:
            note(told, one)
            if b"17 91" in told["pty"] and b"18 92" not in told["pty"]:
                size = {"process": process, "pty": {"size": {"cols": 92, "rows": 18}}}
                assert client.call(own, "process.Process/Update", size).status_code == 200
                client.call(own, "process.Process/SendInput", {"process": process, "input": {"pty": "Cg=="}})
            if b"18 92" in told["pty"]:
                client.call(own, "process.Process/SendSignal", {"process": process, "signal": "SIGNAL_SIGKILL"})
    assert told["end"]["exitCode"] == 137 and told["end"]["status"] == "signal: SIGKILL"
