"""Text as tokens come, and where it stops."""

from hypothesis import given
from hypothesis import strategies as st

from meshwright.data import ByteTokenizer
from meshwright.serve.text import StopTexts, TextStream


@given(st.text(max_size=30))
def test_pieces_make_up_the_text(text: str) -> None:
    stream = TextStream(ByteTokenizer())
    tokens = list(text.encode("utf-8", errors="ignore"))
    pieces = [stream.add(token) for token in tokens]
    whole = ByteTokenizer().decode(tokens)
    assert "".join(pieces) + stream.end() == whole


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
