"""Pages are given out once, shared only when full, and never lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.serving.pages import PagePool

SIZE = 4


def test_a_known_prefix_is_matched_by_full_pages_and_leaves_a_token() -> None:
    pool = PagePool(8, SIZE)
    pages = [pool.take(), pool.take()]
    prompt = list(range(8))
    pool.remember(pages, prompt)  # type: ignore[arg-type]
    pool.release(pages)  # type: ignore[arg-type]
    assert pool.match([*prompt, 9]) == pages
    assert pool.match(prompt) == pages[:1]  # the last token is computed again
    assert pool.match([9, *prompt[1:]]) == []
    assert pool.match([*prompt[:4], 0, 0, 0, 0, 0]) == pages[:1]


def test_the_least_recently_used_prefix_goes_first() -> None:
    pool = PagePool(4, SIZE)
    prompts = [[i] * 5 for i in range(3)]
    for prompt in prompts:
        page = pool.take()
        assert page is not None
        pool.remember([page], prompt)
        pool.release([page])
    pool.release(pool.match(prompts[0]))  # used again
    taken = [pool.take(), pool.take()]
    assert None not in taken
    assert [bool(pool.match(prompt)) for prompt in prompts] == [True, False, False]


def test_a_pool_without_free_pages_gives_none() -> None:
    pool = PagePool(3, SIZE)
    assert {pool.take(), pool.take()} == {1, 2}  # 0 is for padding
    assert pool.take() is None


@pytest.mark.parametrize("remember", [True, False])
@given(st.data())
def test_no_page_is_lost_or_written_by_two(remember: bool, data: st.DataObject) -> None:
    """Sequences start, grow and end in any order; prompts begin alike."""
    pool = PagePool(data.draw(st.integers(2, 12)), SIZE, remember=remember)
    live: list[tuple[list[int], list[int]]] = []  # tokens, pages
    known: dict[int, tuple[int, ...]] = {}  # what was written into a page
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["start", "grow", "end"]))
        if action == "start":
            tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=14))
            pages = pool.match(tokens)
            for i, page in enumerate(pages):
                assert known[page] == tuple(tokens[: (i + 1) * SIZE])  # keys depend on all before
            live.append((tokens[: len(pages) * SIZE], pages))
            rest = tokens[len(pages) * SIZE :]
        elif not live:
            continue
        elif action == "grow":
            rest = data.draw(st.lists(st.integers(0, 1), max_size=5))
            live.append(live.pop(data.draw(st.integers(0, len(live) - 1))))
        else:
            tokens, pages = live.pop(data.draw(st.integers(0, len(live) - 1)))
            pool.remember(pages, tokens)
            pool.release(pages)
            continue
        tokens, pages = live[-1]
        for token in rest:
            if len(tokens) == len(pages) * SIZE:
                page = pool.take()
                if page is None:
                    break
                pages.append(page)
            # no one else reads the page that is written
            assert sum(pages[-1] in others for _, others in live) == 1
            tokens.append(token)
            known[pages[-1]] = tuple(tokens)
        pool.remember(pages, tokens)
        used = {page for _, pages in live for page in pages}
        assert pool.used == len(used)
        assert 0 not in used
    for _, pages in live:
        pool.release(pages)
    assert pool.available == pool.total


def test_a_salt_keeps_prefixes_apart() -> None:
    pool = PagePool(pages=16, page_size=2)
    tokens = [1, 2, 3, 4, 5]
    for salt in ("", "one", "two"):
        assert pool.match(tokens, salt) == []
        pages = [pool.take(), pool.take()]
        pool.remember(pages, tokens, salt)
        pool.release(pages)
        assert pool.match(tokens, salt) == pages
    # a salt that is the digest of a page does not continue it
    (first, _) = pool._chain(tokens, 2, "")
    assert pool.match([3, 4, 5], first.decode("latin-1")) == []
