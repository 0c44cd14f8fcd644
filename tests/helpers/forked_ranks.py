"""Ranks as forks of a process that has imported a large library. Call it before any thread has been started there."""

import multiprocessing
import os
import signal
import sys
import traceback
import warnings

import torch.distributed as dist


def _rank(run, rank, world, store, answers, arguments):
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    dist.init_process_group("gloo", store=dist.FileStore(str(store), world), rank=rank, world_size=world)
    warnings.simplefilter("ignore")
    try:
        answers.put((rank, None, run(*arguments)))
    except BaseException:
        answers.put((rank, traceback.format_exc(), None))
        raise


def _start(world, folder, run, arguments):
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    store = folder / f"store-{len(list(folder.glob('store-*')))}"
    ranks = [context.Process(target=_rank, args=(run, rank, world, store, answers, arguments)) for rank in range(world)]
    for each in ranks:
        each.start()
    return ranks, answers


def kill_ranks(world, folder, run, *arguments):
    """Run a function on each rank, and return how each ended: a negative signal, or 1 after an error."""
    ranks, _ = _start(world, folder, run, arguments)
    for each in ranks:
        each.join(300)
        each.kill()
    return [each.exitcode for each in ranks]


def kill_fork(run, *arguments):
    """Call a function in a fork that is killed."""
    process = multiprocessing.get_context("fork").Process(target=run, args=arguments)
    process.start()
    process.join(300)
    process.kill()
    assert process.exitcode == -signal.SIGKILL


def die_at(event, matches):
    """Kill this process at the first audit event for which `matches(*its arguments)` is true."""

    def hook(name, arguments):
        if name == event and matches(*arguments):
            os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()

    sys.addaudithook(hook)


def fork_ranks(world, folder, run, *arguments):
    """Run a function on each rank, and return what each returned, in order. `folder` holds the store."""
    ranks, answers = _start(world, folder, run, arguments)
    try:
        got = sorted(answers.get(timeout=300) for _ in ranks)
        for each in ranks:
            each.join(20)
    finally:
        for each in ranks:
            if each.is_alive():
                each.kill()
    failures = [f"rank {rank}:\n{text}" for rank, text, _ in got if text]
    assert not failures, "\n".join(failures)
    return [answer for _, _, answer in got]
