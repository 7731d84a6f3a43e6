"""Check that data fits the model, before anything is compiled."""

from meshwright.data.mixture import Mixture
from meshwright.data.samples import training_sequences
from meshwright.data.store import TokenStore
from meshwright.data.tokenizers import Tokenizer
from meshwright.errors import MeshwrightError
from meshwright.present import count


def check_data(
    mixture: Mixture,
    *,
    vocab: int,
    seq: int,
    batch: int = 1,
    held_out: int = 0,
    tokenizer: Tokenizer | None = None,
    packed: bool = True,
    pairs: bool = False,
) -> None:
    """Raise a MeshwrightError if the model cannot be trained on this data.

    `vocab` is the model's vocabulary size; `tokenizer` is the one that came with its weights, if
    any. `pairs`: the objective trains on pairs of chosen and rejected answers.
    """
    for store in mixture.stores:
        _check_pairs(store, pairs)
    weighted = [store.name for store in mixture.stores if store.is_weighted]
    if 0 < len(weighted) < len(mixture.stores):
        raise MeshwrightError(
            f"data '{weighted[0]}' weighs examples, and other stores weigh every token with 1: "
            "their shares would not be those of the mixture; pack all of them with the same --weigh"
        )
    names = ", ".join(f"'{store.name}'" for store in mixture.stores)
    if mixture.vocab > vocab:
        raise MeshwrightError(
            f"data {names} was packed with a vocabulary of {mixture.vocab:,}, the model's is "
            f"{vocab:,}: larger token ids have no embedding; pack with the model's tokenizer, or "
            f"use a model with vocab={mixture.vocab} or more"
        )
    if tokenizer is not None and tokenizer.identity != mixture.tokenizer.identity:
        raise MeshwrightError(
            f"data {names} was packed with a tokenizer that is not the model's (vocabulary "
            f"{mixture.vocab:,} and {tokenizer.vocab:,}); pack it with the model's tokenizer"
        )
    sequences = sum(training_sequences(store, seq, held_out, packed) for store in mixture.stores)
    if sequences < batch:
        tokens = sum(len(store.tokens) for store in mixture.stores)
        raise MeshwrightError(
            f"data {names} has {count(sequences, 'sequence')} of {seq} tokens to train on "
            f"({tokens:,} tokens, {held_out} sequences of each store held out), less than one "
            f"batch of {batch}; use a smaller batch or seq, or more data"
        )


def _check_pairs(store: TokenStore, wanted: bool) -> None:
    if store.holds_pairs and not wanted:
        raise MeshwrightError(
            f"data '{store.name}' holds pairs of chosen and rejected answers, which this objective "
            "does not train on; give --objective dpo to a decoder, or pack single examples, as "
            "with --format messages"
        )
    if wanted and not store.holds_pairs:
        raise MeshwrightError(
            f"--objective dpo trains on pairs of chosen and rejected answers, and data "
            f"'{store.name}' holds {'texts' if store.weights is None else 'single examples'}; pack "
            "records that have 'chosen' and 'rejected', or leave the objective out"
        )
    if wanted and store.is_weighted:
        raise MeshwrightError(
            f"data '{store.name}' has weights other than 0 and 1, and --objective dpo counts every "
            "pair equally; pack it without --weigh examples and --weight-field"
        )
