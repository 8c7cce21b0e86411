"""Fine-tuning with adapters in the model section: low-rank ones (LoRA, arXiv 2106.09685), layers behind attention and
MLP (bottleneck, arXiv 1902.00751), learned keys and values in front of the text (prefix, arXiv 2101.00190).

A linear layer consists of parts that may have an adapter each. Users know them by the names of Megatron's layers, or of
those of Hugging Face's models, which `peft` takes:

    query/key/value     linear_qkv, c_attn (one adapter for all rows); q_proj, k_proj, v_proj (one each)
    MLP, up             linear_fc1, c_fc (one, with the gate); gate_proj, up_proj (one each)
"""

from collections.abc import Mapping, Sequence

from megalite.config.schema import Spelled, option

ALL_LINEAR = "all-linear"
TARGETS: Mapping[str, tuple[str, ...]] = {
    ALL_LINEAR: (),  # every linear layer of a block, with as many adapters as it has parts in Hugging Face's models
    "linear_qkv": ("qkv",),
    "linear_q": ("q",),
    "linear_k": ("k",),
    "linear_v": ("v",),
    "linear_proj": ("proj",),
    "linear_fc1": ("fc1",),
    "linear_fc1_gate": ("gate",),
    "linear_fc1_up": ("up",),
    "linear_fc2": ("fc2",),
    "q_proj": ("q",),
    "k_proj": ("k",),
    "v_proj": ("v",),
    "o_proj": ("proj",),
    "gate_proj": ("gate",),
    "up_proj": ("up",),
    "down_proj": ("fc2",),
    "c_attn": ("qkv",),
    "c_proj": ("proj", "fc2"),
    "c_fc": ("fc1",),
    "query_key_value": ("qkv",),
    "dense": ("proj",),
    "dense_h_to_4h": ("fc1",),
    "dense_4h_to_h": ("fc2",),
}
TOGETHER: Mapping[str, tuple[str, ...]] = {"qkv": ("q", "k", "v"), "fc1": ("gate", "up")}
"""One adapter for a whole layer, and those of its parts, which exclude it."""


class Lora(Spelled, flag="lora", needs="lora_rank"):
    """adapters (LoRA and others), which are trained in place of the model; they are saved apart"""

    lora_rank: int | None = option(
        None,
        "rank R of the adapters beside linear layers, width of a bottleneck, length of a prefix; all else is frozen; "
        "unset: the model is trained",
        ge=1,
    )
    adapter_kind: str = option(
        "lora",
        "what adapters are: products beside matrices (lora), layers behind attention and MLP (bottleneck), keys and "
        "values in front of the text (prefix)",
        choices=("lora", "bottleneck", "prefix"),
        arg="kind",
    )
    lora_alpha: float | None = option(None, "what an adapter computes is multiplied by this / R; unset: R", gt=0)
    lora_targets: tuple[str, ...] = option(
        (ALL_LINEAR,),
        "layers with adapters, named as in Megatron (linear_qkv, linear_proj, linear_fc1, linear_fc2) or as peft takes "
        "them (q_proj, v_proj, ...; c_attn, ...); all-linear: every one of the blocks",
        metavar="NAME",
    )
    lora_shared_a: bool = option(
        False, "experts of a layer share the matrix A of their adapters, and each has its own B", alone="true"
    )

    frozen_weights_int8: bool = option(
        False,
        "frozen matrices of blocks are held in 8 bits, a scale for each row, and dequantised where they are multiplied",
        arg="int8",
        alone="true",
    )

    @property
    def prefix(self) -> int:
        """Learned keys in front of each text."""
        return (self.lora_rank or 0) * (self.adapter_kind == "prefix")

    @property
    def scale(self) -> float:
        """alpha / R."""
        return 1.0 if self.lora_alpha is None or self.lora_rank is None else self.lora_alpha / self.lora_rank

    def words(self, beside: Sequence[str]) -> str:
        """`adapters of rank 8, factor 1, beside fc1`."""
        if self.adapter_kind == "lora":
            return f"adapters of rank {self.lora_rank}, factor {self.scale:g}, beside {', '.join(beside)}"
        what = "bottlenecks of width" if self.adapter_kind == "bottleneck" else "keys in front of each text:"
        return f"{what} {self.lora_rank}"

    def parts(self, *, apart: bool, sparse: bool = False) -> tuple[str, ...]:
        """Parts that have an adapter, in order, without unknown names. apart: what `all-linear` means for queries,
        keys and values, and for gate and value: one adapter each. sparse: of a block with experts, whose gate and
        value have one."""
        if self.lora_rank is None:
            return ()
        if self.adapter_kind != "lora":
            return (self.adapter_kind,)
        up = ("gate", "up") if apart and not sparse else ("fc1",)
        targets = {**TARGETS, ALL_LINEAR: (*(("q", "k", "v") if apart else ("qkv",)), "proj", *up, "fc2")}
        return tuple(sorted({part for name in self.lora_targets for part in targets.get(name, ())}))
