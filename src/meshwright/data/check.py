"""What can be wrong between data and model, said before anything is compiled."""

from meshwright.data.mixture import Mixture
from meshwright.data.samples import training_sequences
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
) -> None:
    """A MeshwrightError if this data cannot train that model; else nothing.

    `vocab` is the model's; `tokenizer` is the one that came with its weights, if any did.
    """
    names = ", ".join(f"'{store.name}'" for store in mixture.stores)
    if mixture.vocab > vocab:
        raise MeshwrightError(
            f"data {names} was packed with a vocabulary of {mixture.vocab:,}, the model's is "
            f"{vocab:,}: larger ids would not exist; pack it with the model's tokenizer, or use a "
            f"model of vocab={mixture.vocab} or more"
        )
    if tokenizer is not None and tokenizer.identity != mixture.tokenizer.identity:
        raise MeshwrightError(
            f"data {names} was packed with another tokenizer than the model's (vocabulary "
            f"{mixture.vocab:,} and {tokenizer.vocab:,}); pack it with the model's"
        )
    rows = sum(training_sequences(store, seq, held_out) for store in mixture.stores)
    if rows < batch:
        tokens = sum(len(store.tokens) for store in mixture.stores)
        raise MeshwrightError(
            f"data {names} has {count(rows, 'row')} of {seq} tokens to train on "
            f"({tokens:,} tokens, {held_out} rows of each store held out), fewer than one batch of "
            f"{batch}; use a smaller batch or seq, or more data"
        )
