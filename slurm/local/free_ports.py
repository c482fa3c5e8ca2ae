"""Prints the first of N ports in a row that are free on this machine: free_ports.py N."""

import random
import socket
import sys
from contextlib import ExitStack


def main() -> None:
    """Try rows at random, below the range from which the kernel gives ports to clients."""
    count = int(sys.argv[1])
    while True:
        first = random.randrange(20000, 32000)
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("", port))
            except OSError:
                continue
        print(first)
        return


if __name__ == "__main__":
    main()
