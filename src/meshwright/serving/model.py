"""A model to use from Python: texts in, texts out.

with mw.load("runs/first", mesh="tp=2") as model:
    print(model.generate("Once upon a time", max_new=50, temperature=0).text)
    print(model.chat("Which city is the capital of France?").text)
"""

import dataclasses
import functools
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal, overload

import jax.numpy as jnp

from meshwright.errors import MeshwrightError, did_you_mean, explained, not_installed
from meshwright.hub import MODEL, local_folder
from meshwright.models import default_dtype
from meshwright.serving.abstract_weights import check_fits
from meshwright.serving.adapters import with_adapters
from meshwright.serving.defaults import answer_stops, defaults_of
from meshwright.serving.engine import Engine
from meshwright.serving.harmony import HarmonyParser
from meshwright.serving.output import Content, is_harmony
from meshwright.serving.replicas import Replicas, start_engine
from meshwright.serving.request import Completion, Delta, Request
from meshwright.serving.sampling import Sampling
from meshwright.serving.settings import EngineConfig
from meshwright.serving.source import Source, chat_folder, generation_mesh, model_source

if TYPE_CHECKING:
    from meshwright.data import ChatTemplate


@explained("mw.load('runs/first')")
def load(
    model: str | os.PathLike[str],
    mesh: str = "dp=1,fsdp=1,tp=1,sp=1",
    dtype: Literal["auto", "bfloat16", "float32"] = "auto",
    engine: EngineConfig | None = None,
    *,
    step: int | None = None,
    tokenizer: str | None = None,
    end_token: str | None = None,
    chat_template: str | os.PathLike[str] | None = None,
    adapter: str | os.PathLike[str] | None = None,
    adapters: Mapping[str, str | os.PathLike[str]] | None = None,
) -> "LanguageModel":
    """Load a model onto a mesh, ready to generate: a run, a Hugging Face folder, or org/name on
    the Hub.

    An `adapter`, a folder of PEFT or of a run with LoRA, is merged into it; `adapters` are such
    folders by the names that `generate` takes.

    Programs are compiled when they are first needed; `engine` has the settings of the engine that
    runs them (`mw.EngineConfig`), with its `compile_first`.
    """
    source = model_source(
        model, step=step, tokenizer=tokenizer, end_token=end_token, adapter=adapter
    )
    source = with_adapters(source, adapters or {})
    placed = generation_mesh(mesh)
    check_fits(source.config, placed)
    kind = jnp.dtype(default_dtype(dtype, placed.devices.flat[0].platform))
    config = EngineConfig(compile_first=False) if engine is None else engine
    return LanguageModel(
        source,
        start_engine(source, placed, kind, config),
        chat_folder(local_folder(model, MODEL)),
        None if chat_template is None else Path(chat_template),
    )


def _texts(prompts: Any) -> list[str]:
    texts = [prompts] if isinstance(prompts, str) else prompts
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise MeshwrightError(f"prompts are a text or a list of texts, not {prompts!r:.80}")
    return list(texts)


class LanguageModel:
    """A model on a mesh with the engine that runs it; `close` it, or use it in a `with` block."""

    def __init__(
        self,
        source: Source,
        engine: Engine | Replicas,
        folder: Path,
        chat_template: Path | None = None,
    ) -> None:
        self.source = source
        self.engine = engine
        """For requests of token ids, with all that an engine can do."""
        self._template_files = folder, chat_template
        self._numbers = itertools.count(1)
        self._defaults = defaults_of(source.generation_config)

    def __enter__(self) -> "LanguageModel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engine and free its memory."""
        self.engine.close()

    @overload
    def generate(
        self, prompts: str, max_new: int = 100, *, adapter: str = "", **sampling: Any
    ) -> Completion: ...

    @overload
    def generate(
        self, prompts: Sequence[str], max_new: int = 100, *, adapter: str = "", **sampling: Any
    ) -> list[Completion]: ...

    def generate(
        self,
        prompts: str | Sequence[str],
        max_new: int = 100,
        *,
        adapter: str = "",
        **sampling: Any,
    ) -> Completion | list[Completion]:
        """Continue a text, or each of several, with the adapter of a name if one is given.

        `sampling` are the fields of Sampling, such as `temperature=0`; others are as the folder's
        generation_config.json has them; if it names no sampling: temperature 0.8 and top_p 0.95.
        Text i is sampled with the seed `seed + i`.
        """
        tokens = [self.source.encode(text) for text in _texts(prompts)]
        requests = self._requests(tokens, max_new, sampling, adapter)
        done = self.engine.generate(requests)
        return done[0] if isinstance(prompts, str) else done

    def stream(
        self, prompt: str, max_new: int = 100, *, adapter: str = "", **sampling: Any
    ) -> Iterator[str]:
        """The continuation of a text in pieces, as they are generated."""
        [text] = _texts(prompt)
        tokens = self.source.encode(text)
        return self._pieces(self._requests([tokens], max_new, sampling, adapter))

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        max_new: int | None = None,
        *,
        adapter: str = "",
        **sampling: Any,
    ) -> Completion:
        """Answer a message of the user, or a conversation, by the model's chat template.

        Without `max_new` the answer may fill the model's context. The text of gpt-oss is that of
        its final channel.
        """
        [answer] = self.engine.generate(self._chat(messages, max_new, sampling, adapter))
        if not is_harmony(self.template):
            return answer
        return dataclasses.replace(answer, text="".join(_contents([answer.text])))

    def stream_chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        max_new: int | None = None,
        *,
        adapter: str = "",
        **sampling: Any,
    ) -> Iterator[str]:
        """The answer of `chat` in pieces, as they are generated."""
        pieces = self._pieces(self._chat(messages, max_new, sampling, adapter))
        return _contents(pieces) if is_harmony(self.template) else pieces

    def check_chat(self) -> None:
        """Raise a MeshwrightError if there is no chat template."""
        self.template  # noqa: B018

    def _chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        max_new: int | None,
        sampling: Mapping[str, Any],
        adapter: str,
    ) -> list[Request]:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        known = [message for message in messages if isinstance(message, Mapping)]
        if not isinstance(messages, Sequence) or len(known) < len(messages):
            raise MeshwrightError(
                'messages are a text, or a list of such as {"role": "user", "content": "Hello"}; '
                f"not {messages!r:.80}"
            )
        text = self.template.render([dict(message) for message in known])
        # the template writes special tokens
        [tokens] = self.source.tokenizer.encode_batch([text], False)
        if max_new is None:
            room = self.engine.max_length - len(tokens)
            max_new = max(1, min(room, self._defaults.max_new or room))
        [request] = self._requests([[int(token) for token in tokens]], max_new, sampling, adapter)
        stop_tokens, stop = answer_stops(self.template, self.source.tokenizer)
        has_marks = is_harmony(self.template)
        stops = dataclasses.replace(request, stop_tokens=stop_tokens, stop=stop)
        return [dataclasses.replace(stops, special_tokens=has_marks)]

    @functools.cached_property
    def template(self) -> "ChatTemplate":
        """The model's chat template, or an error."""
        try:
            from meshwright.data import load_chat_template
        except ImportError as reason:
            raise MeshwrightError(f"{reason}: {not_installed('serve')}") from None
        template = load_chat_template(*self._template_files)
        if template is None:
            raise MeshwrightError(
                f"{self.source.name} has no chat template; give one, --chat-template FILE or the "
                "built-in chatml (in Python: chat_template=…), or continue a text with generate"
            )
        return template

    def _requests(
        self,
        prompts: Sequence[Sequence[int]],
        max_new: int,
        sampling: Mapping[str, Any],
        adapter: str,
    ) -> list[Request]:
        known = [field.name for field in dataclasses.fields(Sampling)]
        for name in sampling:
            if name not in known:
                raise MeshwrightError(
                    f"{name!r} is not a setting of sampling{did_you_mean(name, known)}"
                )
        settings = dataclasses.replace(self._defaults.typed, **sampling)
        return [
            Request(
                tuple(prompt),
                dataclasses.replace(settings, seed=(settings.seed + index) % 2**32),
                max_new,
                adapter=adapter,
            )
            for index, prompt in enumerate(prompts)
        ]

    def _pieces(self, requests: list[Request]) -> Iterator[str]:
        deltas: SimpleQueue[Delta] = SimpleQueue()
        name = f"streamed-{next(self._numbers)}"
        [request] = requests
        self.engine.submit(
            [dataclasses.replace(request, id=name)], lambda _, delta: deltas.put(delta)
        )
        ended = False
        try:
            while not ended:
                delta = deltas.get()
                if delta.finish_reason == "error":
                    raise MeshwrightError(delta.error)
                ended = delta.finish_reason is not None
                yield delta.text
        finally:
            if not ended:
                self.engine.cancel(name)


def _contents(pieces: Iterable[str]) -> Iterator[str]:
    """The content of a text of several channels, as it comes."""
    parser = HarmonyParser()
    for piece in pieces:
        yield from (one.text for one in parser.feed(piece) if isinstance(one, Content))
    yield from (one.text for one in parser.end() if isinstance(one, Content))
