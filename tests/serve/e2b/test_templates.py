"""Templates: the list, and its routes over a real server."""

import io
import tarfile
import time

import httpx
import pytest
from e2b_pieces import Client

from tandem.core.errors import RecordError
from tandem.serve.e2b.faults import Fault
from tandem.serve.e2b.templates import TemplateList


def finished(listed, name, *tags):
    template, build = listed.request(name, list(tags), cpu_count=0, memory_mb=0)
    listed.finish(template, build)
    return template, build


def test_names_tags_and_builds():
    listed = TemplateList(None)
    assert listed.find("tools") is None
    template, first = finished(listed, "tools:v1")
    assert template.tags == {"v1": first.id, "default": first.id}
    _, second = finished(listed, "tools", "v2")
    assert listed.find("tools")[1] is first and listed.find("tools:v2")[1] is second
    assert listed.find(f"tools:{second.id}")[1] is second and listed.find(template.id)[1] is first
    listed.tag(template, second, ["default"])
    assert listed.find("tools")[1] is second
    listed.untag(template, ["v2"])
    for missing in ("tools:v2", "tools:none"):
        with pytest.raises(Fault):
            listed.find(missing)
    with pytest.raises(Fault):
        listed.untag(template, ["v2"])
    listed.remove(template)
    assert listed.find("tools") is None


def test_a_build_that_is_not_ready_is_not_found():
    listed = TemplateList(None)
    template, build = listed.request("x", [], cpu_count=0, memory_mb=0)
    with pytest.raises(Fault, match="no finished build"):
        listed.find("x")
    build.status = "error"
    with pytest.raises(Fault):
        listed.find(f"x:{build.id}")


@pytest.mark.parametrize("name", ["", ":v1", "a b", "../x;", "x\n"])
def test_names_that_are_none(name):
    with pytest.raises(Fault):
        TemplateList(None).request(name, [], cpu_count=0, memory_mb=0)


def test_the_list_outlives_its_process(tmp_path):
    listed = TemplateList(tmp_path)
    _, ready = finished(listed, "kept")
    template, waiting = listed.request("late", [], cpu_count=2, memory_mb=0)
    again = TemplateList(tmp_path)
    assert again.find("kept")[1].id == ready.id
    assert again.get("late").build(waiting.id).status == "error"  # nobody goes on with it
    (tmp_path / "templates.json").write_text("{")
    with pytest.raises(RecordError):
        TemplateList(tmp_path)


def test_files_are_found_by_hash_only(tmp_path):
    listed = TemplateList(tmp_path)
    assert listed.archive("a" * 64).parent == tmp_path / "files"
    for bad in ("", "../" + "a" * 61, "A" * 64, "a" * 63):
        with pytest.raises(Fault):
            listed.archive(bad)


def archive(**files):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text))
    return buffer.getvalue()


def wait_for(client, path):
    deadline, status = time.monotonic() + 30, {}
    while time.monotonic() < deadline:
        status = client.get(path).json()
        if status["status"] not in ("waiting", "building"):
            return status
        time.sleep(0.05)
    raise AssertionError(status)


def test_a_build_with_copy_by_http(client: Client):
    asked = client.post("/v3/templates", json={"name": "copied:v1", "cpuCount": 1}).json()
    files = f"/templates/{asked['templateID']}/files/{'c' * 64}"
    link = client.get(files).json()
    assert link["present"] is False
    assert httpx.put(link["url"][:-1] + "x", content=b"x").status_code == 401  # the link is the permission
    assert httpx.put(link["url"], content=archive(data=b"copied\n")).status_code == 200
    assert client.get(files).json()["present"] is True
    build = f"/templates/{asked['templateID']}/builds/{asked['buildID']}"
    steps = [{"type": "COPY", "args": ["data", "/opt/data", "", ""], "filesHash": "c" * 64},
             {"type": "ENV", "args": ["BUILT", "yes"]}]  # fmt: skip
    body = {"fromTemplate": "base", "steps": steps, "force": False}
    assert client.post(f"/v2{build}", json=body).status_code == 202
    status = wait_for(client, f"{build}/status")
    assert status["status"] == "ready", status
    assert any("COPY" in one["message"] for one in status["logEntries"])
    assert client.post(f"/v2{build}", json=body).status_code == 409
    assert client.get(f"{build}/status", params={"logsOffset": 10_000}).json()["logEntries"] == []

    assert client.get("/templates/aliases/copied").json()["templateID"] == asked["templateID"]
    assert client.get("/templates/aliases/none").status_code == 404
    tagged = client.post("/templates/tags", json={"target": "copied:v1", "tags": ["stable"]})
    assert tagged.json() == {"tags": ["stable"], "buildID": asked["buildID"]}
    tags = {one["tag"] for one in client.get("/templates/copied/tags").json()}
    assert tags == {"v1", "default", "stable"}
    assert client.request("DELETE", "/templates/tags", json={"name": "copied", "tags": ["stable"]}).status_code == 204
    shown = client.get(f"/templates/{asked['templateID']}").json()
    assert shown["names"] == ["copied"] and shown["builds"][0]["status"] == "ready"
    assert [one["templateID"] for one in client.get("/templates").json()] == [asked["templateID"]]
    assert client.delete("/templates/copied").status_code == 204
    assert client.delete("/templates/copied").status_code == 404


def test_a_step_that_makes_no_sense_fails_the_build_with_a_reason(client: Client):
    asked = client.post("/v3/templates", json={"name": "bad"}).json()
    build = f"/templates/{asked['templateID']}/builds/{asked['buildID']}"
    body = {"fromTemplate": "base", "steps": [{"type": "COPY", "args": ["x", "/x"], "filesHash": "e" * 64}]}
    assert client.post(f"/v2{build}", json=body).status_code == 202
    status = wait_for(client, f"{build}/status")
    assert status["status"] == "error" and "not uploaded" in status["reason"]["message"]
    assert client.post("/v2/sandboxes", json={"templateID": "bad"}).status_code == 404


def built(client, name, **asked):
    made = client.post("/v3/templates", json={"name": name}).json()
    build = f"/templates/{made['templateID']}/builds/{made['buildID']}"
    step = {"type": "ENV", "args": ["BUILT", name]}
    assert client.post(f"/v2{build}", json={"fromTemplate": "base", "steps": [step], **asked}).status_code == 202
    return wait_for(client, f"{build}/status")


def test_a_warm_template_has_its_modules_imported(client: Client):
    assert built(client, "warm", warm=["colorsys", "xml.dom"])["status"] == "ready"
    made = client.start_box(templateID="warm")
    code = "import sys; print({'colorsys', 'xml.dom'} <= set(sys.modules), 'colorsys' in globals())"
    told = client.post("/execute", json={"code": code}, headers=client.to(made, port=49999)).text
    assert "True False" in told
    client.delete(f"/sandboxes/{made['sandboxID']}")
    assert "no name of" in built(client, "bad-warm", warm=["os; x"])["reason"]["message"]
    assert built(client, "no-warm", warm=["no_such_module"])["status"] == "ready"
    before = len(client.get("/v2/sandboxes").json())
    refused = client.post("/v2/sandboxes", json={"templateID": "no-warm"})
    assert refused.status_code == 409 and "no_such_module" in refused.json()["message"]
    assert len(client.get("/v2/sandboxes").json()) == before
