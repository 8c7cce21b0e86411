"""What a model consists of, without a tensor. The trainer builds from these values and the planner counts them.

    layers.py       of each layer: parameters, matrix products, sums over the tensor axis; names, counts, FLOPs
    placement.py, families.py       which rectangle of its logical tensor a parameter is, which axes its family knows
    buckets.py      the flat buffers that hold parameters
    pieces.py       chunks of logits, blocks of queries, segments that are recomputed
    kept.py         bytes that a layer keeps until its backward, and that cross to the next stage
    pipeline.py     the program of a configuration, and which layers each stage holds

Proof: tests/unit/inventory compares `nn` with it over every family and flag, and makes blocks differ.
"""
