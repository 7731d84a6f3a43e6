"""The Hugging Face architectures that a decoder can be, each a table in a file of its own.

A model that was not read from a config.json is written as the first of them that can say it.
"""

from meshwright.models.decoder.architectures.deepseek_v3 import DEEPSEEK_V3
from meshwright.models.decoder.architectures.gemma2 import GEMMA2
from meshwright.models.decoder.architectures.gemma3 import GEMMA3
from meshwright.models.decoder.architectures.gpt2 import GPT2
from meshwright.models.decoder.architectures.gpt_neox import GPT_NEOX
from meshwright.models.decoder.architectures.gpt_oss import GPT_OSS
from meshwright.models.decoder.architectures.gptj import GPTJ
from meshwright.models.decoder.architectures.granite import GRANITE
from meshwright.models.decoder.architectures.llama import LLAMA
from meshwright.models.decoder.architectures.mistral import MISTRAL
from meshwright.models.decoder.architectures.mixtral import MIXTRAL
from meshwright.models.decoder.architectures.olmo2 import OLMO2
from meshwright.models.decoder.architectures.olmoe import OLMOE
from meshwright.models.decoder.architectures.opt import OPT
from meshwright.models.decoder.architectures.phi3 import PHI3
from meshwright.models.decoder.architectures.qwen2 import QWEN2
from meshwright.models.decoder.architectures.qwen3 import QWEN3
from meshwright.models.decoder.architectures.qwen3_moe import QWEN3_MOE
from meshwright.models.decoder.architectures.smollm3 import SMOLLM3

ARCHITECTURES = (
    LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, OLMO2, GRANITE, SMOLLM3, GPT2, OPT, GPT_NEOX,
    GPTJ, GEMMA2, GEMMA3, MIXTRAL, QWEN3_MOE, OLMOE, GPT_OSS, DEEPSEEK_V3,
)  # fmt: skip
