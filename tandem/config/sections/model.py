"""[model]: which weights the run starts from."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tandem.config.sections.section import Section


class ModelSection(Section):
    path: str = "smollm2"
    """Folder of a Hugging Face model, a `.gguf` file, `smollm2` (the installable
    SmolLM2-135M-Instruct), or `tiny` (a small random model, trained from scratch)."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of the weights that are served and differentiated; the optimizer keeps float32 masters."""
    device: str = "auto"
    """Device of the weights: `auto` takes the accelerator where there is one, else `cpu`."""
    tool_format: str = "auto"
    """How tool calls are written: `auto` (the template's own, else `fence`), `fence`, `gemma`, `hermes`, `llama` or
    `pythonic`."""
    max_context_tokens: int = Field(default=2048, ge=16)
    """Longest prompt plus answer, in tokens; the model's own maximum if that is smaller."""
