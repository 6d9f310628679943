"""Tokenizers and templates for the tests of rendering. The templates are written here, after the manners of the
families they are named for."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path

from tandem.core.types import Message, Role, ToolCall, ToolSpec
from tandem.text.render import Renderer
from tandem.text.tiny_tokenizer import TEMPLATE, write_tiny_tokenizer
from tandem.text.tokenizer import Tokenizer, load_tokenizer

CHATML = TEMPLATE
# Knows tools and hermes calls, shows tool outputs in user turns, drops the reasoning of past turns.
REASONING = (
    "{% if tools %}{{ '<|im_start|>system\\n' }}{% if messages[0]['role'] == 'system' %}"
    "{{ messages[0]['content'] + '\\n\\n' }}{% endif %}{{ '<tools>\\n' }}{% for tool in tools %}"
    "{{ (tool | tojson) + '\\n' }}{% endfor %}{{ '</tools> Call: <tool_call>\\n{...}\\n</tool_call><|im_end|>\\n' }}"
    "{% elif messages[0]['role'] == 'system' %}{{ '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}"
    "{% endif %}{% for message in messages %}{% if message['role'] == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% elif message['role'] == 'assistant' %}{{ '<|im_start|>assistant\\n' }}"
    "{% if loop.last %}{{ message['content'] }}{% else %}{{ message['content'].split('</think>')[-1].lstrip('\\n') }}"
    "{% endif %}{% for call in message['tool_calls'] or [] %}{{ '\\n<tool_call>\\n{\"name\": \"' + "
    "call['function']['name'] + '\", \"arguments\": ' + (call['function']['arguments'] | tojson) + "
    "'}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}"
    "{% elif message['role'] == 'user' %}{{ '<|im_start|>user\\n' + message['content'] + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# No system role, strict alternation, another word for the assistant, trimmed content.
STRICT = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ '<|im_start|>' + ('model' if message['role'] == "
    "'assistant' else message['role']) + '\\n' + (message['content'] | trim) + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>model\\n' }}{% endif %}"
)
# What follows a turn depends on how many there were: can not be continued by appending.
COUNTING = CHATML.replace("assistant\\n'", "assistant ' + (messages | length | string) + '\\n'")
# Shows only the last user message: an assistant's words vanish.
FORGETTING = "{{ '<|im_start|>user\\n' + messages[-1]['content'] + '<|im_end|>\\n<|im_start|>assistant\\n' }}"

PYTHON = ToolSpec(
    name="python",
    description="Run Python code.",
    parameters={"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
)
EDIT = ToolSpec(
    name="edit",
    description="Edit a file.",
    parameters={
        "type": "object",
        "properties": {"path": {"type": "string"}, "text": {"type": "string"}},
        "required": ["path", "text"],
    },
)


@functools.cache
def tokenizer(template: str = CHATML, pad_token: str = "<|pad|>") -> Tokenizer:
    """The tiny tokenizer with a chat template and a pad token of choice."""
    folder = Path(tempfile.mkdtemp(prefix="tandem-tokenizer-"))
    try:
        write_tiny_tokenizer(folder, vocab_size=512)
        (folder / "chat_template.jinja").write_text(template)
        config = json.loads((folder / "tokenizer_config.json").read_text()) | {"pad_token": pad_token}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return load_tokenizer(folder)
    finally:
        shutil.rmtree(folder)


def renderer(template: str = CHATML, tool_format: str = "auto") -> Renderer:
    return Renderer(tokenizer(template), tool_format)


def system(content: str) -> Message:
    return Message(role=Role.SYSTEM, content=content)


def user(content: str) -> Message:
    return Message(role=Role.USER, content=content)


def assistant(content: str, *calls: ToolCall) -> Message:
    return Message(role=Role.ASSISTANT, content=content, tool_calls=calls)


def output(content: str) -> Message:
    return Message(role=Role.TOOL, content=content, tool_call_id="call_0", name="python")


def python_call(code: str, *, index: int = 0) -> ToolCall:
    return ToolCall(id=f"call_{index}", name="python", arguments={"code": code})
