"""Flags that take several settings of one thing by name: `--wandb project=lm entity=us`, `--offload optimizer params`.

The command line has the flag `--NAME ARGUMENT=VALUE ...` (commas do, too); a file has `NAME: {ARGUMENT: VALUE}` or a
list of such words. Each argument sets a field, whose own name (often Megatron-LM's flag) is an accepted spelling of it.
A section that is such a flag says so itself, and its docstring begins with the flag's help::

    class WandB(Spelled, flag="wandb", needs="wandb_project")
"""

import functools
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from megalite.config.optimizer import OptimizerArgs
from megalite.config.root import all_options
from megalite.errors import flag_of


@dataclass(frozen=True)
class ArgumentFlag:
    """One such flag.

    help: what the arguments are about.
    fields: argument -> the field that it sets.
    switch: the switch that the flag turns on.
    apart: fields that have a flag of their own in `--help`, too.
    """

    help: str
    fields: dict[str, str]
    switch: str | None = None
    apart: tuple[str, ...] = ()


_OF_SEVERAL: Mapping[str, ArgumentFlag] = {
    "skip_freq": ArgumentFlag(
        "layers that do without something: N, every N-th, or a list",
        {
            "window": "window_attn_skip_freq",
            "rope": "no_rope_freq",
            "softmax_type": "softmax_type_skip_freq",
            "softcapping": "attn_logit_softcapping_skip_freq",
        },
    ),
    "softcapping": ArgumentFlag(
        "soft caps c: x becomes c tanh(x / c) (Gemma 2)",
        {"attention": "attn_logit_softcapping", "final": "final_logit_softcapping"},
    ),
    "glu": ArgumentFlag(
        "what is done to gate and value of a gated MLP before they are multiplied",
        {"linear_offset": "glu_linear_offset", "clamp_value": "activation_func_clamp_value"},
    ),
    "moe_router": ArgumentFlag(
        "how the router chooses and weighs experts, and what carries tokens to them",
        {
            "score_function": "moe_router_score_function",
            "pre_softmax": "moe_router_pre_softmax",
            "num_groups": "moe_router_num_groups",
            "group_topk": "moe_router_group_topk",
            "topk_scaling_factor": "moe_router_topk_scaling_factor",
            "bias": "moe_router_bias",
            "expert_bias": "moe_router_enable_expert_bias",
            "bias_update_rate": "moe_router_bias_update_rate",
            "dispatcher": "moe_token_dispatcher_type",
        },
    ),
    "optimizer_args": ArgumentFlag(
        "numbers of single optimizers",
        {**{field.name: field.name for field in fields(OptimizerArgs)}, "impl": "optimizer_impl"},
        apart=("adam_beta1", "adam_beta2", "adam_eps"),
    ),
    "optimizer_state": ArgumentFlag(
        "how moments and masters are kept",
        {
            "exp_avg_dtype": "exp_avg_dtype",
            "exp_avg_sq_dtype": "exp_avg_sq_dtype",
            "param_remainders": "store_param_remainders",
        },
    ),
    "offload": ArgumentFlag(
        "what lives in host memory or in files, to make room on the device",
        {
            "optimizer": "optimizer_cpu_offload",
            "fraction": "optimizer_offload_fraction",
            "path": "optimizer_offload_path",
            "params": "param_offload",
            "activations": "cpu_offloading_num_layers",
            "embedding": "embedding_offload",
            "lookahead": "embedding_lookahead",
            "cache_rows": "embedding_cache_rows",
        },
    ),
    "dry_run": ArgumentFlag(
        "check everything, print the settings that are not defaults, sizes, memory and schedule, and exit",
        {"all": "dry_run_all"},
        switch="dry_run",
    ),
}
"""Flags whose fields are not those of one section, or stand there in another order."""


@functools.cache
def argument_flags() -> Mapping[str, ArgumentFlag]:
    """All of them by name. A section with the fact `flag` gives its fields as arguments: by the fact `arg`, or by
    their names without `prefix` (or that of the flag), and its docstring as the help."""
    found = dict(_OF_SEVERAL)
    switches = {each.facts["switch"]: each.name for each in all_options().values() if "switch" in each.facts}
    for option in all_options().values():
        flag = option.facts.get("flag")
        if flag is None or "switch" in option.facts:
            continue
        if flag not in found:
            text, _, _ = inspect.cleandoc(str(option.spells.__doc__)).partition("\n\n")
            found[flag] = ArgumentFlag(text.replace("\n", " "), {}, switches.get(flag))
        short = option.name.removeprefix(option.facts.get("prefix", f"{flag}_"))
        found[flag].fields[option.facts.get("arg", short)] = option.name
    return found


@functools.cache
def places() -> Mapping[str, tuple[str, str]]:
    """Field -> its flag and argument; no argument where it is the switch of the flag."""
    found = {made.switch: (flag, "") for flag, made in argument_flags().items() if made.switch is not None}
    for flag, made in argument_flags().items():
        found |= {name: (flag, argument) for argument, name in made.fields.items() if name not in made.apart}
    return found


def shown_flag(name: str) -> str:
    """A field as `--help` spells it: `--wandb entity`."""
    flag, argument = places().get(name, (name, ""))
    return f"{flag_of(flag)} {argument}".rstrip()


def argument_words(flag: str, texts: list[str]) -> Iterator[tuple[str, str | None]]:
    """(Argument, text of its value or None) of `a=1,b c=2`; what begins with no argument belongs to the value before
    it, as the `2` of `ranks=0,2` does."""
    known, words = argument_flags()[flag].fields, list[str]()
    for separator, part in (found for text in texts for found in re.findall(r"([,\s]*)([^,\s]+)", text)):
        name = part.partition("=")[0].replace("-", "_")
        begins = name in known or (name != part and name.isidentifier())
        if not words or begins or "=" not in words[-1]:
            words.append(part)
        else:
            words[-1] += (separator or " ") + part
    for word in words:
        argument, equals, value = word.partition("=")
        yield argument.replace("-", "_"), value if equals else None
