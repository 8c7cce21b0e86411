"""megalite: a lean, pure-PyTorch framework for pretraining GPT models with Megatron-style parallelism."""

__version__ = "0.1.0"
