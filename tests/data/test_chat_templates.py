"""Chat templates of Hugging Face folders, found and rendered."""

import functools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data import ChatTemplate, load_chat_template
from meshwright.errors import MeshwrightError

HI = [{"role": "user", "content": "<b>Grüße</b>"}]


def test_the_template_and_its_tokens_are_found(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path) is None
    config = {
        "bos_token": {"content": "<s>"},
        "chat_template": "{{ bos_token }}{{ messages[0].content }}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = load_chat_template(tmp_path)
    assert template is not None
    assert template.render(HI) == "<s><b>Grüße</b>"
    config["chat_template"] = [
        {"name": "default", "template": "D"}, {"name": "tool_use", "template": "T{{ tools }}"},
    ]  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = load_chat_template(tmp_path)
    assert template is not None
    assert (template.render(HI), template.render(HI, [1])) == ("D", "T[1]")
    assert template.takes_tools
    (tmp_path / "chat_template.jinja").write_text("J{{ bos_token }}")
    template = load_chat_template(tmp_path)
    assert template is not None
    assert template.render(HI) == "J<s>"
    (tmp_path / "own.jinja").write_text("own")
    template = load_chat_template(tmp_path, tmp_path / "own.jinja")
    assert template is not None
    assert template.render(HI) == "own"


def test_what_templates_of_models_use_is_there() -> None:
    text = """{%- for m in messages %}
    {%- if loop.index > 1 %}{% break %}{% endif %}
{{ m | tojson }} {% generation %}{{ extra }}{% endgeneration %}
{%- endfor %}{{ strftime_now("%Y") | length }}{% if add_generation_prompt %}>{% endif %}"""
    template = ChatTemplate(text)
    shown = template.render(HI * 2, values={"extra": "é"})
    assert shown == '{"role": "user", "content": "<b>Grüße</b>"} é4>'
    assert template.render(HI, generation_prompt=False, values={"extra": ""})[-1] == "4"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.nothing.more }}", "nothing"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_refusal_is_one_line(text: str, message: str) -> None:
    with pytest.raises(MeshwrightError, match=message):
        ChatTemplate(text).render(HI)


def test_json_of_a_template_is_that_of_the_library() -> None:
    value = {"b": [1, None, {"a": "<é>"}], "a": 1.5}
    messages = [{"role": "user", "content": value}]
    for options in ("", "indent=2", "sort_keys=true", 'separators=(",", ":")', "ensure_ascii=true"):
        arguments = eval(f"dict({options})", {"true": True})
        template = ChatTemplate(f"{{{{ messages[0].content | tojson({options}) }}}}")
        expected = json.dumps(value, **{"ensure_ascii": False, **arguments})
        assert template.render(messages) == expected


def test_what_is_nested_too_deeply_is_refused() -> None:
    tool: list[object] = []
    for _ in range(5000):
        tool = [tool]
    with pytest.raises(MeshwrightError, match="nested too deeply"):
        ChatTemplate("{{ tools | tojson }}").render(HI, [tool])


def test_a_template_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match="not valid jinja2"):
        ChatTemplate("{% if %}")
    with pytest.raises(MeshwrightError, match="cannot be read"):
        load_chat_template(tmp_path, tmp_path / "none.jinja")


# ---- a message that is continued ----------------------------------------------------------------

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA_3 = """{{- bos_token }}{%- for m in messages %}
{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}
{%- endfor %}"""
GEMMA = """{{ bos_token }}{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}
{{- '<start_of_turn>' + role + '\\n' + m['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"""
MISTRAL = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]
{%- else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"""
QWEN_3 = """{%- for m in messages %}{%- set content = m.content %}{%- if m.role == 'assistant' %}
{%- set reasoning = '' %}{%- if '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{{- '<|im_end|>\\n' }}{%- else %}{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}"""
T5 = "{% for m in messages %}{{ m.role }}: {{ m.content.rstrip() }}\n{% endfor %}</s>"


def _qwen_3(content: str) -> str:
    reasoning = ""
    if "</think>" in content:
        reasoning = content.split("</think>")[0].rstrip("\n").split("<think>")[-1].strip("\n")
        content = content.split("</think>")[-1]
    return f"<think>\n{reasoning}\n</think>\n\n" + content.lstrip("\n")


# the text before the last message's content, and the content as the template writes it
CONTINUED = {
    CHATML: ("<|im_start|>user\nend<|im_end|>\n<|im_start|>assistant\n", str),
    LLAMA_3: (
        "<s><|start_header_id|>user<|end_header_id|>\n\nend<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        str.strip,
    ),
    GEMMA: ("<s><start_of_turn>user\nend<end_of_turn>\n<start_of_turn>model\n", str.strip),
    MISTRAL: ("<s>[INST] end[/INST] ", str),
    QWEN_3: ("<|im_start|>user\nend<|im_end|>\n<|im_start|>assistant\n", _qwen_3),
    T5: ("user: end\nassistant: ", str.rstrip),
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
PIECES = st.sampled_from(
    ["", " ", "\n", "\n\n", "\t", "end", "i", "|>", "<|im_end|>", "<|im_end|>\n", "<|eot_id|>", "<end_of_turn>\n",
     "</s>", "[/INST]", "assistant", "\n</think>", "<think>", "</think>", "{{ m }}", "é", "Once upon", "\N{NO-BREAK SPACE}"]
)  # fmt: skip


@functools.cache
def compiled(template: str) -> ChatTemplate:
    return ChatTemplate(template, SPECIAL)


def continued(template: str, content: str) -> str:
    messages = [{"role": "user", "content": "end"}, {"role": "assistant", "content": content}]
    return compiled(template).render(messages, generation_prompt=False, continue_final=True)


@settings(max_examples=150, deadline=None)
@given(st.lists(PIECES, max_size=6).map("".join) | st.text(max_size=8))
def test_a_continued_prompt_ends_with_the_content_as_the_template_writes_it(content: str) -> None:
    for template, (before, written) in CONTINUED.items():
        assert continued(template, content) == before + written(content)


@pytest.mark.parametrize(
    ("template", "content", "message"),
    [
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "a", "does not write the content"),
        ("{% for m in messages %}{{ m.content[:3] }};{% endfor %}", "abcd", "does not write"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "a", "more than once"),
        ("{% for m in messages %}{% if m.content %}<{{ m.content }}>{% endif %}{% endfor %}", "", "another form"),
        ("{% for m in messages %}{{ m.content | length }}{{ m.content }}{% endfor %}", "a", "another form"),
        ("{% for m in messages %}{{ m.content | replace('ab', 'b') }}.{% endfor %}", "ab" * 20, None),
        ("{% for m in messages %}{{ m.content[::-1] }}.{% endfor %}", "ab", "does not write"),
    ],
)  # fmt: skip
def test_a_message_whose_end_is_not_known_is_not_continued(
    template: str, content: str, message: str | None
) -> None:
    if message is None:  # changed, but it is known where it ends
        assert continued(template, content) == "end." + "b" * 20
        return
    with pytest.raises(MeshwrightError, match=f"{message}.*leave the message out"):
        continued(template, content)
