"""A decoder's Hugging Face folder, read and written: their names and dims beside ours.

Both rotate pair i of a head as (x[i], x[i + head_dim / 2]): rotary embedding needs no reordering.
"""

from meshwright.models.decoder.arrays import abstract_arrays
from meshwright.models.decoder.config import DecoderConfig
from meshwright.models.decoder.hf_config import architecture_of, to_hf_config
from meshwright.models.huggingface import SOURCE, HfModel, hf_arrays


def hf_model(config: DecoderConfig) -> HfModel:
    """What a folder of this config holds."""
    architecture, specs = architecture_of(config), abstract_arrays(config)
    names = {ours: theirs for ours, (theirs, _) in architecture.tensors.items()}
    tied = {names["output"]: names["embedding"]} if config.tied_embeddings else {}
    return HfModel(
        specs=specs,
        arrays=hf_arrays(specs, architecture.tensors, {"layers": config.leading}),
        write_config=lambda dtype: to_hf_config(config, dtype=dtype),
        source=(config.hf_config or {}).get(SOURCE),
        copies=tied,
        ignored=architecture.ignored,
        prefix=architecture.prefix,
        beyond=architecture.beyond.format(layers=config.layers),
    )
