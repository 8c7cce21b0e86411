"""Conversations with a model that was trained for them: by its own chat template, with its own sampling.

The template is a stranger's program: it is rendered within limits, in a process of its own (`megalite.data`), on the
first rank alone, since it may ask for the date.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from megalite.comm import all_gather_json
from megalite.data import ChatTemplate, Messages
from megalite.errors import ConfigError, DataError, MegaliteError
from megalite.generation import Sampling
from megalite.inference.loaded_model import LoadedModel

GENERATION = "generation_config.json"
#: What `Sampling` does not do, with the values that do nothing.
NOT_DONE: Mapping[str, tuple[Any, ...]] = {
    "repetition_penalty": (None, 1),
    "no_repeat_ngram_size": (None, 0),
    "min_p": (None, 0),
    "typical_p": (None, 1),
    "num_beams": (None, 1),
    "penalty_alpha": (None, 0),
    "stop_strings": (None, []),
    "suppress_tokens": (None, []),
    "bad_words_ids": (None, []),
}
#: transformers' own where generation_config.json says nothing.
USUAL = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}


def chat_template(loaded: LoadedModel, asked: str) -> ChatTemplate:
    """The template of the model's tokenizer; `asked` names what needs it. Raises DataError where there is none,
    ConfigError where a program of the model's maker would have to run."""
    if loaded.tokenizer.kind != "HuggingFaceTokenizer":
        raise DataError(f"{asked}: {loaded.path} has a {loaded.tokenizer.kind}, which has no chat template")
    return ChatTemplate(loaded.tokenizer, str(loaded.path), asked=asked, flag="`load`")


def chat_prompts(loaded: LoadedModel, template: ChatTemplate | None, talks: Sequence[Messages]) -> list[list[int]]:
    """Tokens of conversations that wait for an answer. Collective; template: on the first rank. Raises DataError, on
    all ranks, where the template does not take one."""
    ids: list[list[int]] = []
    problem = None
    if template is not None:
        try:
            ids = template.prompts(talks)
        except MegaliteError as error:
            problem = str(error)
    ids, problem = all_gather_json([ids, problem], loaded.mesh.world)[0]
    if problem is None and not all(ids):
        problem = "the chat template writes nothing"
    if problem is not None:
        raise DataError(f"`load`={loaded.path}: {problem}")
    return ids


def model_sampling(loaded: LoadedModel, given: Mapping[str, Any], seed: int) -> tuple[Sampling, list[str]]:
    """How the model's generation_config.json chooses tokens, with what is `given` in place of that; and the settings of
    that file which are not applied, as text. Raises ConfigError for values that are none."""
    said = loaded.origin.generation or {}
    ignored = [f"{name} {said[name]}" for name, neutral in NOT_DONE.items() if said.get(name) not in neutral]
    if given.get("greedy"):
        return Sampling(**given, seed=seed), ignored
    draws = said.get("do_sample") is True
    if not draws and not given and loaded.origin.generation is not None:
        return Sampling(greedy=True, seed=seed), ignored
    values = {name: _number(said, name, usual) for name, usual in USUAL.items()} if draws else {}
    return Sampling(**values | dict(given), seed=seed), ignored


def _number(said: Mapping[str, Any], name: str, usual: float) -> float:
    """Null switches a choice off."""
    value = said.get(name, usual)
    if value is None:
        return {"top_k": 0}.get(name, 1.0)
    if type(value) not in ((int,) if name == "top_k" else (int, float)):
        raise ConfigError(f"`{name}`={str(value)[:40]} in the model's {GENERATION}: is no number; give the setting")
    number: float = value
    return number
