"""Keys, tokens and signatures."""

import base64
import hashlib
import stat
import time

import pytest
from starlette.datastructures import Headers

from tandem.serve.e2b.access import Access, check_expiration, kept_secret, make_key
from tandem.serve.e2b.faults import Fault


def test_keys_open_and_nothing_else_does():
    key = make_key()
    access = Access([key], b"secret")
    access.check_key(Headers({"x-api-key": key}))
    access.check_key(Headers({"authorization": f"Bearer {key}"}))
    for headers in ({}, {"x-api-key": ""}, {"x-api-key": key[:-1]}, {"x-api-key": "é"}):
        with pytest.raises(Fault) as caught:
            access.check_key(Headers(headers))
        assert caught.value.status == 401


def test_no_key_opens_nothing_when_there_are_none():
    with pytest.raises(Fault):
        Access([], b"secret").check_key(Headers({"x-api-key": ""}))


def test_tokens_are_of_one_box_and_one_purpose():
    access = Access([], b"secret")
    tokens = {access.box_token("a"), access.box_token("b"), access.traffic_token("a"), access.upload_token("a")}
    assert len(tokens) == 4
    access.check_box("a", Headers({"x-access-token": access.box_token("a")}))
    for wrong in (access.box_token("b"), access.traffic_token("a")):
        with pytest.raises(Fault):
            access.check_box("a", Headers({"x-access-token": wrong}))


def test_the_signature_is_that_of_clients():
    """As e2b's SDK makes it: ``path:operation:user:token[:expiration]``, SHA-256, base64 without padding."""
    access = Access([], b"secret")
    raw = f"/x:read::{access.box_token('a')}:99"
    made = "v1_" + base64.b64encode(hashlib.sha256(raw.encode()).digest()).decode().rstrip("=")
    words = {"path": "/x", "operation": "read", "user": "", "expiration": "99"}
    assert access.signed("a", made, **words)
    for change in ({"path": "/y"}, {"operation": "write"}, {"user": "root"}, {"expiration": ""}):
        assert not access.signed("a", made, **(words | change))
    assert not access.signed("b", made, **words)


def test_expiration():
    check_expiration("")
    check_expiration(str(int(time.time()) + 60))
    for given, status in ((str(int(time.time()) - 1), 401), ("soon", 400)):
        with pytest.raises(Fault) as caught:
            check_expiration(given)
        assert caught.value.status == status


def test_the_secret_is_kept_and_private(tmp_path):
    path = tmp_path / "secret"
    made = kept_secret(path)
    assert len(made) == 32 and kept_secret(path) == made
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_actor_is_named_without_its_secret():
    keys = [make_key(), make_key()]
    access = Access(keys, b"secret")

    def actor(**headers):
        raw = [(name.encode().replace(b"_", b"-"), value.encode()) for name, value in headers.items()]
        return access.actor({"type": "http", "headers": raw, "client": ("10.0.0.7", 4711)})

    named = [actor(x_api_key=key) for key in keys]
    assert named[0] != named[1] and all(one.endswith(" from 10.0.0.7") for one in named)
    assert named[0] == actor(authorization=f"Bearer {keys[0]}") == f"{access.name_of(keys[0])} from 10.0.0.7"
    assert named[0] == f"{Access(keys, b'secret').name_of(keys[0])} from 10.0.0.7"  # also after a restart
    assert not any(part in named[0] for part in (keys[0], keys[0][4:12], keys[0][-8:]))
    assert actor(x_access_token=access.box_token("b")) == "token from 10.0.0.7"
