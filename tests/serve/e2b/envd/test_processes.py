"""Commands over HTTP: streams, ends, deadlines, clients that leave."""

import time

from e2b_pieces import Client, Message, note, shell


def test_output_and_exit_code(client: Client, box: Message):
    told = client.run(box, "echo out; echo err >&2; exit 7")
    assert (told["stdout"], told["stderr"]) == (b"out\n", b"err\n")
    assert told["end"] == {"exitCode": 7, "exited": True, "status": "exit status 7"} and told["error"] is None


def test_bytes_that_are_no_text(client: Client, box: Message):
    assert client.run(box, r"printf '\377\000\376'")["stdout"] == b"\xff\x00\xfe"


def test_environment_and_folder(client: Client, box: Message):
    message = {"process": {"cmd": "/bin/sh", "args": ["-c", "echo $A; pwd; echo $E2B_SANDBOX_ID"],
                           "envs": {"A": "b"}, "cwd": "/tmp"}}  # fmt: skip
    told = {"stdout": b"", "stderr": b"", "end": None, "error": None}
    with client.streaming(box, "process.Process/Start", message) as messages:
        for one in messages:
            note(told, one)
    assert told["stdout"].decode() == f"b\n/tmp\n{box['sandboxID']}\n"


def test_the_deadline_is_the_life_of_the_group_and_what_was_said_is_kept(client: Client, box: Message):
    told = client.run(box, "echo before; sleep 4391 & sleep 4391", timeout_ms=700)
    assert told["stdout"] == b"before\n" and told["end"] is None
    assert told["error"]["code"] == "deadline_exceeded"
    left = client.run(box, "cat /proc/*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -c 'sleep 439[1]'")
    assert left["stdout"] == b"0\n"


def test_a_dropped_stream_kills_nothing_and_runs_nothing_twice(client: Client, box: Message):
    command = "echo once >> ~/ran; sleep 1; echo late"
    with client.streaming(box, "process.Process/Start", shell(command)) as messages:
        pid = next(messages)["event"]["start"]["pid"]
    listed = client.call(box, "process.Process/List", {}).json()["processes"]
    assert [one["config"]["args"] for one in listed if one["pid"] == pid] == [["-c", command]]
    told = {"stdout": b"", "stderr": b"", "end": None, "error": None}
    with client.streaming(box, "process.Process/Connect", {"process": {"pid": pid}}) as messages:
        for one in messages:
            note(told, one)
    assert told["stdout"] == b"late\n" and told["end"]["exitCode"] == 0
    assert client.run(box, "cat ~/ran")["stdout"] == b"once\n"
    with client.streaming(box, "process.Process/Connect", {"process": {"pid": pid}}) as messages:
        assert any("end" in one.get("event", {}) for one in messages)  # it ended before we asked


def test_a_stream_of_a_killed_box_is_aborted_not_ended(client: Client):
    made = client.start_box()
    told = {"stdout": b"", "stderr": b"", "end": None, "error": None}
    with client.streaming(made, "process.Process/Start", shell("echo here; sleep 100")) as messages:
        for one in messages:
            note(told, one)
            if told["stdout"] == b"here\n" and told["error"] is None:
                client.delete(f"/sandboxes/{made['sandboxID']}")
    assert told["end"] is None and told["error"]["code"] == "unavailable"


def test_keepalive(client: Client, box: Message):
    extra = {"Keepalive-Ping-Interval": "1"}
    with client.streaming(box, "process.Process/Start", shell("sleep 1.6"), **extra) as messages:
        seen = [one["event"] for one in messages if "event" in one]
    assert {"keepalive": {}} in seen and "end" in seen[-1]


def test_what_is_not_there(client: Client, box: Message):
    answer = client.call(box, "process.Process/SendSignal", {"process": {"pid": 77}, "signal": "SIGNAL_SIGKILL"})
    assert answer.status_code == 404 and answer.json()["code"] == "not_found"
    assert client.call(box, "process.Process/SendSignal", {}).status_code == 400
    with client.streaming(box, "process.Process/Start", {"process": {}}) as messages:
        assert next(messages)["trailer"]["error"]["code"] == "invalid_argument"


def test_tags(client: Client, box: Message):
    with client.streaming(box, "process.Process/Start", shell("sleep 2; echo tagged") | {"tag": "mine"}) as messages:
        next(messages)
    listed = client.call(box, "process.Process/List", {}).json()["processes"]
    assert "mine" in [one.get("tag") for one in listed]
    told = {"stdout": b"", "stderr": b"", "end": None, "error": None}
    with client.streaming(box, "process.Process/Connect", {"process": {"tag": "mine"}}) as messages:
        for one in messages:
            note(told, one)
    assert told["stdout"] == b"tagged\n"


def test_many_commands_at_once(client: Client, box: Message):
    started = time.monotonic()
    with (
        client.streaming(box, "process.Process/Start", shell("sleep 1; echo 1")) as first,
        client.streaming(box, "process.Process/Start", shell("sleep 1; echo 2")) as second,
    ):
        assert sum("end" in one.get("event", {}) for stream in (first, second) for one in stream) == 2
    assert time.monotonic() - started < 30
