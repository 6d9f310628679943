"""The tree of conversations goes on from sampled ids, whatever text came back."""

from __future__ import annotations

from serve_pieces import END, renderer, say

from tandem.core.types import Message, Role, ToolCall, ToolSpec, ids
from tandem.text.history import HistoryTree, first_prompt

SPEC = ToolSpec(
    name="python", description="", parameters={"type": "object", "properties": {"code": {"type": "string"}},
                                               "required": ["code"]}
)  # fmt: skip


def user(text: str) -> Message:
    return Message(role=Role.USER, content=text)


def said(text: str, *calls: ToolCall) -> Message:
    return Message(role=Role.ASSISTANT, content=text, tool_calls=calls)


def test_a_first_prompt_has_no_parent_and_takes_the_road_of_training():
    tree = HistoryTree(renderer())
    prompt = tree.prompt([user("a"), said("b"), user("c")], [])
    first = renderer().prompt([user("a")], [])
    made = renderer().completion(said("b"), [])
    assert prompt.parent == -1 and prompt.token_ids == first + made + renderer().continuation(made, [user("c")])
    assert prompt.token_ids == first_prompt(renderer(), [user("a"), said("b"), user("c")], [])


def test_the_longest_remembered_beginning_counts_and_the_later_of_two_alike():
    tree = HistoryTree(renderer())
    opening = [user("a")]
    completion = ids(say("hey "))
    for _ in range(2):
        tree.remember(tree.prompt(opening, []), opening, [], reply=said("hey "), completion_ids=completion)
    second = tree.prompt([*opening, said("hey"), user("b")], [])  # the client lost the blank
    assert second.parent == 1 and second.token_ids[: len(completion) + 1] != completion
    third = tree.remember(second, [*opening, said("hey"), user("b")], [], reply=said("x"), completion_ids=ids(say("x")))
    longest = tree.prompt([*opening, said("hey"), user("b"), said("x"), user("c")], [])
    assert longest.parent == third == 2
    assert longest.token_ids[: len(second.token_ids)] == second.token_ids


def test_other_words_tools_or_calls_are_another_conversation():
    tree = HistoryTree(renderer())
    call = ToolCall(id="server", name="python", arguments={"code": "1"})
    opening = [user("a")]
    tree.remember(tree.prompt(opening, [SPEC]), opening, [SPEC], reply=said("", call), completion_ids=ids(say("z")))
    renamed = ToolCall(id="client", name="python", arguments={"code": "1"})
    other = ToolCall(id="server", name="python", arguments={"code": "2"})
    result = Message(role=Role.TOOL, content="1", tool_call_id="client", name="python")
    assert tree.prompt([*opening, said("", renamed), result], [SPEC]).parent == 0
    assert tree.prompt([*opening, said("", other), result], [SPEC]).parent == -1
    assert tree.prompt([user("A"), said("", renamed), result], [SPEC]).parent == -1


def test_words_put_into_its_mouth_after_a_sampled_answer_are_appended():
    tree = HistoryTree(renderer())
    opening, completion = [user("a")], ids(say("b"))
    prompt = tree.prompt(opening, [])
    tree.remember(prompt, opening, [], reply=said("b"), completion_ids=completion)
    longer = tree.prompt([*opening, said("b"), user("c"), said("d"), user("e")], [])
    stream = prompt.token_ids + completion + renderer().continuation(completion, [user("c")])
    made = renderer().completion(said("d"), [])
    assert longer.parent == 0 and longer.token_ids == stream + made + renderer().continuation(made, [user("e")])
    assert renderer().tokenizer.special_tokens[END] in longer.token_ids
