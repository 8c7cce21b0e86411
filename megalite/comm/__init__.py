"""Communication: the only folder that imports torch.distributed.

    launch.py       environment -> World, process group, local ranks (environment.py, world.py)
    supervisor.py   forks the ranks of one host, watches them and names the first that failed (rank_page.py)
    watch.py        the same for ranks that torchrun, srun, mpirun or a hand has started
    patience.py     work of one rank that may take longer than a collective waits
    self_test.py    at start: who is missing, whose configuration differs, is a sum right
    mesh.py         Axis and ParallelMesh: a parallel axis is a value, size 1 is legal everywhere; products of axes
    layout.py       TensorShard: every tensor knows its place
    collectives.py  collectives over an Axis; an axis of size 1 costs nothing and needs no process group
    autograd.py     the conjugate pairs f and g of Megatron-LM (arXiv 1909.08053) and of sequence
                    parallelism (arXiv 2205.05198)
    shared_memory.py  the same collectives between CPU ranks of one host,
                    without sockets
    p2p.py          channels between pipeline stages
    bandwidth.py    the local collective test of tools/doctor.py

Invariant: with every axis of size 1 nothing here touches a process group, so the single-process run is the reference
of every test.
"""
