"""A box's users by name and number."""

from __future__ import annotations

import pytest

from tandem.sandbox.users import NoSuchUser, identity

PASSWD = (
    "root:x:0:0::/root:/bin/sh\nbroken\nagent:x:1000:1000::/home/agent:\nworker:x:2000:2001::/srv:/bin/sh\n::::::\n"
)
GROUP = "root:x:0:\nworker:x:2001:\ndocker:x:27:other,worker\nweb:x:33:\n"


@pytest.mark.parametrize(
    ("text", "user", "home"),
    [
        ("worker", "2000:2001:27", "/srv"), ("2000", "2000:2001:27", "/srv"), ("worker:web", "2000:33", "/srv"),
        ("worker:0", "2000:0", "/srv"), ("root", "root", "/root"), ("77", "77:0", "/"), ("77:88", "77:88", "/"),
        ("root:web", "0:33", "/root"),
    ],
)  # fmt: skip
def test_names_and_numbers(text: str, user: str, home: str) -> None:
    found = identity(text, PASSWD, GROUP)
    assert (found.user, found.environment["HOME"]) == (user, home)


def test_what_clients_call_the_usual_one() -> None:
    assert identity("user", PASSWD, GROUP).user == "agent"
    assert identity("user", PASSWD + "user:x:5:5::/u:\n", GROUP).user == "5:5"


@pytest.mark.parametrize("text", ["nobody", "worker:none", "70000", "77:70000", "-1", "²", ":5"])
def test_none(text: str) -> None:
    with pytest.raises(NoSuchUser):
        identity(text, PASSWD, GROUP)
