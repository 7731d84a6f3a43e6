"""`mw.load`: a model of a folder on a mesh, from text to text."""

import re
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

import meshwright as mw
from meshwright.models import abstract_arrays, save_hf
from meshwright.models.decoder import DecoderConfig
from meshwright.serving.request import Request
from meshwright.serving.sampling import Sampling

CONFIG = DecoderConfig(320, 2, 32, 4, 2, 8, 64, max_seq=128)
ENGINE = mw.EngineConfig(
    max_batch=2, chunk_shapes=((1, 32),), batch_buckets=(2,), page_size=16, compile_first=False
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    key = jax.random.key(0)
    params = jax.tree.map(
        lambda spec: jax.random.normal(key, spec.shape) / 8, abstract_arrays(CONFIG)
    )
    path = save_hf(tmp_path_factory.mktemp("model") / "hf", params, CONFIG)
    (path / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    )
    (path / "generation_config.json").write_text('{"temperature": 0.5, "max_new_tokens": 7}')
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[mw.LanguageModel]:
    with mw.load(folder, "tp=2", tokenizer="bytes", engine=ENGINE) as model:
        yield model


def alone(model: mw.LanguageModel, text: str, max_new: int, sampling: Sampling) -> tuple[int, ...]:
    """The tokens that the engine makes of the bytes of a text."""
    [done] = model.engine.generate([Request(tuple(text.encode()), sampling, max_new)])
    return done.tokens


def test_texts_are_continued_with_the_seed_of_their_index(model: mw.LanguageModel) -> None:
    texts = ["One day", "The fox", "A"]
    found = model.generate(texts, max_new=9, temperature=0.9, seed=3)
    for index, (text, done) in enumerate(zip(texts, found, strict=True)):
        assert done.tokens == alone(model, text, 9, Sampling(0.9, seed=3 + index))
    assert model.generate("One day", max_new=9, temperature=0.9, seed=3) == found[0]


def test_what_is_not_given_is_as_the_folder_says(model: mw.LanguageModel) -> None:
    assert model.generate("One day").tokens == alone(model, "One day", 100, Sampling(0.5))


def test_pieces_make_up_the_text_and_a_closed_stream_frees_its_place(
    model: mw.LanguageModel,
) -> None:
    whole = model.generate("One day", max_new=20, temperature=0).text
    assert "".join(model.stream("One day", max_new=20, temperature=0)) == whole
    for _ in range(4):  # more than are decoded together
        pieces = model.stream("One day", max_new=100)
        next(pieces)
        pieces.close()  # type: ignore[attr-defined]
    assert model.generate("One day", max_new=20, temperature=0).text == whole
    assert model.engine.stats().finished["cancelled"] == 4


def test_a_chat_is_answered_by_the_template(model: mw.LanguageModel) -> None:
    prompt = "<user>Hi<assistant>"
    answer = model.chat("Hi", temperature=0)
    assert answer.tokens == alone(model, prompt, 7, Sampling(0))
    assert "".join(model.stream_chat([{"role": "user", "content": "Hi"}], temperature=0)) == (
        answer.text
    )


def test_an_answer_ends_where_the_template_writes_its_end(
    model: mw.LanguageModel, folder: Path, tmp_path: Path
) -> None:
    whole = model.chat("Hi", max_new=40, temperature=0).text
    template = tmp_path / "template.jinja"
    letter, pair = (re.search(pattern, whole) for pattern in ("[!-~]", "[\x0e-\x1b!-~]{2}"))
    assert letter is not None
    assert pair is not None
    for end in (letter[0], pair[0]):  # a token, and a text of two
        template.write_text(
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
            f"{{% if m.role == 'assistant' %}}{end}{{% endif %}}{{% endfor %}}"
            "{% if add_generation_prompt %}<assistant>{% endif %}"
        )
        with mw.load(
            folder, "tp=2", tokenizer="bytes", engine=ENGINE, chat_template=template
        ) as other:
            found = other.chat("Hi", max_new=40, temperature=0)
        assert (found.text, found.finish_reason) == (whole.partition(end)[0], "stop")


def test_mistakes_say_what_to_do(model: mw.LanguageModel, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(mw.MeshwrightError, match=r"'temprature' .* did you mean 'temperature'"):
        model.generate("A", temprature=0)
    with pytest.raises(mw.MeshwrightError, match="prompts are a text or a list of texts, not 5"):
        model.generate(5)  # type: ignore[call-overload]
    with pytest.raises(mw.MeshwrightError, match="prompts are a text or a list of texts, not None"):
        model.stream(None)  # type: ignore[arg-type]
    with pytest.raises(mw.MeshwrightError, match="messages are a text, or a list of such as"):
        model.chat({"role": "user", "content": "a"})  # type: ignore[arg-type]
    with pytest.raises(mw.MeshwrightError, match="dtype 'float16' is none of 'auto', 'bfloat16'"):
        mw.load(folder, dtype="float16", tokenizer="bytes")  # type: ignore[arg-type]
    with pytest.raises(mw.MeshwrightError, match=r"with max_new=121 .*; max_new=120 would fit"):
        model.generate("One day.", max_new=121)
    with pytest.raises(
        mw.MeshwrightError, match=r"tp=3 does not divide the model.s heads=4; .* would"
    ):
        mw.load(folder, "tp=3", tokenizer="bytes")
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".jinja":
            (bare / file.name).symlink_to(file)
    with (
        mw.load(bare, tokenizer="bytes", engine=ENGINE) as without,
        pytest.raises(
            mw.MeshwrightError, match=r"no chat template; give one, --chat-template FILE"
        ),
    ):
        without.chat("Hi")
