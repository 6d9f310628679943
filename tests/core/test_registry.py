"""Plug-ins by name."""

import sys

import pytest

from tandem.core.errors import PluginError
from tandem.core.registry import Registry

TABLE = {"ordered": "collections:OrderedDict", "broken": "no_such_module_here:x"}


def test_by_short_name_by_module_and_by_file(tmp_path):
    registry = Registry("reward", TABLE)
    from collections import Counter, OrderedDict

    assert registry.resolve("ordered") is OrderedDict and registry.resolve("collections:Counter") is Counter
    (tmp_path / "mine.py").write_text("thing = object()\n")
    thing = registry.resolve(f"{tmp_path}/mine.py:thing")
    assert registry.resolve(f"{tmp_path}/mine.py:thing") is thing  # one module object, so that pickles agree


def test_listing_imports_nothing():
    assert "no_such_module_here:x" in Registry("reward", TABLE).names().values()
    assert "no_such_module_here" not in sys.modules


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("orderd", "no reward named 'orderd'", "ordered"),
        ("zzz", "no reward named 'zzz'", "module:attribute"),
        ("broken", "reward 'broken' does not load: ModuleNotFoundError", ""),
        ("collections:Countr", "collections has no 'Countr'", "Counter"),
        ("/no/file.py:x", "file not found: /no/file.py", ""),
    ],
)
def test_what_cannot_be_found_says_what_is_near(name, message, hint):
    with pytest.raises(PluginError) as error:
        Registry("reward", TABLE).resolve(name)
    assert message in error.value.message and hint in error.value.hint


def test_an_unknown_kind_is_refused():
    with pytest.raises(PluginError, match="unknown plug-in kind 'rewrad'"):
        Registry("rewrad", {})


def test_a_file_that_fails_leaves_no_half_module(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("x = 1\nraise ValueError('no')\n")
    registry = Registry("reward", {})
    with pytest.raises(PluginError, match="ValueError: no"):
        registry.resolve(f"{path}:x")
    path.write_text("x = 2\n")
    assert registry.resolve(f"{path}:x") == 2
