"""Conversion: a checkpoint becomes a Hugging Face model and vice versa, streamed, on a CPU, in one process.

    config.json  <->  ModelConfig            one declarative name map a family
    tensors      <->  logical tensors        q, k, v <-> grouped rows; gate, up <-> [2, f, h]

    family.py           a family: rules (names and form of tensors) and its config.json; registry.py: all of them
    llama.py            Llama 2/3, Mistral, Qwen2, Qwen3, Mixtral, Qwen3-MoE, OLMoE, gpt-oss; gpt.py: GPT-2, GPT-NeoX
    norms_behind.py     Gemma 2 and 3, OLMo 2 and 3; deepseek.py: Kimi K2 and GLM, too; qwen3_next.py: Qwen3.5, too
    fields.py           typed reading of an untrusted config.json, with RoPE and its scalings
    source.py           a model that gives its tensors one by one
    origin.py           what its folder says besides, kept through training to the export
    hf_files.py         a Hugging Face directory: read tensor by tensor, written shard by shard
    hf_tokenizer.py     its tokenizer, special tokens and settings of generation; model_card.py: its README.md
    megalite_files.py   a committed checkpoint: read tensor by tensor, written file by file
    adapters.py         LoRA adapters: their base model, merged with it, or as peft keeps them
    peft.py             such adapters of peft: read with their Hugging Face model as one, written of a run
    megatron_names.py   Megatron-LM: names of both generations, cuts over ranks; megatron_args.py: its settings
    megatron_files.py   its mp_rank_XX/model_optim_rng.pt, read rank by rank
    dcp_files.py        directories of torch.distributed.checkpoint, and DeepSpeed's universal ones
    dcp_model.py        models and moments in both
    megatron_dist.py    Megatron's torch_dist, one of them; megatron_writing.py: both written
    megatron_state.py   what a run has left there beside its weights: masters, moments, schedules; in and out
    megatron_process.py, megatron_unpickle.py   the process that opens its pickles, weights-only; what crosses is bytes

To add a family: CONTRIBUTING, "Adding a converter".

Invariants: no tensor is computed with (but in means), only renamed, cut and put together, so every round
trip is bit-equal; what the other side cannot represent is refused, never left out; nothing that is read is executed.
Memory: one layer (megalite), one shard (Hugging Face) or one rank's file (Megatron-LM). Proved
by tests/unit/convert/ against transformers.
"""

from megalite.convert.adapters import AdaptedSource, BaseModel, open_checkpoint
from megalite.convert.dcp_model import CONTINUED, DcpSource, DcpState, write_dcp
from megalite.convert.hf_files import CONFIG, HuggingFaceSource, write_huggingface
from megalite.convert.hf_tokenizer import stop_tokens
from megalite.convert.megalite_files import BASE_META, CheckpointSource, MergedSource, write_checkpoint
from megalite.convert.megatron_dist import MegatronDistSource, open_distributed, open_megatron
from megalite.convert.megatron_state import KeptState, state_of
from megalite.convert.megatron_writing import write_megatron, write_torch_dist
from megalite.convert.origin import ORIGIN_META, Origin, is_hub_id
from megalite.convert.peft import PeftSource, is_peft, write_peft
from megalite.convert.source import ModelSource, TrainedRun, stored_shapes
