"""Set-up of an environment: the MPI, mpi4py, and a Horovod built for its frameworks.

Nothing in this package needs more than Python's own library, so that `python -m hvdtrain.setup`
works where nothing else is installed yet.
"""
