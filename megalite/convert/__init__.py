"""Conversion: a checkpoint becomes a Hugging Face model and vice versa, streamed, on a CPU, in one process.

    config.json  <->  ModelConfig            one declarative name map a family
    tensors      <->  logical tensors        q, k, v <-> grouped rows; gate, up <-> [2, f, h]

    source.py           what each side gives: a model, tensor by tensor
    Hugging Face        hf_files.py, hf_tokenizer.py, model_card.py; families: family.py, fields.py, registry.py
    megalite            megalite_files.py; origin.py: what a folder of Hugging Face's says, kept through training
    LoRA                adapters.py, peft.py
    Megatron-LM         megatron_files.py, megatron_dist.py, megatron_writing.py; megatron_state.py: moments, schedules
    torch, DeepSpeed    dcp_files.py, dcp_model.py
    pickles             megatron_unpickle.py, weights-only in a process of its own: what crosses is bytes

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
