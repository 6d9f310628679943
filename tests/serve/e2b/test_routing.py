"""Which box a request names."""

import pytest
from starlette.datastructures import Headers

from tandem.serve.e2b.faults import Fault
from tandem.serve.e2b.routing import Target, target_of


@pytest.mark.parametrize(
    ("headers", "target"),
    [
        ({"host": "127.0.0.1:3000"}, None),
        ({"host": "api.example.org"}, None),
        ({"host": "49983-sbx-a1-2.example.org"}, Target("sbx-a1-2", 49983)),
        ({"host": "8080-sbx_1.example.org:443"}, Target("sbx_1", 8080)),
        ({"host": "x", "e2b-sandbox-id": "b", "e2b-sandbox-port": "81"}, Target("b", 81)),
        ({"host": "9-other.example.org", "e2b-sandbox-id": "b"}, Target("b", 49983)),
    ],
)
def test_names(headers, target):
    assert target_of(Headers(headers)) == target


@pytest.mark.parametrize("port", ["0", "65536", "x", "-1", ""])
def test_a_port_that_is_none(port):
    with pytest.raises(Fault) as caught:
        target_of(Headers({"e2b-sandbox-id": "b", "e2b-sandbox-port": port}))
    assert caught.value.status == 400
