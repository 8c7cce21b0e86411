"""Text from a model that is spread over ranks: forwards only, token after token, with caches on every stage.

::

    requests -> groups (groups.py) -> a program of forwards (megalite.schedule.decode) -> stages (stages.py) -> tokens
                   ^                                                                                             |
                   +------------------------------- engine.py: episode after episode <---------------------------+

    sampling    how a token is chosen: keyed noise instead of a generator, over a vocabulary that ranks share
    prompts     what is to be continued
    groups      sequences of different lengths side by side; how much of its text a sequence sees
    stages      what a stage of the model does with a group: prompt, then one token a round
    engine      slots that groups take and leave, what ranks tell each other

Invariant: which token follows depends on (weights, text, seed, number of the prompt) and on no layout, batch or order.
Proof: `tests/equivalence/test_generation_layouts.py`, `tests/unit/generation/`.
"""

from megalite.generation.engine import Generator, OnTokens
from megalite.generation.groups import Request
from megalite.generation.prompts import check_whole, prompt_ids, read_prompts, read_talks, said
from megalite.generation.sampling import Sampling, pick_tokens
from megalite.generation.stages import ModelParts
