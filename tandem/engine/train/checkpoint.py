"""Checkpoints: everything that a step depends on, on disk, whole or not at all.

Owns: the folder of checkpoints of a run. A checkpoint is taken between two steps and written by a thread while the
next ones run, under a temporary name, synced, and renamed; its manifest names every file with size and SHA-256.
Refuses: Hugging Face folders (the model loader's part).
Invariants: what ``latest`` lists is complete, and what is left out has a reason (``broken``); what ``restore``
returns is what was saved, bit for bit, or it raises; a torn write leaves only a temporary folder, which the next
save removes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tandem.core.errors import RecordError, writing
from tandem.core.wire import decode, encode
from tandem.engine.train.random_state import random_state, set_random_state
from tandem.engine.train.snapshot import Held, hold, keep_all
from tandem.engine.train.tensor_file import write_tensors
from tandem.engine.weights import PublishedWeights

FORMAT = 1
MANIFEST = "manifest.json"
_TEMPORARY = ".unfinished-"


class Optimizer(Protocol):
    """The state of an optimizer, by parameter name; whole, however many ranks it is spread over."""

    def weights(self) -> dict[str, Tensor]: ...
    def moments(self) -> dict[str, Tensor]: ...
    def before_change(self, call: Callable[[], object]) -> None: ...
    def restore(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None: ...


class Trained(Protocol):
    """What is trained beside the policy, and saved along."""

    @property
    def optimizer(self) -> Optimizer: ...


class CheckpointStore:
    """The checkpoints of one run, newest ``keep`` of them. ``reference`` is the frozen model of a KL penalty,
    saved along because the run cannot make it again; ``critic`` is trained beside the policy."""

    def __init__(
        self,
        folder: Path,
        weights: PublishedWeights,
        optimizer: Optimizer,
        *,
        keep: int,
        reference: nn.Module | None = None,
        critic: Trained | None = None,
    ) -> None:
        self._folder = folder
        self._weights = weights
        self._optimizer = optimizer
        self._keep = keep
        self._reference = reference
        self._critic = critic
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="tandem-checkpoint")
        self._writing: Future[str] | None = None

    def save(self, step: int, extra: Mapping[str, object]) -> str:
        """``begin``, and wait for it; returns the folder."""
        return self.begin(step, extra).result()

    def begin(self, step: int, extra: Mapping[str, object]) -> Future[str]:
        """Take everything as it is now, and write it while training goes on; the future gives the folder. The caller
        sees to it that no step runs before this returns. A write that is not finished is waited for.

        Raises:
            RecordError: the write before this one failed. So does the future: the disk is full or gone; what was
                there before stays.
        """
        self.wait()
        files, state = self._take(step, extra)
        self._writing = self._writer.submit(self._write, step, files, state)
        return self._writing

    def wait(self) -> None:
        """Wait for the write in hand.

        Raises:
            RecordError: it failed.
        """
        writing_now, self._writing = self._writing, None
        if writing_now is not None:
            writing_now.result()

    def _take(self, step: int, extra: Mapping[str, object]) -> tuple[dict[str, dict[str, Held]], bytes]:
        held = _held(self._optimizer, "weights", "moments")
        if self._critic is not None:
            held |= _held(self._critic.optimizer, "critic", "critic-moments")
        if self._reference is not None:  # nobody changes it
            held["reference"] = hold({name: p.detach() for name, p in self._reference.named_parameters()})
        state = {
            "step": step,
            "version": self._weights.version,
            "random": random_state(),
            "extra": dict(extra),
        }
        return {f"{name}.safetensors": tensors for name, tensors in held.items()}, encode(state)

    def _write(self, step: int, files: Mapping[str, Mapping[str, Held]], state: bytes) -> str:
        with writing(self._folder, RecordError, hint="make room, then resume the run"):
            try:
                return self._write_whole(step, files, state)
            except BaseException:  # room for the last words of the run
                shutil.rmtree(self._folder / f"{_TEMPORARY}{_name(step)}", ignore_errors=True)
                raise

    def _write_whole(self, step: int, files: Mapping[str, Mapping[str, Held]], state: bytes) -> str:
        self._folder.mkdir(parents=True, exist_ok=True)
        for torn in self._folder.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(torn)
        temporary = self._folder / f"{_TEMPORARY}{_name(step)}"
        temporary.mkdir()
        with ThreadPoolExecutor(2) as pool:
            written = pool.map(lambda item: write_tensors(temporary / item[0], item[1]), files.items())
            digests = dict(zip(files, written, strict=True))
        (temporary / "state.bin").write_bytes(state)
        digests["state.bin"] = _sync_and_digest(temporary / "state.bin")
        entries = {
            name: {"bytes": (temporary / name).stat().st_size, "sha256": digest} for name, digest in digests.items()
        }
        manifest = temporary / MANIFEST
        manifest.write_text(json.dumps({"format": FORMAT, "step": step, "files": entries}, indent=1))
        _sync_and_digest(manifest)
        _sync_folder(temporary)
        final = self._folder / _name(step)
        if final.exists():  # a step that is made again after a resume; its old checkpoint is superseded
            self._remove(step)
        temporary.rename(final)
        _sync_folder(self._folder)
        for old in self.steps()[: -self._keep]:
            self._remove(old)
        return str(final)

    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, oldest first."""
        return complete_steps(self._folder)

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        steps = self.steps()
        return steps[-1] if steps else None

    def restore(self, step: int) -> Mapping[str, object]:
        """Load weights, optimizer, version, random state and reference; returns ``extra``.

        Raises:
            RecordError: there is no such checkpoint, or a byte of it is not as saved; or the write failed.
        """
        self.wait()
        folder, manifest = self._folder / _name(step), _manifest(self._folder / _name(step))
        if manifest is None:
            raise RecordError(
                f"no complete checkpoint of step {step} in {self._folder}", hint=f"there are: {self.steps() or 'none'}"
            )
        for name, entry in manifest.items():
            if _digest(folder / name) != entry["sha256"]:
                raise RecordError(
                    f"{folder / name} is not what was saved (SHA-256 differs)",
                    hint=f"remove {folder} to resume from the checkpoint before it",
                )
        state = decode((folder / "state.bin").read_bytes(), dict)
        self._optimizer.restore(load_file(folder / "weights.safetensors"), load_file(folder / "moments.safetensors"))
        if self._critic is not None:
            if "critic.safetensors" not in manifest:
                raise RecordError(
                    f"the checkpoint of step {step} holds no critic", hint="the run was started without one"
                )
            self._critic.optimizer.restore(
                load_file(folder / "critic.safetensors"), load_file(folder / "critic-moments.safetensors")
            )
        if self._reference is not None:
            if "reference.safetensors" not in manifest:
                raise RecordError(
                    f"the checkpoint of step {step} holds no reference weights",
                    hint="the run was started without a KL penalty; set algorithm.kl_weight = 0",
                )
            saved = load_file(folder / "reference.safetensors")
            with torch.no_grad():
                for name, parameter in self._reference.named_parameters():
                    parameter.copy_(saved[name])
        set_random_state(cast("Mapping[str, object]", state["random"]))
        self._weights.set(cast(int, state["version"]), step)
        return cast("Mapping[str, object]", state["extra"])

    def digest(self, step: int) -> str:
        """SHA-256 of the manifest, which holds the SHA-256 of every file."""
        return _digest(self._folder / _name(step) / MANIFEST)

    def _remove(self, step: int) -> None:
        """Take a checkpoint off the list at once, then delete it: half a deletion must not look like one."""
        doomed = self._folder / f"{_TEMPORARY}removed-{step}"
        (self._folder / _name(step)).rename(doomed)
        shutil.rmtree(doomed)


def _held(optimizer: Optimizer, weights: str, moments: str) -> dict[str, dict[str, Held]]:
    """Weights and state of an optimizer under these names, copied when it is about to change what was not read."""
    held = {weights: hold(optimizer.weights()), moments: hold(optimizer.moments())}
    optimizer.before_change(lambda: keep_all(tensor for each in held.values() for tensor in each.values()))
    return held


def complete_steps(folder: Path) -> list[int]:
    """Steps of all complete checkpoints in a folder (which need not exist), oldest first."""
    found = [path for path in folder.glob("step-[0-9]*") if not _problem(path)]
    return sorted(int(path.name.removeprefix("step-")) for path in found)


def broken(folder: Path) -> dict[str, str]:
    """The checkpoints that ``complete_steps`` leaves out: what is wrong with each, by the name of its folder."""
    problems = {path.name: _problem(path) for path in sorted(folder.glob("step-*"))}
    return {name: problem for name, problem in problems.items() if problem}


def _manifest(folder: Path) -> dict[str, dict[str, object]] | None:
    """The files of a complete checkpoint."""
    return None if _problem(folder) else json.loads((folder / MANIFEST).read_text())["files"]


def _problem(folder: Path) -> str:
    """Why this is no complete checkpoint: its manifest does not read, or a file is not there in full length."""
    if not folder.name.removeprefix("step-").isdigit():
        return "its name is no step"
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            return f"it has format {manifest['format']}, this version reads {FORMAT}"
        wanted = {name: int(entry["bytes"]) for name, entry in manifest["files"].items()}
    except OSError as error:
        return f"{MANIFEST}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is broken"
    for name, size in wanted.items():
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            return f"{name}: {error.strerror}"
        if found != size:
            return f"{name} has {found} of {size} bytes"
    return ""


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_and_digest(path: Path) -> str:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return _digest(path)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
