"""What marking promises: harmless text untouched, control tokens from the template alone, every byte given back."""

import functools
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slimproc.chat.marking import Marker, TooManyTwins
from slimproc.chat.sandbox import environment

TOKENS = {
    "smollm2": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>",
                "<gh_stars>", "<issue_start>", "<issue_comment>", "<issue_closed>", "<jupyter_start>", "<jupyter_text>",
                "<jupyter_code>", "<jupyter_output>", "<jupyter_script>", "<empty_output>"],
    "llama 3": ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
                "<|python_tag|>", *(f"<|reserved_special_token_{number}|>" for number in range(250))],
    "llama 2": ["<s>", "</s>", "<unk>"],
    "mistral": ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"],
    "deepseek": [
        f"<\uff5c{name}\uff5c>" for name in ("begin\u2581of\u2581sentence", "end\u2581of\u2581sentence", "User", "Assistant")
    ],
}  # fmt: skip

STYLES = {
    "chatml": "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{{ '<|im_start|>assistant\n' }}",
    "trim": "{% for m in messages %}<|im_start|>{{m.role}}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}",
    "inst": "{% for m in messages %}{{ bos_token }}[INST] {{ m.content }} [/INST]{{ eos_token }}{% endfor %}",
    "bare": "{% for m in messages %}User: {{ m.content }}\nAssistant:{% endfor %}",
    "upper": "{% for m in messages %}<|im_start|>{{ m.content | upper }}<|im_end|>{% endfor %}",
    "in": "{% for m in messages %}{% if 'x' in m.content %}X{% endif %}{% if m.content.startswith('Hello') %}H"
    "{% endif %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}",
    "equal": "{% for m in messages %}{% if m.content == 'python' %}P{% endif %}{{ m.content }}{% endfor %}",
    "slice": "{% for m in messages %}<|im_start|>{{ m.content[:12] }}{{ m.content|length }}<|im_end|>{% endfor %}",
    "thinking": "{% for m in messages %}{% if m.content.startswith('<tool_response>') and "
    "m.content.endswith('</tool_response>') %}TR{% endif %}{% if '</think>' in m.content %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}",
    "headers": "{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + "
    "m['content'] | trim + '<|eot_id|>' }}{% endfor %}",
    "json": "{% for m in messages %}{{ m | tojson }}{% endfor %}",
    "json in ascii": "{% for m in messages %}{{ m | tojson(ensure_ascii=true, indent=1) }}{% endfor %}",
}  # fmt: skip

HARMLESS = [
    "Hello world", "  indented\n\ncode", "\n\nstarts with newlines", "trailing  \n", " lead", "x", "1234567",
    "ünïcödé 🙂", "def f():\n    return 1\n", "<tool_response>a</tool_response>", "<think>\nq\n</think>\n\nanswer",
    "...and", "'s fine", "日本語", "a < b and c > d", "[link](url)", "python", "İstanbul \U000f003c", "",
]  # fmt: skip

compiled = functools.lru_cache(environment().from_string)


def render(source: str, messages: list[dict[str, Any]]) -> str:
    return compiled(source).render(messages=messages, bos_token="<s>", eos_token="</s>")


def marked_render(tokens, source: str, *messages: dict[str, Any] | str) -> tuple[str, list[str]]:
    """The prompt and the texts of its literal spans."""
    chat = [m if isinstance(m, dict) else {"role": "user", "content": m} for m in messages]
    marked = Marker(tokens, source, "<s>", "</s>").mark(chat)
    rendered = render(source, marked.messages)
    text = marked.restore(rendered)
    return text, [text[start:end] for start, end in marked.literals(rendered, text)]


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("style", STYLES)
def test_harmless_texts_render_as_without_marking_and_have_no_literals(style, tokens):
    for content in HARMLESS:
        plain = render(STYLES[style], [{"role": "user", "content": content}])
        assert marked_render(TOKENS[tokens], STYLES[style], content) == (plain, [])


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("style", ["chatml", "trim", "inst", "bare", "in", "thinking", "headers", "json"])
def test_every_control_token_in_a_callers_text_is_a_literal_and_the_text_is_kept(style, tokens):
    for token in TOKENS[tokens][:20]:
        content = f"a{token}\nb"
        plain = render(STYLES[style], [{"role": "user", "content": content}])
        assert marked_render(TOKENS[tokens], STYLES[style], content) == (plain, [token])


JOIN = "<|im_start|>{% for m in messages %}{{ m.content }}{% endfor %}<|im_end|>"


@pytest.mark.parametrize(
    "parts",
    [
        ["a<|im_", "end|>b"],
        ["a<|im_end|", ">b"],
        ["a<", "|im_end|>b"],
        ["<|im", "_", "end|>"],
        ["<|", "im", "_e", "nd", "|>"],
        list("<|im_end|>"),
        ["<|<|im_", "end|>|>"],
    ],
)
def test_parts_that_join_into_a_control_token_are_a_literal(parts):
    assert marked_render(TOKENS["smollm2"], JOIN, *parts) == (
        f"<|im_start|>{''.join(parts)}<|im_end|>",
        ["<|im_end|>"],
    )


def test_parts_that_join_only_once_they_are_trimmed_are_a_literal():
    source = "{% for m in messages %}{{ m.content | trim }}{% endfor %}"
    assert marked_render(TOKENS["smollm2"], source, " a<|im_ \n", "\n end|>b") == ("a<|im_end|>b", ["<|im_end|>"])


@pytest.mark.parametrize(
    ("source", "content"),
    [
        ("{{ messages[0].content }}end|>", "<|im_"),
        ("<|im_{{ messages[0].content }}", "end|>"),
        ("{{ messages[0].content | trim }}end|>", "<|im_ \n"),
        ("<|im_{{ messages[0].content | trim }}", "\n end|>"),
        ("<|im_{{ messages[0].content | trim }}|>", "\n end\n"),
        ("{{ '<|' + messages[0].content + '|>' }}", "im_end"),
    ],
)
def test_a_control_token_that_a_callers_text_and_the_templates_make_together_is_a_literal(source, content):
    assert marked_render(TOKENS["smollm2"], source, content) == ("<|im_end|>", ["<|im_end|>"])


@pytest.mark.parametrize(
    ("filter_name", "content"),
    [("lower", "<|IM_END|>"), ("lower", "<|\u212aIM|>"), ("upper", "<s\u0131>"), ("upper", "<\u017fi>")],
)
def test_a_control_token_that_only_a_change_of_case_makes_is_a_literal(filter_name, content):
    tokens = ["<|im_end|>", "<|kim|>", "<SI>"]
    _, literals = marked_render(tokens, f"{{{{ messages[0].content | {filter_name} }}}}", content)
    assert len(literals) == 1


def test_a_template_writes_control_tokens_with_roles_but_not_with_names():
    source = "{% for m in messages %}<|{{ m.role }}|>{{ '<|' + m.name + '|>' }}{% endfor %}"
    tokens = ["<|user|>", "<|system|>"]
    chat = {"role": "user", "name": "system", "content": ""}
    assert marked_render(tokens, source, chat) == ("<|user|><|system|>", ["<|system|>"])
    chat = {"role": "system|>", "name": "x", "content": ""}  # were the role not one of the API's
    assert marked_render(tokens, "<|{{ messages[0].role }}", chat) == ("<|system|>", ["<|system|>"])


def test_tool_calls_results_and_the_keys_of_arguments_are_callers_words():
    call = {"type": "function", "function": {"name": "f<|im_end|>", "arguments": {"k<|im_end|>": ["<|im_end|>"]}}}
    chat = {"role": "assistant", "content": "", "tool_calls": [call]}
    source = "<|im_end|>{{ messages[0].tool_calls[0].function | tojson }}"
    assert marked_render(TOKENS["smollm2"], source, chat) == (
        '<|im_end|>{"name": "f<|im_end|>", "arguments": {"k<|im_end|>": ["<|im_end|>"]}}',
        ["<|im_end|>"] * 3,
    )


def test_values_that_are_not_text_pass_through():
    chat = {"role": "user", "content": "", "n": [1, 2.5, True, None, {"a": 0}]}
    assert Marker(["<s>"]).mark([chat]).messages == [chat]


def test_literals_that_touch_are_one_span():
    assert marked_render(["<s>"], "{{ messages[0].content }}<s>", "<s><s>") == ("<s><s><s>", ["<s><s>"])


def test_a_caller_who_goes_on_from_the_templates_own_token_does_not_take_it_away():
    tokens = ["<|x|>", ">>TITLE<<", "<|x|>>"]
    assert marked_render(tokens, "<|x|>{{ messages[0].content }}", ">TITLE<<") == ("<|x|>>TITLE<<", [">TITLE<<"])


def test_tokens_that_begin_beyond_the_basic_plane_are_marked():
    assert marked_render(["🙂end"], "🙂end{{ messages[0].content }}", "a🙂end") == ("🙂enda🙂end", ["🙂end"])


def test_a_text_that_holds_every_private_use_character_comes_back_unharmed():
    private = "".join(map(chr, range(0xF0000, 0x110000)))
    assert marked_render(["<s>"], "{{ messages[0].content }}", private + "<s>") == (private + "<s>", ["<s>"])


def test_private_use_characters_of_the_template_and_of_tokens_are_not_taken_for_marks():
    tokens = ["\U000f0001<s>", "<s>"]
    source = "\U000f0000{{ messages[0].content }}"
    assert marked_render(tokens, source, "<s>") == ("\U000f0000<s>", ["<s>"])


def test_a_text_that_leaves_no_character_for_a_mark_is_refused():
    everything = "".join(map(chr, (*range(0x40000, 0xE0000), *range(0xF0000, 0x110000))))
    with pytest.raises(TooManyTwins):
        Marker(["<s>"]).mark([{"role": "user", "content": everything + "<s>"}])


FRAGMENTS = st.sampled_from(["<|im_end|>", "<|im_", "end|>", "\U000f0000", "\U0010ffff", "<", ">", "🙂", "\x00"])


@settings(deadline=None)
@given(st.lists(st.lists(st.one_of(st.text(), FRAGMENTS)).map("".join), max_size=5))
def test_whatever_callers_send_comes_back_byte_for_byte(contents):
    text, _ = marked_render(TOKENS["smollm2"], JOIN, *contents)
    assert text == f"<|im_start|>{''.join(contents)}<|im_end|>"


# Few letters and short texts, so that pieces often join into a token.
PIECE = st.tuples(st.sampled_from(["", " | lower", " | upper", " | trim"]), st.text("abB ", max_size=3))
SEGMENT = st.one_of(st.text("ab", min_size=1, max_size=2), PIECE)


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.sets(st.text("abA", min_size=2, max_size=4), min_size=1, max_size=3),
    segments=st.lists(SEGMENT, max_size=5),
)
def test_control_tokens_that_hold_callers_text_are_cut_and_the_templates_own_are_not(tokens, segments):
    source, contents, owners = "", [], ""
    for segment in segments:
        if isinstance(segment, str):
            source += segment
            owners += "t" * len(segment)
        else:
            source += f"{{{{ messages[{len(contents)}].content{segment[0]} }}}}"
            owners += "c" * len(segment[1].strip() if "trim" in segment[0] else segment[1])
            contents.append(segment[1])
    chat = [{"role": "user", "content": content} for content in contents]
    marked = Marker(tokens, source).mark(chat)
    rendered = render(source, marked.messages)
    text = marked.restore(rendered)
    literals = marked.literals(rendered, text)
    assert text.lower() == render(source, chat).lower()
    assert literals == sorted(literals)
    assert all(a < b for a, b in literals)
    assert all(one[1] < two[0] for one, two in itertools.pairwise(literals))
    for start in range(len(text)):
        for end in range(start + 2, len(text) + 1):
            if text[start:end] in tokens:
                is_cut = any(a < end and start < b for a, b in literals)
                assert is_cut == ("c" in owners[start:end]), (text, owners, literals, text[start:end])
