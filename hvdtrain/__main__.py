"""`python -m hvdtrain` is the same program as `hvdtrain`."""

from hvdtrain.cli import main

if __name__ == "__main__":
    main()
