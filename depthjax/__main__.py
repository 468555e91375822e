"""`python -m depthjax` is the command `depthjax`."""

from depthjax.cli import main

if __name__ == "__main__":
    main()
