"""Steps: who decodes, whose prompt is computed, and who waits."""

from hypothesis import given
from hypothesis import strategies as st

from meshwright.serving.pages import PagePool
from meshwright.serving.scheduler import Scheduler, Sequence, Step
from meshwright.serving.settings import EngineConfig

PROMPT_SHAPES = ((3, 4), (1, 18))


def scheduler(
    pages: int = 64, prompt_shapes: tuple[tuple[int, int], ...] = (), **settings: object
) -> Scheduler:
    defaults: dict[str, object] = {"max_batch": 4, "page_size": 4, "chunk": 8}
    config = EngineConfig(**(defaults | {"chunk_shapes": ((1, 8), (2, 4))} | settings))  # type: ignore[arg-type]
    return Scheduler(config, PagePool(pages, config.page_size), prompt_shapes)


def encoded(length: int, new: int = 3, name: str = "a") -> Sequence:
    """A sequence of an encoder-decoder model."""
    return Sequence(name, [0], 1, new, encoder_tokens=tuple(range(length)))


def sequence(length: int, new: int = 3, name: str = "a", **more: bool) -> Sequence:
    return Sequence(name, list(range(length)), length, new, **more)


def read(step: Step | None) -> None:
    """As the engine does when the tokens of a step are known."""
    assert step is not None
    sampled = [*step.decode, *(chunk.sequence for chunk in step.chunks if chunk.samples)]
    for each in sampled:
        each.in_flight -= 1
        if not each.ended:
            each.tokens.append(7)


def test_a_long_prompt_is_computed_in_chunks_beside_decode() -> None:
    runs = scheduler()
    short, long = sequence(2), sequence(20, name="b")
    runs.add(short)
    step = runs.next_step()
    assert step is not None
    assert [(chunk.start, chunk.count, chunk.samples) for chunk in step.chunks] == [(0, 2, True)]
    runs.add(long)
    parts = []
    for _ in range(2):  # dispatched before anything is read
        step = runs.next_step()
        assert step is not None
        assert step.decode == (short,)
        parts += [(chunk.start, chunk.count, chunk.samples) for chunk in step.chunks]
    assert parts == [(0, 8, False), (8, 8, False)]
    assert short.in_flight == 3
    step = runs.next_step()
    assert step is not None
    assert step.decode == ()  # the short one has its three tokens
    assert [(chunk.start, chunk.count, chunk.samples) for chunk in step.chunks] == [(16, 4, True)]


def test_the_shape_with_most_tokens_is_taken() -> None:
    runs = scheduler()
    for name in "abc":
        runs.add(sequence(3, name=name))
    step = runs.next_step()
    assert step is not None
    assert step.shape == (2, 4)
    assert len(step.chunks) == 2


def test_a_prompt_of_one_token_needs_no_chunk() -> None:
    runs = scheduler()
    runs.add(sequence(1))
    step = runs.next_step()
    assert step is not None
    assert len(step.decode) == 1
    assert not step.chunks


def test_sequences_wait_for_a_place_and_for_pages() -> None:
    runs = scheduler(max_batch=2)
    sequences = [sequence(2, name=name) for name in "abc"]
    for each in sequences:
        runs.add(each)
    runs.next_step()
    assert list(runs.waiting) == sequences[2:]
    runs.remove(sequences[0])
    runs.next_step()
    assert not runs.waiting
    few = scheduler(pages=4)
    few.add(sequence(8, name="x"))
    few.add(sequence(2, name="y"))
    few.next_step()
    assert [each.id for each in few.waiting] == ["y"]


def test_the_last_one_is_preempted_when_pages_run_out_and_comes_back_first() -> None:
    runs = scheduler(pages=6, max_batch=3)
    first, second, third = (sequence(4, 12, name) for name in "abc")
    runs.add(first)
    runs.add(second)
    step = runs.next_step()
    read(step)
    runs.add(third)
    steps = 0
    while first.generated < 9:
        step = runs.next_step()
        assert step is not None
        assert second not in step.decode or second.slot is not None
        read(step)
        steps += 1
    assert runs.preemptions > 0
    assert second.preemptions > 0
    assert runs.waiting[0] is second
    assert second.pages == []
    runs.remove(first)
    read(runs.next_step())
    assert second.slot is not None
    assert second.computed > 4  # its tokens so far are its prompt now


def test_a_sequence_with_tokens_in_flight_waits_until_they_are_known() -> None:
    runs = scheduler()
    one = sequence(2)
    runs.add(one)
    step = runs.next_step()
    runs._preempt(one)
    assert runs.next_step() is None
    read(step)
    following = runs.next_step()
    assert following is not None
    assert following.chunks[0].count == 3


def test_prompts_of_about_a_length_are_encoded_together_before_they_decode() -> None:
    runs = scheduler(prompt_shapes=PROMPT_SHAPES)
    first, long, other = encoded(3), encoded(9, name="b"), encoded(4, name="c")
    for each in (first, long, other):
        runs.add(each)
    step = runs.next_step()
    assert step is not None
    assert step.prompt_shape == (3, 4)
    assert [(chunk.sequence, chunk.count) for chunk in step.prompts] == [(first, 3), (other, 4)]
    assert step.decode == (first, other)
    assert not step.chunks
    step = runs.next_step()
    assert step is not None
    assert (step.prompt_shape, step.decode) == ((1, 18), (first, long, other))
    assert [len(each.encoder_pages) for each in runs.running] == [1, 3, 1]


def test_what_was_preempted_is_encoded_again() -> None:
    runs = scheduler(prompt_shapes=PROMPT_SHAPES)
    one = encoded(6)
    runs.add(one)
    for _ in range(2):
        read(runs.next_step())
    runs._preempt(one)
    assert runs.pool.used == 0
    step = runs.next_step()
    assert step is not None
    assert [chunk.count for chunk in step.prompts] == [6]
    assert [(chunk.start, chunk.count) for chunk in step.chunks] == [(0, 3)]


def test_a_long_prompt_is_taken_whole_but_for_its_last_token() -> None:
    runs = scheduler(prompt_shapes=((1, 16),))
    long, second, short = sequence(15), sequence(30, name="b"), sequence(9, name="c")
    for each in (long, second, short):
        runs.add(each)
    step = runs.next_step()
    assert step is not None
    assert [(chunk.sequence, chunk.count) for chunk in step.prompts] == [(long, 14)]
    assert step.decode == (long,)
    assert [chunk.sequence for chunk in step.chunks] == [short]  # in one chunk
    step = runs.next_step()
    assert step is not None
    assert [(chunk.sequence, chunk.count) for chunk in step.prompts] == [(second, 16)]
    assert next((chunk.sequence, chunk.start) for chunk in step.chunks) == (second, 16)


@given(
    st.sampled_from(["chunks", "whole prompts", "encoder"]),
    st.lists(st.tuples(st.integers(1, 18), st.integers(1, 8)), min_size=1, max_size=8),
    st.integers(8, 20),
    st.lists(st.integers(0, 3), max_size=60),
)
def test_every_sequence_ends_and_no_page_is_lost(
    kind: str, wanted: list[tuple[int, int]], pages: int, delays: list[int]
) -> None:
    runs = scheduler(pages + 2, () if kind == "chunks" else PROMPT_SHAPES, max_batch=3)
    make = encoded if kind == "encoder" else sequence
    sequences = [make(length, new, str(i)) for i, (length, new) in enumerate(wanted)]
    lengths = [each.prompt_length for each in sequences]
    for each in sequences:
        runs.add(each)
    flights: list[Step] = []
    for _ in range(2000):
        step = runs.next_step()
        if step is not None:
            flights.append(step)
            slots = [s.slot for s in (*step.decode, *(chunk.sequence for chunk in step.chunks))]
            assert None not in slots
            assert len(set(slots)) == len(slots)
            for each in runs.running:
                assert len(each.pages) * 4 >= each.computed
                assert len(each.encoder_pages) * 4 >= len(each.encoder_tokens)
            if kind == "encoder":
                assert all(each.encoded for each in step.decode)
                assert all(chunk.sequence.encoded for chunk in (*step.chunks, *step.prompts))
                held = [page for s in runs.running for page in (*s.pages, *s.encoder_pages)]
                assert len(set(held)) == len(held)
        if flights and (step is None or len(flights) > 1):
            read(flights.pop(0))
        for each in sequences:
            if not each.ended and each.generated - each.in_flight >= each.max_new:
                runs.remove(each)
        if all(each.ended for each in sequences):
            break
    assert all(each.ended for each in sequences)
    assert [len(s.tokens) for s in sequences] == [
        length + new for length, (_, new) in zip(lengths, wanted, strict=True)
    ]
    assert runs.pool.used == 0
    assert not runs.running
    assert not runs.waiting
