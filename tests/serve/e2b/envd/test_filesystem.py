"""Files by name, over Connect."""

from e2b_pieces import Client, Message


def ask(client: Client, box: Message, method: str, **message):
    return client.call(box, f"filesystem.Filesystem/{method}", message)


def test_a_life_of_files(client: Client, box: Message):
    made = ask(client, box, "MakeDir", path="/tmp/life/deep")
    assert made.json()["entry"]["type"] == "FILE_TYPE_DIRECTORY"
    assert ask(client, box, "MakeDir", path="/tmp/life/deep").json()["code"] == "already_exists"
    client.run(box, "printf 12345 > /tmp/life/f; ln -s f /tmp/life/l; chmod 640 /tmp/life/f")
    found = {one["name"]: one for one in ask(client, box, "ListDir", path="/tmp/life").json()["entries"]}
    assert set(found) == {"deep", "f", "l"}
    assert (found["f"]["size"], found["f"]["mode"], found["f"]["permissions"]) == ("5", 0o640, "-rw-r-----")
    assert found["l"]["isSymlink"] and found["l"]["symlinkTarget"] == "f"
    moved = ask(client, box, "Move", source="/tmp/life/f", destination="/tmp/life/deep/g")
    assert moved.json()["entry"]["path"] == "/tmp/life/deep/g"
    deep = [one["path"] for one in ask(client, box, "ListDir", path="/tmp/life", depth=2).json()["entries"]]
    assert "/tmp/life/deep/g" in deep
    assert ask(client, box, "Remove", path="/tmp/life").json() == {}
    assert ask(client, box, "Stat", path="/tmp/life").json()["code"] == "not_found"


def test_what_cannot_be(client: Client, box: Message):
    assert ask(client, box, "Stat").json()["code"] == "invalid_argument"
    assert ask(client, box, "ListDir", path="/etc/passwd").json()["code"] == "invalid_argument"
    assert ask(client, box, "Nothing").json()["code"] == "unimplemented"
    answer = client.post("/filesystem.Filesystem/Stat", content=b"\x0a", headers=client.to(box) | {
        "Content-Type": "application/proto"})  # fmt: skip
    assert answer.status_code == 415
    assert ask(client, box, "GetWatcherEvents", watcherId="none").json()["code"] == "not_found"


def test_a_watched_folder(client: Client, box: Message):
    client.run(box, "mkdir -p /tmp/seen")
    with client.streaming(box, "filesystem.Filesystem/WatchDir", {"path": "/tmp/seen", "recursive": True}) as messages:
        assert next(messages) == {"start": {}}
        client.run(box, "mkdir /tmp/seen/new; echo x > /tmp/seen/new/f")
        told = {("", "")}
        while ("new/f", "EVENT_TYPE_CREATE") not in told:
            event = next(messages).get("filesystem", {})
            told.add((event.get("name", ""), event.get("type", "")))
    watcher = ask(client, box, "CreateWatcher", path="/tmp/seen").json()["watcherId"]
    client.run(box, "rm -r /tmp/seen/new; echo x > /tmp/seen/last")
    polled: list[tuple[str, str]] = []
    for _ in range(2000):
        events = ask(client, box, "GetWatcherEvents", watcherId=watcher).json()["events"]
        polled += [(event["name"], event["type"]) for event in events]
        if ("last", "EVENT_TYPE_WRITE") in polled:
            break
    assert polled.index(("new", "EVENT_TYPE_REMOVE")) < polled.index(("last", "EVENT_TYPE_CREATE"))
    assert ask(client, box, "RemoveWatcher", watcherId=watcher).json() == {}
    assert ask(client, box, "WatchDir", path="/tmp/none").status_code != 200
