"""The chat page, in a real browser where one is installed."""

import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from tests.patience import PATIENCE_S, eventually
from tests.serving.server.bigram_engine import BigramEngine
from tests.serving.server.serving import Running, serving

CHROMIUM = shutil.which("chromium")


def test_the_page_loads_nothing_from_elsewhere(server: Running) -> None:
    answer = server.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "<title>bigram</title>" in answer.text
    assert not re.search(r"(src|href)=|https?://(?!www\.w3\.org)|@import|url\(", answer.text)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    opened = browser.new_page()
    opened.set_default_timeout(PATIENCE_S * 1000)
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    yield opened
    opened.close()
    assert not problems


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

        # regenerate asks again with the same messages; edit changes them
        page.locator(".assistant").get_by_role("button", name="Regenerate").click()
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

        # settings outlive the page, the chat does not
        page.reload()
        assert page.locator(".message").count() == 0
        assert page.get_by_label("System prompt").input_value() == "Be brief."


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
        page.locator(".error").get_by_role("button", name="Regenerate").click()
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
@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_fits_light_and_dark_and_small(
    browser: Any, scheme: str, width: int, tmp_path: Any
) -> None:
    text = "A long answer, with code:\n```python\nprint('" + "x" * 120 + "')\n```\nDone. " * 3
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800})
    page = context.new_page()
    with serving(BigramEngine(answer=lambda _: text), template=None) as server:
        page.goto(server.url)
        assert "has no chat template" in page.locator("#empty").inner_text()
        say(page, "Hi")
        finished(page)
        page.get_by_role("button", name="Settings").click()
        page.screenshot(path=tmp_path / f"chat-{scheme}-{width}.png")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        light = sum(
            map(
                int,
                re.findall(
                    r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor")
                )[:3],
            )
        )
        assert (light > 600) == (scheme == "light")
    context.close()
