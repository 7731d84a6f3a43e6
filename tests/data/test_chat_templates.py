"""Chat templates of Hugging Face folders, found and rendered."""

import json
from pathlib import Path

import pytest

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


def test_a_template_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match="not valid jinja2"):
        ChatTemplate("{% if %}")
    with pytest.raises(MeshwrightError, match="cannot be read"):
        load_chat_template(tmp_path, tmp_path / "none.jinja")
