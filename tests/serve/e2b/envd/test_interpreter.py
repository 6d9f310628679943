"""Cells of code in a real box."""

import json

import pytest
from e2b_pieces import Client, Message


@pytest.fixture
def run(client: Client, box: Message):
    headers = client.to(box, port=49999)

    def cell(code, **more):
        answer = client.post("/execute", json={"code": code} | more, headers=headers)
        if answer.status_code == 400 and "whole commands only" in answer.text:
            pytest.skip("this backend has no long-lived processes")
        assert answer.status_code == 200, answer.text
        return [event for line in answer.text.splitlines() if (event := json.loads(line))]

    return cell


@pytest.fixture
def own(client: Client):
    made = client.start_box()
    yield made
    client.delete(f"/sandboxes/{made['sandboxID']}")


def texts(events, kind="result"):
    return [event["text"] for event in events if event["type"] == kind]


def test_state_output_and_errors(run):
    assert texts(run("x = 20")) == []
    events = run("print('said'); x + 1", env_vars={"A": "b"})
    assert texts(events) == ["21"] and texts(events, "stdout") == ["said\n"]
    assert [event["name"] for event in run("1 / 0") if event["type"] == "error"] == ["ZeroDivisionError"]
    assert texts(run("echo shell", language="bash"), "stdout") == ["shell\n"]


def test_contexts(run, client: Client, box: Message):
    headers = client.to(box, port=49999)
    run("shared = 1")
    made = client.post("/contexts", json={"cwd": "/tmp"}, headers=headers).json()
    assert made["language"] == "python" and made["cwd"] == "/tmp"
    assert made in client.get("/contexts", headers=headers).json()
    assert texts(run("import os; os.getcwd()", context_id=made["id"])) == ["'/tmp'"]
    other = run("shared", context_id=made["id"])
    assert [event["name"] for event in other if event["type"] == "error"] == ["NameError"]
    run("kept = 1", context_id=made["id"])
    assert client.post(f"/contexts/{made['id']}/restart", headers=headers).status_code == 204
    assert [event["name"] for event in run("kept", context_id=made["id"]) if event["type"] == "error"] == ["NameError"]
    assert client.delete(f"/contexts/{made['id']}", headers=headers).status_code == 204
    assert client.delete(f"/contexts/{made['id']}", headers=headers).status_code == 404
    assert client.post("/contexts", json={"language": "cobol"}, headers=headers).status_code == 400


LONG = "import time; print('on', flush=True); time.sleep(600)"
TIDY = """
import time
try:
    print('on', flush=True); time.sleep(600)
finally:
    time.sleep(0.5); print('tidied up')
"""


@pytest.mark.parametrize("code", [LONG, TIDY], ids=["at once", "in a while"])
def test_a_client_that_leaves_interrupts_its_cell_and_the_kernel_stays(run, client: Client, box: Message, code: str):
    run("before = 5")
    words = {"json": {"code": code}}
    with client.stream("POST", "/execute", headers=client.to(box, port=49999), **words) as response:
        for line in response.iter_lines():
            if "on" in json.loads(line).get("text", ""):
                break
    assert texts(run("before")) == ["5"]


def test_a_kernel_that_dies_is_told_and_made_anew(run):
    events = run("import os; os._exit(3)")
    assert [event["name"] for event in events if event["type"] == "error"] == ["KernelDied"]
    assert texts(run("1 + 1")) == ["2"]


def test_a_live_fork_has_the_kernel_and_what_it_knows(client: Client, own: Message):
    path = f"/sandboxes/{own['sandboxID']}/fork"

    def cell(box: Message, code: str):
        answer = client.post("/execute", json={"code": code}, headers=client.to(box, port=49999))
        if answer.status_code == 400 and "whole commands only" in answer.text:
            pytest.skip("this backend has no long-lived processes")
        return [json.loads(line) for line in answer.text.splitlines()]

    def contexts(box: Message):
        return client.get("/contexts", headers=client.to(box, port=49999)).json()

    cell(own, "import random, os, threading; random.seed(1); x = [1]; print(x)")
    cell(own, "os.system('echo from a child')")
    answer = client.post(path, json={"live": True, "count": 2})
    if answer.status_code == 400 and "no live fork: it needs" in answer.text:
        pytest.skip(answer.text)
    assert answer.status_code == 201, answer.text
    children = [each["sandbox"] for each in answer.json()]
    try:
        drawn = {texts(cell(own, "random.random()"))[0]}
        for number, child in enumerate(children):
            assert texts(cell(child, f"x.append({number}); print('here'); x"), "stdout") == ["here\n"]
            assert texts(cell(child, "x")) == [f"[1, {number}]"]
            assert texts(cell(child, "os.environ['E2B_SANDBOX_ID']")) == [repr(child["sandboxID"])]
            drawn.add(texts(cell(child, "random.random()"))[0])
            assert contexts(child) == contexts(own)
        assert len(drawn) == 3 and texts(cell(own, "x")) == ["[1]"]
    finally:
        for child in children:
            client.delete(f"/sandboxes/{child['sandboxID']}")
    cell(own, "stop = threading.Event(); t = threading.Thread(target=stop.wait, daemon=True); t.start()")
    refused = client.post(path, json={"live": True})
    assert refused.status_code == 400 and " threads: only one" in refused.text
    assert texts(cell(own, "stop.set(); t.join(); 'on'")) == ["'on'"]
    again = client.post(path, json={"live": True})
    assert again.status_code == 201
    client.delete(f"/sandboxes/{again.json()[0]['sandbox']['sandboxID']}")
