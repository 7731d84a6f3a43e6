"""The chat page, in a real browser where one is installed."""

import re
from typing import Any

import pytest
from tests.browser import WIDTHS, browser_fixture, check_page, page_fixture, watched  # noqa: F401
from tests.patience import eventually
from tests.serving.server.bigram_engine import BigramEngine
from tests.serving.server.serving import Running, serving


def test_the_page_loads_nothing_from_elsewhere(server: Running) -> None:
    answer = server.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "<title>bigram</title>" in answer.text
    assert not re.search(r"(src|href)=|https?://(?!www\.w3\.org)|@import|url\(", answer.text)


def say(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send", exact=True).click()


def finished(page: Any) -> None:
    page.get_by_role("button", name="Send", exact=True).wait_for()


def test_a_chat_in_a_browser(page: Any) -> None:
    def answer(prompt: str) -> str:
        last = prompt.split("user\n")[-1].split("<|im_end|>")[0]
        return f"<think>Hm.</think>You said: {last}\n```\nx = 1\n```\n<b> **bold** `y`"

    with serving(BigramEngine(answer=answer, delay=0.001)) as server:
        page.goto(server.url)
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("System prompt").fill("Be brief.")
        page.get_by_label("Temperature").fill("0.5")
        page.get_by_label("Seed").fill("7")
        page.get_by_role("button", name="Settings").click()
        say(page, "one & <i>two</i>")
        finished(page)
        texts = page.locator(".text").all_inner_texts()
        assert texts[0] == "one & <i>two</i>"
        assert "You said: one & <i>two</i>" in texts[1]
        assert page.locator(".text pre").inner_text().strip() == "x = 1"
        assert page.locator(".reasoning").inner_text() == "Hm."
        assert page.locator(".text b").inner_text() == "bold"
        assert page.locator(".text code").inner_text() == "y"
        assert re.match(
            r"\d+ tokens, [\d.]+ tokens/s, first after", page.locator(".stats").nth(1).inner_text()
        )
        request = server.engine.seen[-1]
        assert bytes(request.prompt).startswith(b"<|im_start|>system\nBe brief.<|im_end|>")
        assert (request.sampling.temperature, request.sampling.seed) == (0.5, 7)

        # retry asks again with the same messages; edit changes them
        page.locator(".assistant").get_by_role("button", name="Retry").click()
        finished(page)
        assert len(server.engine.seen) == 2
        assert server.engine.seen[1].prompt == request.prompt
        page.locator(".user").get_by_role("button", name="Edit").click()
        page.get_by_label("Edit message").fill("three")
        page.get_by_role("button", name="Send again").click()
        finished(page)
        assert page.locator(".message").count() == 2
        assert "You said: three" in page.locator(".assistant .text").inner_text()
        say(page, "four")
        finished(page)
        prompt = bytes(server.engine.seen[-1].prompt).decode()
        assert prompt.index("three") < prompt.index("You said: three") < prompt.index("four")

        # settings and conversations outlive the page
        page.reload()
        assert page.locator(".message").count() == 4
        assert page.get_by_label("System prompt").input_value() == "Be brief."
        page.get_by_role("button", name="New chat").click()
        assert page.locator(".message").count() == 0
        say(page, "five")
        finished(page)
        assert b"three" not in bytes(server.engine.seen[-1].prompt)
        listed = page.get_by_role("navigation", name="Conversations").locator(".open")
        assert [text.split("\n")[0] for text in listed.all_inner_texts()] == ["five", "three"]
        listed.nth(1).click()
        assert "You said: four" in page.locator(".assistant .text").last.inner_text()
        page.once("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name="Delete three").click()
        assert listed.count() == 1
        assert page.locator(".message").count() == 0


MARKDOWN = """# A title

Some **bold *both***, `code`, ~~gone~~ and 2 * 3 * 4, a_b_c.
The [site](https://example.org/a) and [not a site](javascript:alert(1)).

- one
- two
  1. first
  2. second

| name | size |
|:-----|-----:|
| `a` \\| c | 3 |
| <img src=x onerror=alert(1)> | 4 |

> said
> by me

```python
if a < b:
    print("<b>")
```
<script>alert(2)</script>
***
```
never closed"""


def test_markdown_is_shown_and_html_is_not_interpreted(page: Any) -> None:
    with serving(BigramEngine(answer=lambda _: MARKDOWN, max_length=4096)) as server:
        page.goto(server.url)
        page.on("dialog", lambda dialog: pytest.fail("a script of the answer ran"))
        say(page, "<img src=x onerror=alert(3)>")
        finished(page)
        box = page.locator(".assistant .text")
        assert box.locator("h3").inner_text() == "A title"
        assert box.locator("p b").first.inner_text() == "bold both"
        assert box.locator("b i").inner_text() == "both"
        assert box.locator("s").inner_text() == "gone"
        assert "2 * 3 * 4, a_b_c." in box.inner_text()
        assert [link.get_attribute("href") for link in box.locator("a").all()] == [
            "https://example.org/a"
        ]
        assert box.locator("ul > li").count() == 2
        assert box.locator("ul ol > li").all_inner_texts() == ["first", "second"]
        cells = box.locator("td").all_inner_texts()
        assert cells == ["a | c", "3", "<img src=x onerror=alert(1)>", "4"]
        assert box.locator("td").nth(1).evaluate("cell => cell.style.textAlign") == "right"
        assert box.locator("blockquote").inner_text() == "said\nby me"
        assert box.locator("pre").all_inner_texts() == [
            'if a < b:\n    print("<b>")',
            "never closed",
        ]
        assert box.locator(".code-head span").first.inner_text() == "python"
        assert box.locator("hr").count() == 1
        assert page.locator(".message img, .message script").count() == 0


def test_the_model_card_says_what_is_served(page: Any) -> None:
    with serving(BigramEngine()) as server:
        page.goto(server.url)
        assert not page.get_by_text("parameters", exact=True).is_visible()
        page.get_by_role("button", name="Model", exact=True).click()
        card = page.get_by_label("Model card").inner_text()
        assert re.search(r"parameters\n1\.07M\n", card)
        assert "context\n512 tokens" in card


def test_stop_cancels_the_request(page: Any) -> None:
    with serving(BigramEngine(answer=lambda _: "word " * 90, held_after=40)) as server:
        page.goto(server.url)
        say(page, "Hi")
        page.locator(".assistant .text", has_text="word word").wait_for()
        page.get_by_role("button", name="Stop").click()
        finished(page)
        assert page.locator(".stats").last.inner_text().endswith("stopped")
        eventually(lambda: not server.engine.active)
        assert server.engine.finished == {"cancelled": 1}


def test_errors_and_keys_are_shown(page: Any) -> None:
    with serving(api_key=("sesame",)) as server:
        page.goto(server.url)
        say(page, "Hi")
        page.locator(".error", has_text="needs an API key").wait_for()
        page.get_by_label("API key").fill("sesame")
        page.get_by_label("API key").blur()
        page.locator(".error").get_by_role("button", name="Retry").click()
        page.locator(".stats", has_text="tokens/s").wait_for()
        assert page.locator(".error").count() == 0


def test_a_chat_goes_on_until_the_context_is_full(page: Any) -> None:
    with serving(BigramEngine(max_length=400, answer=lambda _: "word " * 90)) as server:
        page.goto(server.url)
        say(page, "one")
        finished(page)
        assert page.locator(".stats").last.inner_text().endswith("stopped at the token limit")
        assert server.engine.seen[-1].max_new == 100
        say(page, "two")  # 100 more fit
        finished(page)
        say(page, "three" * 80)
        page.locator(".error", has_text="The context is full").wait_for()
        # a question without an answer is not sent again
        say(page, "four")
        finished(page)
        assert b"three" not in bytes(server.engine.seen[-1].prompt)
        page.locator(".error").get_by_role("button", name="New chat").click()
        assert page.locator(".message").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_fits_light_and_dark_and_small(browser: Any, scheme: str, width: int) -> None:
    text = "A long answer, with code:\n```python\nprint('" + "x" * 120 + "')\n```\nDone. " * 3
    text += "\n\n|" + "a wide table|" * 12 + "\n" + "|-" * 12 + "|\n|" + "cell|" * 12
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800})
    page = context.new_page()
    problems = watched(page)
    with serving(BigramEngine(answer=lambda _: text, max_length=2048), template=None) as server:
        page.goto(server.url)
        assert "has no chat template" in page.locator("#empty").inner_text()
        say(page, "Hi")
        finished(page)
        check_page(page, width)
        page.get_by_role("button", name="Settings").click()
        page.get_by_role("button", name="Model", exact=True).click()
        if width < 800:
            page.get_by_role("button", name="Chats").click()
        assert page.get_by_role("navigation", name="Conversations").is_visible()
        check_page(page, width)
    context.close()
    assert not problems
