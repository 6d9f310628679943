from __future__ import annotations

import struct

import pytest

from tandem.core.errors import SandboxError
from tandem.sandbox.backend import Call
from tandem.sandbox.backends.frames import FRAME_MAX, Frame, frame, pack_environment, run_frame, text


def call(*arguments: str) -> Call:
    return Call(arguments=arguments, timeout_s=1.5, stdout_cap_bytes=10, stderr_cap_bytes=20)


def test_layout_is_fixed() -> None:
    assert text("ab") == b"\x02\0\0\0ab\0"
    assert frame(Frame.KILL, 7) == struct.pack("<IBI", 5, 3, 7)
    packed = run_frame(3, call("sh", "-c", "true"), pack_environment({"A": "b"}))
    assert struct.unpack_from("<IBI", packed) == (len(packed) - 4, Frame.RUN, 3)
    kind, timeout_ms, out, error, has_input = struct.unpack_from("<cIQQB", packed, 9)
    assert (kind, timeout_ms, out, error, has_input) == (b"x", 1500, 10, 20, 0)
    assert packed.endswith(struct.pack("<I", 1) + text("A=b"))


def test_undecodable_file_names_travel_unchanged() -> None:
    assert text(b"\xff\xfe".decode("utf-8", "surrogateescape")) == b"\x02\0\0\0\xff\xfe\0"


def test_what_no_command_line_can_carry_is_refused() -> None:
    with pytest.raises(SandboxError, match="NUL"):
        run_frame(1, call("a\0b"), pack_environment({}))
    with pytest.raises(SandboxError, match="at most"):
        run_frame(1, call("x" * FRAME_MAX), pack_environment({}))
