"""Bytes of saved activations and of weights, and how many of them a rank may hold: what `transfers.insert_transfers`
and `chunks.plan_chunks` plan with."""

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


class WeightChunks(NamedTuple):
    """Weights that live on the host and are on the device while they are used, a layer at a time. In bytes.

    sizes: stage -> its layers' weights. forward, backward: stage -> the layers whose weights each step of an F (or R),
    and of a B (or I), reads: usually one. gradients: stage -> what a backward sends to the host, and what it fetches
    from there. capacity: rank -> the most weights that it may hold; None: the layer in use and the next one.
    """

    sizes: tuple[tuple[int, ...], ...]
    forward: tuple[tuple[tuple[int, ...], ...], ...]
    backward: tuple[tuple[tuple[int, ...], ...], ...]
    gradients: tuple[tuple[int, int], ...]
    capacity: tuple[int, ...] | None = None
