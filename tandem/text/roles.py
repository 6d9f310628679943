"""Which roles a chat template knows, and our messages in its words.

Owns: the rules for templates that lack a role. Without ``system``, its text opens the next user message. A template
that does not speak the tool format gets the tools explained in the system message, calls as plain text, and tool
outputs as user messages (adjacent ones, and a user message after them, in one).
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.core.errors import ConfigError
from tandem.core.types import Message, Role, ToolSpec
from tandem.text.guard import Guarded
from tandem.text.tokenizer import Tokenizer
from tandem.text.tool_format import ToolFormat

TemplateMessage = dict[str, object]


def template_message(role: Role, content: str) -> TemplateMessage:
    """A message as chat templates take it."""
    return {"role": str(role), "content": content}


class RoleRules:
    """What one template accepts, found out by asking it."""

    def __init__(self, tokenizer: Tokenizer, tool_format: ToolFormat, *, native: bool) -> None:
        self.format = tool_format
        self.native = native
        user = template_message(Role.USER, "B")
        self.has_system = _accepts(tokenizer, [template_message(Role.SYSTEM, "A"), user])
        self.has_tool = native and _accepts(
            tokenizer, [user, template_message(Role.ASSISTANT, "C"), template_message(Role.TOOL, "A")]
        )

    def shown_tools(self, tools: Sequence[ToolSpec]) -> list[TemplateMessage]:
        """The tools as the template itself explains them; none where it does not."""
        if not self.native:
            return []
        return [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
            }
            for tool in tools
        ]

    def translate(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], guarded: Guarded
    ) -> list[TemplateMessage]:
        """The messages in the template's words, special tokens in them guarded."""
        explained = "" if self.native else self.format.explain(tools)
        if explained:
            messages = _with_system(messages, explained)
        out: list[TemplateMessage] = []
        prefix = ""  # system text on its way into a user message
        joins = False  # whether the last entry is a user message made of tool outputs
        for message in messages:
            content = guarded.escape(message.content)
            if message.role is Role.ASSISTANT:
                out.append(self._assistant(message, tools, guarded))
            elif message.role is Role.SYSTEM:
                if self.has_system:
                    out.append(template_message(Role.SYSTEM, content))
                else:
                    prefix += f"{content}\n\n"
            elif message.role is Role.TOOL and self.has_tool:
                entry = template_message(Role.TOOL, content)
                out.append({**entry, "name": message.name, "tool_call_id": message.tool_call_id})
            else:
                text = prefix + (self.format.write_result(content) if message.role is Role.TOOL else content)
                prefix = ""
                if joins:
                    out[-1] = template_message(Role.USER, f"{out[-1]['content']}\n{text}")
                else:
                    out.append(template_message(Role.USER, text))
            joins = not self.has_tool and message.role is Role.TOOL
        if prefix:
            out.append(template_message(Role.USER, prefix.rstrip()))
        return out

    def _assistant(self, message: Message, tools: Sequence[ToolSpec], guarded: Guarded) -> TemplateMessage:
        if not self.native or not message.tool_calls:
            text = self.format.write(message.content, message.tool_calls, tools)
            return template_message(Role.ASSISTANT, guarded.escape(text))
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": guarded.escape_value(call.arguments)},
            }
            for call in message.tool_calls
        ]
        return {**template_message(Role.ASSISTANT, guarded.escape(message.content)), "tool_calls": calls}


def _with_system(messages: Sequence[Message], explained: str) -> list[Message]:
    if messages and messages[0].role is Role.SYSTEM:
        text = f"{messages[0].content}\n\n{explained}"
        return [Message(role=Role.SYSTEM, content=text), *messages[1:]]
    return [Message(role=Role.SYSTEM, content=explained), *messages]


def _accepts(tokenizer: Tokenizer, messages: list[TemplateMessage]) -> bool:
    try:
        text = tokenizer.render_chat(messages, open_turn=True)
    except ConfigError:
        if tokenizer.chat_template is None:
            raise
        return False
    return all(str(message["content"]) in text for message in messages)
