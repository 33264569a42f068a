"""Set the number of torch's threads: several for the model, and one for each thread that prepares images."""

from concurrent.futures import ThreadPoolExecutor


def use_threads(count: int) -> None:
    """Let torch compute with this number of threads in the calling thread.

    `torch.set_num_threads` is not enough. Until its first computation, a thread takes the number that any thread set
    last.
    """
    import torch

    torch.set_num_threads(count)
    torch.get_num_threads()  # from this call on, the calling thread keeps its number


def preparing_threads(count: int) -> ThreadPoolExecutor:
    """Return a pool of threads that prepare images. Torch computes in each of them without starting further threads.

    PyTorch's DataLoader does the same in its workers. Otherwise, each thread of the pool starts OpenMP threads of its
    own. If a process then has more of them than the machine has cores, OpenMP puts all threads to sleep between
    operations instead of letting them spin, including those of the model. On two cores, a step of the embedded model
    then takes 1.4 times as long.

    The calling thread keeps its number of threads.
    """
    import torch

    torch.get_num_threads()  # see `use_threads`
    return ThreadPoolExecutor(count, thread_name_prefix="prepare", initializer=use_threads, initargs=(1,))
