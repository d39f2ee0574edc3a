"""The shape of somebody's extraction with speculators 0.3: workers of their own, one a rank, and a list of .pt files.

The worker is a class of `custom_worker`, found by its name; what it raises is passed on as its message alone.
"""

import argparse
import importlib
import multiprocessing
import os
import sys


def worker_main(rank: int, requests: "multiprocessing.Queue", answers: "multiprocessing.Queue") -> None:
    os.environ["RANK"] = str(rank)
    worker = importlib.import_module("custom_worker").HiddenStatesWorker(rank)
    while (request := requests.get()) is not None:
        try:
            worker.extract(*request)
        except Exception as error:
            answers.put((rank, str(error)))
            raise
        answers.put((rank, None))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", required=True)
    parser.add_argument("--samples", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    queues = [context.Queue() for _ in range(arguments.ranks)]
    workers = [
        context.Process(target=worker_main, args=(rank, queue, answers), name=f"VllmWorker-{rank}", daemon=True)
        for rank, queue in enumerate(queues)
    ]
    for worker in workers:
        worker.start()
    for index in range(arguments.samples):
        for queue in queues:
            queue.put((index, arguments.output_dir))
        for _ in queues:
            rank, error = answers.get()
            if error is not None:
                workers[rank].join()
                print(f"Error: {error}")
                return 1
        print(f"\rExtracting: {index + 1}/{arguments.samples} [00:01<00:00]", end="", flush=True)
    for queue in queues:
        queue.put(None)
    for worker in workers:
        worker.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
