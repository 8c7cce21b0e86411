"""FlashAttention 3, where it is installed: it takes the place of torch's own kernel on Hopper GPUs."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

import torch

from megalite.nn.attention.trials import flash_works

logger = logging.getLogger(__name__)

NEWER, PACKAGE, HOPPER = "FA3", "flash_attn_interface", 9


def use_newer_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Activates FlashAttention 3 for the rest of this process, if torch can, it is installed and its results are right;
    says so. Not for sums of one order (`--deterministic-mode`), which its backward does not have."""
    library: Any = torch.nn.attention
    listed = getattr(library, "list_flash_attention_impls", list)
    if device.type != "cuda" or NEWER not in listed() or find_spec(PACKAGE) is None:
        return False
    if torch.cuda.get_device_capability(device)[0] != HOPPER or torch.are_deterministic_algorithms_enabled():
        return False
    try:
        library.activate_flash_attention_impl(NEWER)
    except Exception as error:  # whatever a package of another version raises
        logger.warning("attention without FlashAttention 3, which cannot be activated: %s", error)
        return False
    flash_works.cache_clear()
    if flash_works(device, dtype):
        logger.info("attention by FlashAttention 3 (%s) on %s", PACKAGE, device)
        return True
    library.restore_flash_attention_impl()
    flash_works.cache_clear()
    logger.warning("attention without FlashAttention 3, whose results differ from those of tiles")
    return False
