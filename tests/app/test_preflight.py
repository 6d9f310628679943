"""What is wrong is said before any model is loaded: the model folder of these tests has everything but its weights,
whose file is rubbish, so that a check that came too late would say something else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from app_pieces import TINY, Child, said, small, tandem

from tandem.app import preflight
from tandem.app.preflight import pick_device, prepare_model
from tandem.config.load import load
from tandem.core.errors import ConfigError
from tandem.models.builtin import resolve_model
from tandem.sandbox.images.library import ImageLibrary
from tandem.sandbox.images.templates import Template

HEAD = """
from pathlib import Path
from tandem.envs.environment import Environment
from tandem.envs.reward import Reward
from tandem.envs.taskset import generated, task, tasks_from
from tandem.envs.workflow import tool_loop

def judge(episode):
    return 1.0

"""
BUNDLE = 'environment = Environment(tasks={}, workflow=tool_loop(["shell"]), rewards=[Reward(judge)])\n'
FILES = {
    "syntax.py": HEAD + "environment = Environment(tasks=\n",
    "imports.py": HEAD + "import no_such_package\n",
    "attribute.py": HEAD + "enviroment = 1\n",
    "number.py": HEAD + "environment = 1\n",
    "rows.jsonl": '{"question": "2 + 2", "answer": "4"}\n',
    "column.py": HEAD + BUNDLE.format('tasks_from(Path(__file__).parent / "rows.jsonl")'),
    "long.py": HEAD + BUNDLE.format('generated(lambda seed, index: task("long " * 500, id=f"{seed}-{index}"))'),
    "bare.py": HEAD + BUNDLE.format('generated(lambda seed, index: task("short", id=f"{seed}-{index}"))'),
    "raises.py": HEAD + BUNDLE.format("generated(lambda seed, index: 1 / 0)"),
    "table.toml": "[traner]\nsteps = 1\n",
    "key.toml": "\n[trainer]\nsteps = 1\nstep = 2\n",
    "type.toml": '[trainer]\nsteps = "3"\n',
    "boxless.py": """
from tandem.core.boxes import Isolation
from tandem.core.errors import SandboxUnavailable

class Backend:
    name, isolation, abilities = "boxless", Isolation.SHARED_KERNEL, frozenset()

    def __init__(self, section, state):
        pass

    async def create(self, spec, *, timeout_s):
        raise SandboxUnavailable("this place has no boxes", hint="go elsewhere")

    async def close(self):
        pass
""",
}


@pytest.fixture(scope="module")
def rubbish(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder whose weights are none."""
    folder = tmp_path_factory.mktemp("rubbish") / "model"
    shutil.copytree(resolve_model("tiny"), folder)
    (folder / "model.safetensors").write_bytes(b"rubbish")
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the files above; no run is made in it."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "latin.toml").write_bytes("# gr\u00fcn\n".encode("latin1"))
    (tmp_path / "twice.yaml").write_text("trainer:\n  steps: 1\n  steps: 2\n")
    (tmp_path / "header.toml").write_text("\n[rollout\ngroup_size = 2\n")
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(3)\n")
    yield tmp_path
    runs = tmp_path / "runs"
    assert not runs.exists() or [path.name for path in runs.iterdir()] == ["taken"]


CASES = [
    ("table.toml", 2, "table.toml:1: no table 'traner'", "did you mean trainer?"),
    ("key.toml", 2, "key.toml:4: no key 'trainer.step'", "did you mean trainer.steps"),
    ("--trainer.step 3", 2, "no option --trainer.step", "did you mean --trainer.steps"),
    ("type.toml", 2, 'trainer.steps (type.toml:2): must be a whole number, got "3"', ""),
    ("--trainer.steps many", 2, "--trainer.steps must be a whole number, got 'many'", ""),
    ("--trainer.steps -1", 2, "trainer.steps (flag --trainer.steps): must be greater than or equal to 0, got -1", ""),
    ("--trainer.steps 99999999999999999999999", 2, "trainer.steps (flag --trainer.steps): must be less than", ""),
    ("--rollout.group-size 999999", 2, "rollout.group_size (flag --rollout.group-size): must be less than", ""),
    ("twice.yaml", 2, "twice.yaml:3: trainer.steps is set a second time (first in line 2)", "leave one of the two out"),
    ("latin.toml", 2, "latin.toml: is not UTF-8", "iconv"),
    ("header.toml", 2, "header.toml:2 is not valid TOML", ""),
    ("--environment.name exits.py:environment", 2, "SystemExit: 3", "exits.py:2"),
    ("--record.folder number.py/runs", 2, "number.py/runs", "choose another record.folder"),
    ("--model.dtype float16", 2, "model.dtype (flag --model.dtype): must be one of", "did you mean bfloat16?"),
    ("--model.path tny", 2, "model not found: tny", "did you mean tiny?"),
    ("--model.device gpu7", 2, "model.device is 'gpu7'", "auto, cpu or cuda"),
    ("--model.tool-format herms", 2, "model.tool_format: no parser named 'herms'", "hermes"),
    ("--algorithm.name gropo", 2, "no algorithm named 'gropo'", "did you mean grpo"),
    ("--engine.infer.kv-tokens 64", 2, "engine.infer.kv_tokens is 64", "lower model.max_context_tokens"),
    ("--environment.name chore", 2, "no environment named 'chore'", "did you mean chores?"),
    ("--environment.name missing.py:environment", 2, "file not found: ", ""),
    ("--environment.name syntax.py:environment", 2, "SyntaxError: '(' was never closed", "syntax.py:11"),
    ("--environment.name imports.py:environment", 2, "No module named 'no_such_package'", "imports.py:11"),
    ("--environment.name attribute.py:environment", 2, "has no 'environment'", "did you mean enviroment"),
    ("--environment.name number.py:environment", 2, "is of type int, not Environment", ""),
    ("--environment.name raises.py:environment", 2, "ZeroDivisionError: division by zero", "raises.py:11"),
    ("--environment.name column.py:environment", 2, "rows.jsonl row 1: no column 'prompt'", "it has question, answer"),
    ("--environment.name long.py:environment --warmup.steps 0", 2, "model.max_context_tokens is 256", "set model.max"),
    ("--environment.name bare.py:environment", 2, "warmup.steps is 120, but environment", "has no demonstrations"),
    ("--sandbox.backend boxless.py:Backend", 1, "this place has no boxes", "go elsewhere"),
    ("--sandbox.backend namspace", 2, "no sandbox named 'namspace'", "did you mean namespace?"),
    ("--sandbox.template python", 1, "no template 'python'", "pull or build it; known: host"),
    ("--sandbox.network.allow 127.1", 2, "network rule '127.1'", "10.0.0.5:5432"),
    ("--algorithm.name distil --algorithm.teacher smollm2", 2, "teacher has a vocabulary of 49152", "one tokenizer"),
    ("--reward-model.path smollm2", 1, "'LlamaForCausalLM' is not supported", "LlamaForSequenceClassification"),
    ("--record.name taken", 2, "run folder runs/taken exists", "choose another record.name"),
]


@pytest.mark.parametrize(("words", "code", "message", "help"), CASES)
def test_one_clear_message_before_any_model_is_loaded(
    here: Path, rubbish: Path, capsys: pytest.CaptureFixture[str], words: str, code: int, message: str, help: str
):
    if "taken" in words:
        (here / "runs" / "taken").mkdir(parents=True)
        (here / "runs" / "taken" / "recipe.json").write_text("{}")
    model = [] if "--model.path" in words else ["--model.path", str(rubbish)]
    heard = said(capsys, "train", TINY, *words.split(), *model, code=code)
    assert message in heard and help in heard
    assert heard.startswith("error: ") and heard.count("error: ") == 1 and "Traceback" not in heard
    assert len(heard.splitlines()) <= 2  # the message and the hint


def test_a_template_of_the_library_is_a_recipes_too(
    here: Path, rubbish: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    if os.geteuid() != 0:
        pytest.skip("boxes of images as root only")
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    ImageLibrary().index.put(Template(build_id="b", layers=[], host_base=True), "tools:1")
    words = ["config", "check", TINY, "--model.path", str(rubbish), "--sandbox.template"]
    assert said(capsys, *words, "tools:1").splitlines()[-1].startswith("good: ")
    assert "there is no template 'tool:1'" in said(capsys, *words, "tool:1", code=1)
    said(capsys, "sandbox", "run", "--sandbox.template", "tools:1", "--", "true")


def test_what_is_no_run_is_not_resumed(here: Path, capsys: pytest.CaptureFixture[str]):
    assert said(capsys, "train", "--resume", "runs/nothing", code=1).startswith("error: no run 'runs/nothing'\nhint: ")
    assert said(capsys, "train", "--resume", str(here), code=1).startswith(f"error: no run '{here}'\nhint: ")
    (here / "headless" / "checkpoints").mkdir(parents=True)
    told = said(capsys, "train", "--resume", "headless", code=1)
    assert told.startswith("error: run folder headless has no events.jsonl") and "\nhint: put the file back" in told
    assert "'--trainer.steps' would change it" in said(
        capsys, "train", "--resume", "last", "--trainer.steps", "9", code=2
    )


def test_the_checks_load_no_weights_and_the_run_does(
    here: Path, rubbish: Path, place: Path, capsys: pytest.CaptureFixture[str]
):
    assert said(capsys, "config", "check", TINY, "--model.path", str(rubbish)).splitlines()[-1].startswith("good: ")
    child = tandem("train", *small(place / "runs", "rubbish"), "--model.path", str(rubbish), place=place, code=1)
    assert "model.safetensors" in child.err and "Traceback" not in child.err
    child.assert_nothing_left()


# ---- a machine that makes no boxes
def no_boxes(place: Path, rubbish: Path, **how: object) -> Child:
    words = [*small(place / "runs", "boxless"), "--model.path", str(rubbish)]
    child = tandem("train", *words, place=place, code=1, **how)  # pyright: ignore[reportArgumentType]
    assert child.err.startswith("error: ") and "\nhint: " in child.err and "Traceback" not in child.err
    assert not (place / "runs" / "boxless").exists()
    child.assert_nothing_left()
    return child


def test_a_machine_without_namespaces(place: Path, rubbish: Path):
    no_more = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    child = no_boxes(place, rubbish, under=["unshare", "--user", "--map-root-user", "sh", "-c", no_more, "sh"])
    assert "this machine makes no boxes" in child.err and "tandem doctor" in child.err


def test_a_machine_without_a_compiler(place: Path, rubbish: Path, tmp_path: Path):
    child = no_boxes(place, rubbish, environment={"PATH": "/nonexistent", "XDG_CACHE_HOME": str(tmp_path)})
    assert "there is no C compiler" in child.err and "install gcc" in child.err


# ---- devices
def test_devices(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(preflight.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(preflight.torch.cuda, "device_count", lambda: 0)
    assert pick_device("auto").type == pick_device("cpu").type == "cpu"
    with pytest.raises(ConfigError, match="sees 0 such devices"):
        pick_device("cuda")
    with pytest.raises(ConfigError, match="run on cpu or cuda"):
        pick_device("meta")
    monkeypatch.setattr(preflight.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(preflight.torch.cuda, "device_count", lambda: 1)
    assert pick_device("auto").type == "cuda" and pick_device("cuda:0").index == 0
    with pytest.raises(ConfigError, match="sees 1 such"):
        pick_device("cuda:1")


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--model.dtype", "float32"], "model.dtype = float32"),
        (["--model.dtype", "bfloat16", "--lora.rank", "4"], "adapters"),
        (["--model.dtype", "bfloat16", "--engine.numerics", "fast"], "numerics"),
    ],
)
def test_eight_bits_are_refused_before_a_model_is_loaded(flags, what):
    recipe, _ = load([], ["--model.path", "tiny", "--engine.quantize", "int8", *flags])
    with pytest.raises(ConfigError, match=what) as refused:
        prepare_model(recipe)
    assert 'engine.quantize = "none"' in refused.value.hint
    fits, _ = load([], ["--model.path", "tiny", "--engine.quantize", "int8", "--model.dtype", "bfloat16"])
    assert prepare_model(fits).spec.experts is None
