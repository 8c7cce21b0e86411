"""Which model is it? What of the model section makes another function of the weights, and what a checkpoint offers.

A checkpoint (or a Hugging Face directory) knows its model. `--use-checkpoint-args` takes the architecture from it; the
parser gets an `Offer` through a function of a higher floor, which can read checkpoints.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from megalite.config.layer_pattern import pattern_text
from megalite.config.model import LAYER_PATTERNS, ModelConfig
from megalite.config.model_parts import Delta, Latent, RopeScaling
from megalite.config.mup import Mup
from megalite.config.reader import GivenOption
from megalite.config.root import Config
from megalite.config.schema import flat, options_of
from megalite.config.values import show
from megalite.errors import ConfigError

# Taken by --use-checkpoint-args as well, as in Megatron-LM, but a flag may say otherwise.
TAKEN_FREELY = ("model_type", "seq_length", "hidden_dropout", "attention_dropout")
# What YaRN alone reads.
YARN = ("yarn_beta_fast", "yarn_beta_slow", "yarn_correction_range_round_to_int", "mscale", "mscale_all_dim")
# Unset means: work it out from the others.
DERIVED = ("ffn_hidden_size", "moe_ffn_hidden_size", "num_query_groups", "kv_channels", "max_position_embeddings")
TOKENIZER = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")


def effective(model: ModelConfig) -> Mapping[str, Any]:
    """Field name -> what it amounts to, defaults applied; fields without effect on this model are None. Of a module of
    the user's own there is nothing to compare but its vocabulary: checkpoints know its tensors."""
    if model.is_foreign:
        return {"model_module": "the user's", "vocab_size": model.vocab_size}
    bound = {option.name for option in options_of("model", ModelConfig) if not option.facts.get("free")}
    values = {name: value for name, value in flat(model).items() if name in bound}
    values |= {"ffn_hidden_size": model.ffn_size, "num_query_groups": model.query_groups}
    values |= {"kv_channels": model.head_dim, "add_qkv_bias": model.has_qkv_bias}
    learned = model.position_embedding_type == "learned_absolute"
    values["max_position_embeddings"] = model.max_positions if learned else None
    if model.position_embedding_type != "rope":
        values |= {name: None for name in values if name.startswith("rotary_")}
        values |= {"use_rope_scaling": None, "window_rotary_base": None}
    elif model.window_rotary_base == model.rotary_base and model.rope_scaling == RopeScaling():
        values["window_rotary_base"] = None
    if model.query_multiplier is None:
        values["softmax_scale"] = None
    if model.embedding_multiplier == 1.0:
        values["embedding_multiplier"] = None
    if model.mixer == "latent":
        values |= {"kv_channels": None, "add_qkv_bias": None, "rotary_percent": None}
        values["latent_norm_epsilon"] = model.latent.latent_norm_epsilon or model.norm_epsilon
    else:
        values |= dict.fromkeys(flat(Latent()))
    if not model.mup.use_mup:
        values |= dict.fromkeys(flat(Mup()))
    elif model.mup.mup_base_hidden_size is None:
        values["mup_base_hidden_size"] = model.hidden_size
    if model.delta.experimental_attention_variant is None:
        values |= dict.fromkeys(flat(Delta()))
    for name in (name for name in LAYER_PATTERNS if values[name] is not None):
        with suppress(ConfigError):  # of a malformed one, which a rule reports
            layers = [model.listed(name, index) for index in range(model.num_layers)]
            values[name] = pattern_text(layers) if len(set(layers)) == 2 else None  # it makes no layers differ
    values["lora_alpha"] = None if model.lora.lora_rank is None else model.lora.scale * model.lora.lora_rank
    values["lora_targets"] = " ".join(model.adapted_parts) or None
    if not values["use_rope_scaling"]:
        values |= {"rope_scaling_factor": None, "rope_scaling_original_length": None, "rope_scaling_type": None}
    if not values["use_rope_scaling"] or model.rope_scaling.kind != "yarn":
        values |= dict.fromkeys(YARN)
    if model.experts.num_experts is None:
        values |= {name: None for name in values if name.startswith("moe_")}
    else:
        values["moe_ffn_hidden_size"] = model.expert_ffn_size
        if model.experts.moe_router_score_function == "sigmoid":
            values["moe_router_pre_softmax"] = None
        with suppress(ConfigError):
            sparse = model.sparse_layers
            values["moe_layer_freq"] = pattern_text(sparse)
            values |= {"ffn_hidden_size": None} if all(sparse) else {}
    return values


def architecture_differences(saved: ModelConfig, now: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Field name -> (what it amounts to now, what it amounts to in `saved`), where that is not the same. Adapters may
    be added to a model that has none."""
    theirs, ours = effective(saved), effective(now if saved.lora.lora_rank is not None else now.without_adapters)
    if saved.is_foreign != now.is_foreign:
        return {"model_module": (now.module.model_module, saved.module.model_module)}
    return {name: (ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]}


@dataclass(frozen=True)
class Offer:
    """What the checkpoint that a run begins with says about the model.

    where: how origins and messages name it. tokenizer: fields of the data section. huggingface: a model that no run
    of ours has trained: its tokenizer and the size of its vocabulary are taken without being asked for.
    """

    where: str
    model: ModelConfig
    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    huggingface: bool = False


ReadOffer = Callable[[str, int | None, bool, int | None], Offer | None]
"""(`--load`, `--ckpt-step`, `--trust-pickle`, `--vocab-size`) -> the offer; None where nothing is committed yet. Raises
MegaliteError."""


@dataclass(frozen=True)
class Offered:
    """An offer, what files and flags say alongside it, and whether users asked for its architecture
    (`--use-checkpoint-args`); else only the tokenizer and the size of the vocabulary are taken."""

    offer: Offer
    given: Mapping[str, GivenOption]
    architecture: bool

    @property
    def without_tokenizer(self) -> bool:
        """Whether it is a Hugging Face model whose directory has no tokenizer, and users named none."""
        numbers = self.offer.huggingface and self.offer.tokenizer.get("tokenizer_type") == "NullTokenizer"
        return numbers and not self._names_tokenizer

    @property
    def _names_tokenizer(self) -> bool:
        return any(name in self.given and self.given[name].value is not None for name in TOKENIZER)

    def values(self) -> dict[str, GivenOption]:
        """What the parser takes from it, as a level below what users gave; a tokenizer that they name is used."""
        model = self.offer.model
        values: dict[str, Any] = {"vocab_size": model.vocab_size}
        if self.architecture and model.is_foreign:
            values["seq_length"] = model.seq_length
        elif self.architecture:
            kind = self.given.get("moe_router_load_balancing_type")
            dense = model.experts.num_experts is None or (kind is not None and kind.value == "none")
            balance = () if dense else ("moe_router_load_balancing_type", "moe_aux_loss_coeff")
            values = {name: flat(model)[name] for name in (*effective(model), *TAKEN_FREELY, *balance)}
            values |= {name: value for name, value in effective(model).items() if name in DERIVED and value}
            values["max_position_embeddings"] = model.max_positions
        if not self._names_tokenizer:
            values |= self.offer.tokenizer
        return {name: GivenOption(name, name, value, self.offer.where) for name, value in values.items()}

    def contradictions(self, config: Config, known: Collection[str]) -> Iterator[str]:
        """Lines about values that make another model. known: names of fields that have no stand-in for a missing or
        broken value."""
        model, where = self.offer.model, self.offer.where
        if self.architecture and model.is_foreign and not config.model.is_foreign:
            name = model.module.model_module
            yield f"`use_checkpoint_args`: {where} has no code of its `model_module`={name}; give the flag"
            return
        family = self.given.get("model_type")
        if self.architecture and family is not None and family.value != model.model_type:
            yield f"`model_type`={family.value}: {where} has {model.model_type}; drop the flag"
        for name, (ours, theirs) in architecture_differences(model, config.model).items():
            flag = f"`{name}`={_text(ours)}"
            if self.architecture and name in self.given:
                yield f"{flag}: {where} has {_text(theirs)}; drop the flag, or `use_checkpoint_args`"
            elif not self.architecture and name in known:
                yield f"{flag}: {where} has {_text(theirs)}; give that, or `use_checkpoint_args`"


def is_left_open(given: GivenOption) -> bool:
    """Whether a file says of a field no more than that it is to be worked out (`ffn_hidden_size: null`)."""
    return (given.name in DERIVED and given.value is None) or (given.name == "vocab_size" and given.value == 0)


def new_positions(offer: Offer | None, model: ModelConfig) -> Iterator[str]:
    """A line where sequences are longer than those that the model, the offered one or as flags describe it, is for."""
    known = [positions] if (positions := model.max_position_embeddings) is not None else []
    if offer is not None and not model.is_foreign:
        known.append(offer.model.max_positions)
    if known and model.seq_length > min(known):
        yield (
            f"`seq_length`={model.seq_length}: the model is for {min(known)} positions (`max_position_embeddings`); "
            "further ones are new to it"
        )


def _text(value: Any) -> str:
    return "none" if value is None else show(value)
