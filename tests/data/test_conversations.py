"""Conversations to tokens and masks: equal to transformers, for templates of many families."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.data.chat_families import FAMILIES, SPECIAL

from meshwright.data import (
    ByteTokenizer,
    ChatTemplate,
    Encoding,
    Mixture,
    Reading,
    Tokenizer,
    TokenStore,
    check_data,
    load_chat_template,
    load_tokenizer,
    pack,
)
from meshwright.data.conversations import Completion, Conversation, examples_of, recognize
from meshwright.data.examples import pieces_of
from meshwright.data.pieces import encode_pieces
from meshwright.errors import MeshwrightError

TEXT = "What is 2+2? It is four: naïve 東京 🙂🙃 test\n\nsecond line  with  spaces "
CONVERSATIONS = [
    [("user", "Hi!"), ("assistant", "Hello, who are you?")],
    [("system", " Be brief. "), ("user", "2+2?"), ("assistant", "four"), ("user", "and 東京"),
     ("assistant", "It is naïve 🙂")],
    [("user", "a"), ("assistant", "x <think> not so"), ("user", "b"), ("assistant", " spaced \n"),
     ("user", "Why?\n"), ("assistant", "second line\n\nwith spaces")],
    [("user", "a"), ("assistant", "<think>\nfirst\n</think>\n\nb"), ("user", "c"),
     ("assistant", "<think>\nlast\n</think>\n\nd")],
]  # fmt: skip
UNMARKED = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE with the special tokens of all families."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    inner.train_from_iterator([TEXT] * 3, trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    inner.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def messages(conversation: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in conversation]


def expected(folder: Path, template: str, conversation: list[dict[str, str]]) -> tuple[Any, Any]:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = template
    made = tokenizer.apply_chat_template(
        conversation, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return made["input_ids"], made["assistant_masks"]


def chat_template(text: str) -> ChatTemplate:
    return ChatTemplate(text, {"bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.parametrize("is_marked", [True, False], ids=["generation", "prefix differences"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_masks_equal_transformers(folder: Path, family: str, is_marked: bool) -> None:
    """Also where the template does not mark answers: they are then found by differences."""
    marked = FAMILIES[family]
    template = chat_template(marked if is_marked else UNMARKED.sub("", marked))
    assert template.marks_answers == is_marked
    tokenizer = load_tokenizer(folder)
    for conversation in map(messages, CONVERSATIONS):
        ids, mask = expected(folder, marked, conversation)
        example = Conversation(tuple(conversation))
        found, weights = encode(example, Encoding(template=template), tokenizer)
        assert found.tolist() == ids
        shown = [tokenizer.token_text(i) for i, w in zip(found, weights, strict=True) if w]
        assert weights.tolist() == mask, shown
        assert 0 < sum(mask) < len(mask)


_ANSWER = "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
_TURNS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}ANSWER{% else %}"
    "{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)


@pytest.mark.parametrize(
    "answer",
    [
        "{% generation %}{% set end = '!' %}{{ m.content }}{% endgeneration %}{{ end }}",
        "{% generation %}{{ m.reasoning_content }}<|im_end|>{{ m.content }}{% endgeneration %}",
        "{% generation %}{{ m.thinking }}{{ m.content }}{% endgeneration %}",
    ],
)
@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_names_of_a_template_are_those_of_transformers(
    folder: Path, answer: str, name: str
) -> None:
    template = _TURNS.replace("ANSWER", answer)
    conversation = messages([("user", "a"), ("assistant", "four")])
    conversation[1][name] = "naïve"
    ids, mask = expected(folder, template, conversation)
    example, encoding = (
        Conversation(tuple(conversation)), Encoding(template=chat_template(template)),
    )  # fmt: skip
    found, weights = encode(example, encoding, load_tokenizer(folder))
    assert (found.tolist(), weights.tolist()) == (ids, mask)


def test_all_that_follows_a_prompt_has_loss_also_where_marks_include_its_end(folder: Path) -> None:
    tokenizer, texts = load_tokenizer(folder), []
    asked = messages([("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")])
    for header in ("{{ '<|im_start|>assistant' }}" + _ANSWER,
                   _ANSWER.replace("{{ m", "{{ '<|im_start|>assistant' + m")):  # fmt: skip
        encoding = Encoding(template=chat_template(_TURNS.replace("ANSWER", header)))
        for first in (1, 3):
            example = Conversation(tuple(asked), first_answer=first)
            texts.append(with_loss(tokenizer, encode(example, encoding, tokenizer))[1])
    answers = "d<|im_end|>"
    assert texts[:2] == ["b<|im_end|>" + answers, answers]
    assert texts[2:] == ["b<|im_end|><|im_start|>assistant" + answers, answers]


def test_loss_on_all_tokens(folder: Path) -> None:
    encoding = Encoding(template=chat_template(FAMILIES["chatml"]), loss_on="all")
    example = Conversation(tuple(messages(CONVERSATIONS[1])))
    ids, weights = encode(example, encoding, load_tokenizer(folder))
    assert ids.tolist() == expected(folder, FAMILIES["chatml"], messages(CONVERSATIONS[1]))[0]
    assert weights.all()


def encode(example: Any, encoding: Encoding, tokenizer: Tokenizer) -> tuple[Any, Any]:
    pieces = pieces_of(example, encoding, tokenizer.end_of_document)
    return encode_pieces([pieces], tokenizer)[0]


def with_loss(tokenizer: Tokenizer, encoded: tuple[Any, Any]) -> tuple[str, str]:
    """The text of an example, and of its tokens with loss."""
    ids, weights = encoded
    return tuple(tokenizer.decode(part, special_tokens=True) for part in (ids, ids[weights > 0]))


def test_a_template_whose_answers_cannot_be_found_is_refused() -> None:
    """The number of messages stands at the end, so no prompt is a prefix of what follows it."""
    text = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}({{ messages | length }})"
    )
    with pytest.raises(MeshwrightError, match=r"\{% generation %\}.*--loss-on all"):
        ChatTemplate(text).render_answers(messages(CONVERSATIONS[1]))


def test_one_answer_can_be_left_out() -> None:
    """As in OpenAI's files: a message of the assistant with the weight 0."""
    conversation = messages([("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")])
    conversation[1]["weight"] = 0
    for text in (FAMILIES["chatml"], UNMARKED.sub("", FAMILIES["chatml"])):
        example, encoding = Conversation(tuple(conversation)), Encoding(template=ChatTemplate(text))
        assert with_loss(BYTES, encode(example, encoding, BYTES))[1] == "d<|im_end|>"
        on_all = Encoding(template=ChatTemplate(text), loss_on="all")
        whole, loss = with_loss(BYTES, encode(example, on_all, BYTES))
        assert whole.count("b<|im_end|>") == 1
        assert loss == whole.replace("b<|im_end|>", "")
    conversation[1]["weight"] = 0.5
    with pytest.raises(MeshwrightError, match="not 0 or 1"):
        encode(Conversation(tuple(conversation)), encoding, BYTES)


BYTES = ByteTokenizer()
HI = [{"role": "user", "content": "Hi"}]
YO, NO = {"role": "assistant", "content": "Yo"}, {"role": "assistant", "content": "No"}
RECORDS: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "messages": ({"messages": [*HI, YO], "id": 3}, [("U Hi\nA Yo\n", "Yo\n")]),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]},
        [("U Hi\nA Yo\n", "Yo\n")],
    ),
    "completion": (
        {"prompt": "2+2=", "completion": "4"}, [("2+2=4<|endoftext|>", "4<|endoftext|>")]
    ),
    "completion of messages": (
        {"prompt": [*HI, NO, *HI], "completion": [YO]}, [("U Hi\nA No\nU Hi\nA Yo\n", "Yo\n")]
    ),
    "instruction": (
        {"instruction": "Add.", "input": "1 2", "output": "3"}, [("U Add.\n\n1 2\nA 3\n", "3\n")]
    ),
    "inputs-targets": (
        {"inputs": "a", "targets": "b"}, [("ab<|endoftext|>", "b<|endoftext|>")]
    ),
    "preference": (
        {"prompt": "2+2=", "chosen": "4", "rejected": "5"},
        [("2+2=4<|endoftext|>", "4<|endoftext|>"), ("2+2=5<|endoftext|>", "5<|endoftext|>")],
    ),
    "preference without prompt": (
        {"chosen": "\n\nHuman: a b\n\nAssistant: ab c", "rejected": "\n\nHuman: a b\n\nAssistant: ad"},
        [(f"\n\nHuman: a b\n\nAssistant:{end}<|endoftext|>", f"{end}<|endoftext|>")
         for end in (" ab c", " ad")],
    ),
    "preference of messages": (
        {"chosen": [*HI, NO, *HI, YO], "rejected": [*HI, NO, *HI, NO]},
        [("U Hi\nA No\nU Hi\nA Yo\n", "Yo\n"), ("U Hi\nA No\nU Hi\nA No\n", "No\n")],
    ),
    "preference of answers": (
        {"prompt": "Hi", "chosen": [YO], "rejected": [NO]},
        [("U Hi\nA Yo\n", "Yo\n"), ("U Hi\nA No\n", "No\n")],
    ),
}  # fmt: skip
PLAIN = ChatTemplate(
    "{% for m in messages %}{{ m.role[0] | upper }} {{ m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}A {% endif %}"
)


@pytest.mark.parametrize("name", RECORDS)
def test_formats_of_records_are_recognized(name: str) -> None:
    record, texts = RECORDS[name]
    found = recognize(record)
    assert found == name.split()[0]
    examples = examples_of(record, found)
    assert [
        with_loss(BYTES, encode(one, Encoding(template=PLAIN), BYTES)) for one in examples
    ] == texts


def test_instructions_without_a_chat_template_are_written_as_alpaca_had_them() -> None:
    (example,) = examples_of({"instruction": "Add.", "input": "", "output": "3"}, "instruction")
    text, answer = with_loss(BYTES, encode(example, Encoding(), BYTES))
    assert text.startswith("Below is an instruction that describes a task. Write")
    assert text.endswith("### Instruction:\nAdd.\n\n### Response:\n3<|endoftext|>")
    assert answer == "3<|endoftext|>"


def test_a_token_of_prompt_and_completion_has_loss(folder: Path) -> None:
    """As for transformers' masks: a token that holds a character of the answer."""
    tokenizer = load_tokenizer(folder)
    ids, weights = encode(Completion("What is fo", "ur 東京"), Encoding(), tokenizer)
    assert tokenizer.decode(ids) == "What is four 東京"
    prompt = tokenizer.decode(ids[weights == 0])
    assert "What is fo".startswith(prompt)
    assert ids[-1] == tokenizer.end_of_document


def jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_file_of_conversations_becomes_a_store_with_masks(tmp_path: Path) -> None:
    record, [(text, answer)] = RECORDS["messages"]
    nothing = {"messages": HI}
    source = jsonl(tmp_path / "a.jsonl", [record, nothing, record])
    done = pack([source], tmp_path / "a.store", BYTES, encoding=Encoding(template=PLAIN))
    assert (done.store.documents, done.without_loss) == (2, 1)
    assert done.formats == ("messages, chat template of , answers by prefix differences",)
    assert done.store.text(1) == text
    mask = done.store.document_weights(1)
    assert done.store.tokenizer.decode(done.store.document(1)[mask > 0]) == answer
    assert done.store.meta["examples"]["chat_template"] == PLAIN.text
    assert TokenStore.open(tmp_path / "a.store").identity == done.store.identity


def test_texts_are_not_written_by_a_chat_template(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [RECORDS["completion"][0]])
    done = pack([source], tmp_path / "a.store", BYTES, encoding=Encoding(template=PLAIN))
    assert done.formats == ("completion",)
    assert "chat_template" not in done.store.meta["examples"]


def test_a_run_keeps_the_chat_template_of_its_data(tmp_path: Path) -> None:
    source, stores = jsonl(tmp_path / "a.jsonl", [RECORDS["messages"][0]] * 2), []
    for name, text in (("a", PLAIN.text), ("b", PLAIN.text + "{# other #}")):
        encoding = Encoding(template=ChatTemplate(text, {"bos_token": "<s>"}))
        stores.append(pack([source], tmp_path / f"{name}.store", BYTES, encoding=encoding).store)
    texts = TokenStore.of_documents(["text"], BYTES, name="t")
    for name, content in Mixture.of([texts, stores[0]]).template_files().items():
        (tmp_path / name).write_text(content)
    kept = load_chat_template(tmp_path)
    assert kept is not None
    assert (kept.text, kept.tokens) == (PLAIN.text, {"bos_token": "<s>"})
    assert Mixture.of(stores).template_files() == Mixture.of([texts]).template_files() == {}


def test_tables_hold_conversations_with_tools(tmp_path: Path) -> None:
    """Tables have None for what a message lacks, and tools as JSON."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    tool = {"name": "add", "parameters": {}}
    call: dict[str, Any] = {"role": "assistant", "tool_calls": [{"name": "add"}], "content": None}
    talk = [*HI, call, {"role": "tool", "content": "4"}, YO]
    lines = jsonl(tmp_path / "a.jsonl", [{"messages": talk, "tools": [tool]}])
    table = arrow.Table.from_pylist([{"messages": talk, "tools": json.dumps([tool])}])
    parquet.write_table(table, tmp_path / "a.parquet")
    template = ChatTemplate(
        "{{ tools[0].name }} {% for m in messages %}{{ m.role }}: "
        "{% if m.tool_calls is defined %}call {{ m.tool_calls[0].name }}{% else %}{{ m.content }}"
        "{% endif %};{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    stores = [
        pack([file], tmp_path / f"{file.suffix}.store", BYTES, encoding=Encoding(template=template))
        for file in (lines, tmp_path / "a.parquet")
    ]
    assert stores[0].store.identity == stores[1].store.identity
    ids, weights = stores[0].store.document(0), stores[0].store.document_weights(0)
    assert with_loss(BYTES, (ids, weights)) == (
        "add user: Hi;assistant: call add;tool: 4;assistant: Yo;", "call add;Yo;",
    )  # fmt: skip


def test_examples_may_count_equally_or_by_a_field(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [
        {"prompt": "a", "completion": "b" * n, "score": n / 4} for n in (1, 3, 7)
    ])  # fmt: skip
    equal = pack([source], tmp_path / "a.store", BYTES, encoding=Encoding(weigh="examples")).store
    for i, n in enumerate((1, 3, 7)):
        np.testing.assert_allclose(
            equal.document_weights(i), [0] + [1 / (n + 1)] * (n + 1), rtol=1e-6
        )
    scored = pack(
        [source], tmp_path / "b.store", BYTES, encoding=Encoding(weight_field="score")
    ).store
    assert [float(scored.document_weights(i).max()) for i in range(3)] == [0.25, 0.75, 1.75]


def test_pairs_follow_each_other_and_are_not_trained_on_as_examples(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [RECORDS["preference"][0]] * 2)
    store = pack([source], tmp_path / "a.store", BYTES).store
    assert [store.text(i) for i in range(4)] == ["2+2=4", "2+2=5"] * 2
    assert store.meta["examples"]["pairs"]
    with pytest.raises(MeshwrightError, match="pairs of chosen and rejected"):
        check_data(Mixture.of([store]), vocab=257, seq=8)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"messages": []}, "the list of messages is empty"),
        ({"messages": "Hi"}, "not a list"),
        ({"messages": [{"role": "user"}]}, "has no 'content'"),
        ({"messages": ["Hi"]}, "a message is str"),
        ({"messages": None}, "has null as its 'messages'"),
        ({"conversations": [{"from": "hooman", "value": "x"}]}, "did you mean 'human'"),
        ({"prompt": "a", "completion": 3}, "not a list"),
        ({"instruction": 3, "output": "x"}, "'instruction' is int, not text"),
        ({"chosen": "a", "rejected": "b", "prompt": 3}, "'prompt' is not text"),
    ],
)  # fmt: skip
def test_records_that_cannot_be_read_are_named(
    tmp_path: Path, record: dict[str, Any], words: str
) -> None:
    source = jsonl(tmp_path / "a.jsonl", [record])
    with pytest.raises(MeshwrightError) as said:
        pack([source], tmp_path / "a.store", BYTES, encoding=Encoding(template=PLAIN))
    assert words in str(said.value)
    assert "a.jsonl', line 1: " in str(said.value)
    assert "--skip-bad" in str(said.value)


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    examples = jsonl(tmp_path / "a.jsonl", [RECORDS["messages"][0]])
    pairs = jsonl(tmp_path / "b.jsonl", [RECORDS["preference"][0]])
    both = jsonl(tmp_path / "c.jsonl", [RECORDS["messages"][0] | RECORDS["preference"][0]])
    (tmp_path / "d.txt").write_text("text")
    encoding = Encoding(template=PLAIN)
    for sources, reading, words in (
        ([examples, tmp_path / "d.txt"], Reading(), "pack them into two stores"),
        ([examples, pairs], Reading(), "some files hold pairs"),
        ([both], Reading(), "--format preference or --format messages"),
        ([both], Reading(format="message"), "did you mean 'messages'"),
        ([examples], Reading(field="messages", format="messages"), "leave it out"),
    ):
        with pytest.raises(MeshwrightError, match=words):
            pack(sources, tmp_path / "a.store", BYTES, reading, encoding)
    for encoding in (
        Encoding(weigh="examples"),
        Encoding(weight_field="w"),
        Encoding(loss_on="all"),
    ):
        with pytest.raises(MeshwrightError, match="is for examples"):
            pack([tmp_path / "d.txt"], tmp_path / "a.store", BYTES, encoding=encoding)
    encoding = Encoding(template=PLAIN)
    chosen = pack([both], tmp_path / "a.store", BYTES, Reading(format="messages"), encoding)
    assert chosen.store.documents == 1
    with pytest.raises(MeshwrightError, match=r"holds conversations \(messages\).*--chat-template"):
        pack([examples], tmp_path / "b.store", BYTES)


def test_a_built_in_template_marks_answers(tmp_path: Path) -> None:
    template = load_chat_template(tmp_path, Path("chatml"))
    assert template is not None
    assert template.marks_answers
    assert template.text == FAMILIES["chatml"]
