"""From a recipe to the program of an engine that is not ours.

Owns: the interpreter that is asked for and what is looked at before it starts, and how our settings are called there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

from tandem.app.preflight import ModelFiles
from tandem.config.tree import Recipe
from tandem.core.errors import ConfigError
from tandem.engine.process.program import Program
from tandem.engine.process.vllm import PACKAGES, PROGRAM, install_hint
from tandem.models.family import find_family

PROBE_S = 60.0
_PROBE = """
import importlib.metadata as m, importlib.util, sys
assert sys.version_info >= (3, 11), f"Python {sys.version.split()[0]}, and 3.11 is the oldest that serves"
for name in sys.argv[1:]:
    try:
        print(name, m.version(name)); break
    except m.PackageNotFoundError:
        pass
else:
    assert importlib.util.find_spec("vllm"), "no package " + " or ".join(sys.argv[1:])
"""
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: it ends with ours, and weights are handed over by address
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def vllm_program(recipe: Recipe, files: ModelFiles, *, numerics: str) -> Program:
    """vLLM on the model of a recipe. ``numerics`` are the trainer's; it has its own.

    Raises:
        ConfigError: the interpreter is not there, or has no vLLM.
    """
    del numerics
    spec, infer = files.spec, recipe.engine.infer
    python = _interpreter(recipe.engine.python)
    width = 4 if recipe.model.dtype == "float32" else 2
    threads = recipe.engine.threads or len(os.sched_getaffinity(0))
    settings = {
        "at_publish": infer.at_publish,
        "max_context_tokens": files.max_context_tokens,
        "eos_ids": list(spec.eos_ids),
        "vocab_size": spec.vocab_size,
        "arguments": {
            "model": str(files.path),
            "skip_tokenizer_init": True,
            "dtype": recipe.model.dtype,
            "max_model_len": files.max_context_tokens,
            "max_num_seqs": infer.max_num_seqs,
            "max_num_batched_tokens": max(infer.max_step_tokens, infer.max_num_seqs, files.max_context_tokens),
            "enable_prefix_caching": infer.prefix_cache,
            # 0.32 on a CPU fails where a prompt is cut and its request has a seed: such generators cannot step back.
            "enable_chunked_prefill": False,
            "kv_cache_memory_bytes": infer.kv_tokens * 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * width,
            "logprobs_mode": "processed_logprobs",  # of what was sampled, as ours are
            "max_logprobs": 20,
            "generation_config": "vllm",  # the model folder's own sampling settings are not the recipe's
            "enforce_eager": True,
            "async_scheduling": False,  # a token must belong to the version that its step computed with
            "disable_log_stats": True,
            "seed": 0,
        },
    }
    pieces = find_family(spec.family, where=str(files.path)).pieces(spec)
    return Program(
        command=(python, "-m", PROGRAM),
        settings=json.dumps(settings),
        transport=recipe.engine.transport,
        names=tuple((piece.source, piece.parameter, piece.start, piece.stop) for piece in pieces),
        environment=_ENVIRONMENT | {"OMP_NUM_THREADS": str(threads)},
    )


def _interpreter(named: str) -> str:
    python = shutil.which(os.path.expanduser(named)) if named else sys.executable
    if python is None:
        raise ConfigError(f"engine.python: there is no program {named}", hint=install_hint())
    try:
        done = subprocess.run([python, "-c", _PROBE, *PACKAGES], capture_output=True, text=True, timeout=PROBE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"engine.python: {python} does not run: {error}", hint=install_hint()) from error
    if done.returncode:
        said = done.stderr.strip().rpartition("\n")[2].removeprefix("AssertionError: ")
        raise ConfigError(f"engine.name = \"vllm\": {python} has no vLLM that serves: {said}", hint=install_hint())
    return python
