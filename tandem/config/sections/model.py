"""[model]: which weights the run starts from."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tandem.config.sections.section import Section


class ModelSection(Section):
    path: str = "smollm2"
    """Folder of a Hugging Face model, a `.gguf` file, the `owner/name` of a model on the hub (`owner/name@revision`
    pins it), `smollm2` (the installable SmolLM2-135M-Instruct), `gemma3` (the installable Gemma 3 270M), or `tiny` (a
    small random model, trained from scratch)."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of the weights that are served and differentiated; the optimizer keeps float32 masters."""
    device: str = "auto"
    """Device of the weights: `auto` takes the accelerator where there is one, else `cpu`."""
    tool_format: str = "auto"
    """How tool calls are written: `auto` (the template's own, else `fence`), `fence`, `gemma`, `hermes`, `json`,
    `llama` or `pythonic`."""
    reasoning: str = "auto"
    """Tags that the model thinks between; a server gives what stands there as `reasoning_content`: `auto` (those of the
    chat template, if any), `none`, or two tags with a blank between, as in `<think> </think>`."""
    max_context_tokens: int = Field(default=2048, ge=16)
    """Longest prompt plus answer, in tokens; the model's own maximum if that is smaller."""
