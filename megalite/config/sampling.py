"""How generation chooses the next token: the flags of tools/generate_text.py, judged without torch."""

from dataclasses import dataclass

from megalite.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen; field names are the flags of tools/generate_text.py.

    greedy: the most likely token, always.
    temperature: divides the logits; 0 is greedy.
    top_k: only the k most likely tokens, 0 for all; with equal ones at the end of the list, all of these.
    top_p: only the most likely tokens that together reach probability p (nucleus sampling, arXiv 1904.09751).
    seed: of the draws.
    Raises ConfigError where a value is out of its range, or `greedy` comes with one that it makes meaningless.
    """

    greedy: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1234

    def __post_init__(self) -> None:
        problems = []
        if not self.temperature >= 0:
            problems.append(f"`temperature`={self.temperature:g}: must be >= 0 (0: the most likely token, as `greedy`)")
        if self.top_k < 0:
            problems.append(f"`top_k`={self.top_k}: must be >= 0 (0: all tokens)")
        if not 0 < self.top_p <= 1:
            problems.append(f"`top_p`={self.top_p:g}: must be above 0 and at most 1 (1: all tokens)")
        if not -(2**63) <= self.seed < 2**64:
            problems.append(f"`seed`={self.seed}: must be below 2^64; choose a smaller one")
        if self.greedy and (self.temperature not in (0.0, 1.0) or (self.top_k, self.top_p) != (0, 1.0)):
            problems.append("`greedy`: leaves no choice to `temperature`, `top_k` and `top_p`; drop one or the other")
        if problems:
            raise ConfigError(problems)
