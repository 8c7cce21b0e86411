"""What a model consists of, without a tensor: parameters and their places, the flat buffers that hold them.

`placement` says which rectangle of its logical tensor a parameter is; `buckets` lays parameters into flat buffers. The
trainer builds from these values and the planner counts them, so that neither has a copy of the other's arithmetic.
"""
