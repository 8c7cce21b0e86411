"""Attention: the layer, one function that chooses a kernel, and the kernels.

layer.py      `Attention`: projections, norms and rotary positions around the core; a gate behind the heads
latent.py     `LatentAttention`: keys and values from one small vector a token
core.py       `AttentionCore`: softmax(q k^T) v of the heads on this rank; the library's kernel for plain causal ones
context.py    the same where ranks share a sequence; cached.py: in generation
choose.py     what is needed -> which kernel; the limits of each, and the proof that it works here
tiles.py      every kind of mask, by tiles, on every device
blocked.py    plain causal attention on CPUs, up to a thousand tokens
masked.py     documents, windows, caps, sinks and dropout on a GPU
largest.py    each head's largest score, for `--qk-clip`
flash.py      parts of a ring by the library's kernels; parts.py: those with any of these
"""
