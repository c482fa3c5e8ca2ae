"""Print the first of N consecutive ports that are free on this machine: free_ports.py N."""

import random
import socket
import sys
from contextlib import ExitStack


def main() -> None:
    """Try random ranges below the kernel's range of ephemeral ports."""
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
