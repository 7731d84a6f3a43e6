"""Where a stop text ends the text of tokens."""

from hypothesis import given
from hypothesis import strategies as st

from meshwright.serving.stop_texts import StopTexts


@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_text_ends_before_the_first_stop(pieces: list[str], stops: list[str]) -> None:
    texts = StopTexts(stops)
    given_out = ""
    for piece in pieces:
        given_out += texts.add(piece)
        whole = "".join(pieces)
        assert whole.startswith(given_out)
        if texts.found:
            break
    given_out += texts.end()
    starts = [at for at in (whole.find(stop) for stop in stops) if at >= 0] if pieces else []
    if not starts:
        assert given_out == "".join(pieces)
    else:
        assert texts.found
        assert not any(stop in given_out for stop in stops)


def stopped(pieces: list[str], stops: list[str], early: int, include: bool) -> tuple[str, bool]:
    """As vLLM has it: a stop text counts if it ends in a piece after the first `early`."""
    text = ""
    for number, piece in enumerate(pieces):
        before, text = len(text), text + piece
        places = [
            (at, at + len(stop))
            for stop in stops
            for at in range(len(text))
            if text.startswith(stop, at) and at + len(stop) > before
        ]
        if places and number >= early:
            begin, end = min(places)
            return text[: end if include else begin], True
    return text, False


@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 6),
    st.booleans(),
)
def test_early_pieces_end_nothing_and_stop_texts_can_be_included(
    pieces: list[str], stops: list[str], early: int, include: bool
) -> None:
    texts, shown = StopTexts(stops, include), ""
    for number, piece in enumerate(pieces):
        shown += texts.add(piece, number < early)
        if texts.found:
            break
    assert (shown + texts.end(), texts.found) == stopped(pieces, stops, early, include)
