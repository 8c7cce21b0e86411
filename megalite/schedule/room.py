"""Bytes of saved activations, and how many of them a rank may hold: what `transfers.insert_transfers` plans with."""

from __future__ import annotations

from typing import NamedTuple


class ActivationRoom(NamedTuple):
    """In any unit of memory.

    full: stage -> what a micro-batch's forward keeps for its backward. weight_only: stage -> what is left of it between
    I and W. capacity: rank -> the most of both that it may hold while it computes.
    """

    full: tuple[float, ...]
    weight_only: tuple[float, ...]
    capacity: tuple[float, ...]
