"""Conversion: a checkpoint becomes a Hugging Face model and vice versa, streamed, on a CPU, in one process.

    config.json  <->  ModelConfig            one declarative name map a family
    tensors      <->  logical tensors        q, k, v <-> grouped rows; gate, up <-> [2, f, h]

    family.py           what a family is: rules (names and form of tensors) and its config.json
    llama.py            Llama 2/3, Mistral, Qwen2, Qwen3
    gpt2.py, gpt_neox.py
    registry.py         all families; which one a model is
    rotary.py           RoPE and its scalings in config.json
    source.py           what is converted: a model that gives its tensors one by one
    fields.py           typed reading of an untrusted config.json
    hf_files.py         a Hugging Face directory: read tensor by tensor, written shard by shard
    megalite_files.py   a committed checkpoint: read tensor by tensor, written file by file
    base_model.py, adapters.py   the model beside adapters (LoRA); merged with it, or as peft keeps them
    tokenizer_files.py  the tokenizer's files of either side
    megatron.py         Megatron-LM: names of both generations, `args`; megatron_cuts.py: cuts over ranks
    megatron_experts.py its experts: three ways to name them, dealt out over ranks
    megatron_files.py   its mp_rank_XX/model_optim_rng.pt, read rank by rank; megatron_writing.py: written
    megatron_process.py, megatron_unpickle.py   the process that opens its pickles, weights-only; what crosses is bytes

To add a family: a file like `llama.py` with its rules and its config.json, and an entry of `FAMILIES` in `registry.py`
(CONTRIBUTING, "Adding a converter").

Public: `FAMILIES`, `family_of`, `HuggingFaceSource`, `CheckpointSource`, `MegatronSource`, `write_huggingface`,
`write_checkpoint`, `write_megatron`.

Invariants: no tensor is computed with, only renamed, cut and put together, so every round trip is bit-equal; what the
other side cannot represent is refused, never left out; nothing that is read is executed. Memory: one layer (megalite),
one shard (Hugging Face) or one rank's file (Megatron-LM). Proved by tests/unit/convert/ against transformers.
"""

from megalite.convert.adapters import AdaptedSource, open_checkpoint, write_peft
from megalite.convert.base_model import BASE_META, BaseModel
from megalite.convert.family import HuggingFaceFamily
from megalite.convert.hf_files import CONFIG, HuggingFaceSource, write_huggingface
from megalite.convert.megalite_files import CheckpointSource, write_checkpoint
from megalite.convert.megatron_files import MegatronSource
from megalite.convert.megatron_writing import write_megatron
from megalite.convert.registry import FAMILIES, family_of
from megalite.convert.source import ModelSource, stored_shapes
