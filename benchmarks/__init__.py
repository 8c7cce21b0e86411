"""Benchmarks that anyone can run: megalite beside what a user would pick instead, by turns, in one run.

    single.py       one device: a plain GPT of PyTorch's modules, transformers
    tensor.py       tensor and sequence parallelism: DTensor
    data.py         data parallelism and ZeRO, with peak memory: DDP, ZeroRedundancyOptimizer, FSDP2
    pipeline.py     schedules: torch.distributed.pipelining
    checkpoint.py   save, load, asynchronous save: torch.distributed.checkpoint
    tokens.py       tokenising, the sample index, the loader: tokenizers, datasets, NumPy, torch's DataLoader
    attention.py    the attention core: torch's fused attention, plain products
    context.py      a sequence shared by ranks: one process, torch's ring attention
    generation.py   texts of many sequences: a pipeline of groups beside one process
    experts.py      the sparse MLP of a block: a dense one of equal active FLOPs, transformers' Mixtral, one process

    harness.py      command line, records, ratios, the baseline; turns.py: ranks and timing
    megalite_step.py, plain_gpt.py      a training step of megalite; the reference model of the peers
    write_tables.py, results/           docs/performance.md's tables, and the records that they are written from
    shared_lab.py   megalite's variants for a peer benchmark that lives outside of this repository

Each of the nine runs alone: `python benchmarks/single.py [--quick] [--json OUT] [--check]`.

A ratio is the peer's time over ours, paired round by round: above 1 megalite is faster. `--check` compares the ratios
of `--quick` with `baseline.json`. Proof: `tests/cli/test_benchmarks.py`.
"""
