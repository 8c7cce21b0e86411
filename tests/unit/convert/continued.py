"""What each rank of a run does that another program began. A file of its own: ranks import it without transformers."""

from __future__ import annotations

from unittest.mock import patch

from megalite import strangers
from megalite.comm import World
from megalite.config.cli import parse
from megalite.train.run import open_run
from megalite.train.starting_point import offer_of
from tests.unit.convert.megatron_layout import HereInstead


def loaded_and_trained(world: World, argv: list[str], save: str, *, apart: bool = False) -> None:
    """Saves what was loaded, and again after an iteration. apart: pickles are opened in a process of their own, which
    imports torch once for each rank."""
    with patch.object(strangers, "Popen", strangers.Popen if apart else HereInstead):
        config = parse([*argv, "--save", save], world_size=world.size, read_offer=offer_of)
        with open_run(config, world) as run:
            run.state.save(run.trainer.progress)
            run.trainer.train_step(drain=True)
            run.state.save(run.trainer.progress)
