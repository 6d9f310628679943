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


def test_a_client_that_leaves_interrupts_its_cell_and_the_kernel_stays(run, client: Client, box: Message):
    run("before = 5")
    words = {"json": {"code": "print('on', flush=True)\nimport time; time.sleep(600)"}}
    with client.stream("POST", "/execute", headers=client.to(box, port=49999), **words) as response:
        for line in response.iter_lines():
            if "on" in json.loads(line).get("text", ""):
                break
    assert texts(run("before")) == ["5"]


def test_a_kernel_that_dies_is_told_and_made_anew(run):
    events = run("import os; os._exit(3)")
    assert [event["name"] for event in events if event["type"] == "error"] == ["KernelDied"]
    assert texts(run("1 + 1")) == ["2"]
