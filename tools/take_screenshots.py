"""Take the screenshots of docs/images: `.venv-clients/bin/python tools/take_screenshots.py`.

Everything on them is real: two runs of the demo's model are trained and compared on the board, and
the better one is served and asked. It takes minutes, and needs the browser of tests/browser.py.
"""

import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from playwright.sync_api import sync_playwright  # noqa: E402
from tests.browser import MISSING, found_browser  # noqa: E402
from train_demo import SETTINGS, train_tokenizer  # noqa: E402

from meshwright.data import embedded_text  # noqa: E402
from meshwright.training.run import Board  # noqa: E402

IMAGES = ROOT / "docs" / "images"
WIDTH, HEIGHT = 1280, 800
STEPS = 240


def meshwright(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "meshwright.cli.main", *words], check=True)


def train(rate: str, steps: int) -> None:
    """A run of the demo's model with sample texts, stopped at a step."""
    settings = [*SETTINGS]
    settings[settings.index("--optimizer.learning-rate") + 1] = rate
    settings[settings.index("--eval.every") + 1] = "60"
    meshwright(
        "train", *settings, "--eval.prompts", "The old", "--data", "store", "--mesh", "fsdp=4,tp=2",
        "--steps", str(STEPS), "--stop-at", str(steps), "--run", f"runs/rate-{rate}",
    )  # fmt: skip


@contextmanager
def served(run: str) -> Iterator[str]:
    """The address of a server of the run's model."""
    command = [sys.executable, "-m", "meshwright.cli.main", "serve", run, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "chat page" in line and (found := re.search(r"http://\S+", line)):
                yield found[0]
                return
        raise SystemExit("the server ended before it had an address")
    finally:
        process.terminate()
        process.wait()


def ask(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send", exact=True).click()
    page.get_by_role("button", name="Retry").last.wait_for(timeout=0)


def main() -> None:
    path = found_browser()
    if path is None:
        raise SystemExit(MISSING)
    # names on the pictures are relative ones
    with tempfile.TemporaryDirectory() as scratch, chdir(scratch), sync_playwright() as playwright:
        Path("stories.txt").write_text(embedded_text(), encoding="utf-8")
        train_tokenizer(embedded_text(), Path("tokenizer.json"))
        meshwright(
            "data", "pack", "stories.txt", "--out", "store", "--tokenizer", "tokenizer.json",
            "--end-token", "<|endoftext|>", "--split-on", r"\n\n",
        )  # fmt: skip
        train("1e-2", STEPS)
        train("3e-3", STEPS * 3 // 4)
        meshwright(
            "show", "--mesh", "dp=1,fsdp=16,tp=8,sp=1", "--on", "v5p:4x4x8",
            "--model", "llama-3.1-8b", "--html", "show.html",
        )  # fmt: skip
        meshwright(
            "plan", "llama-3.1-8b", "--on", "v5p:4x4x4", "--batch", "64", "--seq", "8192",
            "--html", "plan.html",
        )  # fmt: skip

        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})

        def take(name: str, address: str = "") -> None:
            if address:
                page.goto(address)
            page.screenshot(path=IMAGES / f"{name}.png")

        for name in ("show", "plan", "runs/rate-1e-2/run"):
            take(name.rpartition("/")[2], Path(f"{name}.html").absolute().as_uri())
        with Board([Path("runs")], port=0) as board:
            thread = threading.Thread(target=board.serve)
            thread.start()
            take("board", board.url)
            board.close()
            thread.join()
        with served("runs/rate-1e-2") as address:
            page.goto(address)
            for text in ("A fox and a badger", "The old"):
                ask(page, text)
                page.get_by_role("button", name="New chat").click()
            page.get_by_role("button", name="The old").first.click()
            page.get_by_role("button", name="Model", exact=True).click()
            take("chat")
        browser.close()


if __name__ == "__main__":
    main()
